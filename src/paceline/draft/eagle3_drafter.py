"""The EAGLE-3 drafter: kept warm by every target step, and chains of draft steps.

Does not know how the head is computed (`PagedHead`), pages, or how a draft is drawn from logits (`Choose`).
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from paceline.draft.paged_head import PagedHead
from paceline.draft.protocol import NO_DRAFT, Choose, Round, Settled


class Eagle3Drafter:
    """A `Drafter` over a head whose K/V follows the target's pages.

    A row of length n drafts from (x_n, feature of position n - 1). K/V and feature come from the step that
    settled the position, whatever its depth was: a row may draft after any number of plain steps.
    """

    def __init__(self, head: PagedHead) -> None:
        self._head = head
        self._vocabulary = head.vocabulary

    @property
    def capture(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self._head.capture

    def settle(self, settled: Settled) -> None:
        """See `Drafter`."""
        self._head.settle(settled)

    def wait(self) -> None:
        """See `Drafter`."""
        self._head.wait()

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`. A step reads the token drawn in the one before it; NO_DRAFT as token 0."""
        rows, token_ids, positions = drafting.rows, drafting.token_ids, drafting.lengths - 1
        depths = drafting.depths
        chosen: list[torch.Tensor] = []
        for step in range(depths[0]):
            if step:
                positions = positions + 1
                token_ids = token_ids.clamp(min=0)
                if depths[len(rows) - 1] <= step:  # some rows end here
                    count = drafting.num_at(step)
                    rows, positions, token_ids = rows[:count], positions[:count], token_ids[:count]
            logits = self._head.step(rows, token_ids, positions, drafting.longest - 1 + step, step > 0)
            token_ids = choose(step, logits, self._vocabulary)
            chosen.append(token_ids)
        return _side_by_side(chosen)


def _side_by_side(chosen: list[torch.Tensor]) -> torch.Tensor:
    """Drafts int64 [B, D] of the tokens that the first rows chose in each step: int64 [B_j], with B_0 = B."""
    num_rows = len(chosen[0])
    if len(chosen[-1]) == num_rows:
        return torch.stack(chosen, 1)
    return torch.stack([pad(x, (0, num_rows - len(x)), value=NO_DRAFT) for x in chosen], 1)
