"""The EAGLE-3 drafter: one feature for each row, kept warm by every target step, and chains of draft steps.

Does not know how the head is computed (`PagedHead`), pages, or how a draft is drawn from logits (`Choose`).
"""

from __future__ import annotations

import torch

from paceline.draft.paged_head import PagedHead
from paceline.draft.protocol import NO_DRAFT, Choose, Round, Settled


class Eagle3Drafter:
    """A `Drafter` over a head whose K/V follows the target's pages.

    A row of length n drafts from (x_n, feature of position n - 1). K/V and feature come from the step that
    settled the position, whatever its depth was: a row may draft after any number of plain steps.
    """

    def __init__(self, head: PagedHead, num_rows: int, device: torch.device) -> None:
        self._head = head
        self._vocabulary = head.vocabulary
        self._features = torch.zeros(num_rows, head.hidden_size, device=device)

    @property
    def capture(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self._head.capture

    def settle(self, settled: Settled) -> None:
        """See `Drafter`."""
        h = self._head.settle(settled)
        # index_select, not [...]: indexing wakes torch's threads from 3,277 numbers on; see `ModelWorker`.
        self._features.index_copy_(0, settled.rows, h.index_select(0, settled.last))

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`. A step reads the token drawn in the one before it; NO_DRAFT as token 0."""
        rows, token_ids = drafting.rows, drafting.token_ids
        h, positions = self._features.index_select(0, rows), drafting.lengths - 1
        depth = drafting.depths[0]
        drafts = token_ids.new_full((len(rows), depth), NO_DRAFT)
        for step in range(depth):
            if step:
                count = drafting.num_at(step)
                rows, h, positions = rows[:count], h[:count], positions[:count] + 1
                token_ids = token_ids[:count].clamp(min=0)
            logits, h = self._head.step(rows, token_ids, h, positions)
            token_ids = choose(step, logits, self._vocabulary)
            drafts[: len(token_ids), step] = token_ids
        if depth == 1:
            return drafts
        return drafts.masked_fill_((drafts == NO_DRAFT).cumsum(1) > 0, NO_DRAFT)
