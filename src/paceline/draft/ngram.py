"""Prompt lookup: what followed the row's newest tokens where they stood before. Any model, no state.

Does not know the target or its probabilities: drafts are read, not drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.draft.protocol import NO_DRAFT, Choose, Round, Settled

Lookup = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int], torch.Tensor]


class NgramDrafter:
    """A `Drafter` over the rows' histories.

    Of the suffixes of a row's known tokens, `min_n` to `max_n` long, the longest that stood before counts,
    and of its places the most recent. What followed it is proposed, over and over where the depth goes beyond
    the newest token: the text has begun to repeat itself then.

    Args:
        token_ids: int64 [rows, max_len + 1], the rows' tokens; read anew at every call.
        min_n, max_n: 1 <= min_n <= max_n.
    """

    capture = ()

    def __init__(self, token_ids: torch.Tensor, min_n: int, max_n: int) -> None:
        assert 1 <= min_n <= max_n
        self._token_ids, self._min_n, self._max_n = token_ids, min_n, max_n
        self._lookup: Lookup = look_up
        if token_ids.device.type == "cpu":
            from paceline.draft.ngram_cpu import look_up_cpu  # numba, which other devices do without

            self._lookup = look_up_cpu

    def settle(self, settled: Settled) -> None:
        """See `Drafter`. The history is the worker's own."""

    def wait(self) -> None:
        """See `Drafter`."""

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`. `choose` is not asked."""
        rows, lengths, depth = drafting.rows, drafting.lengths, drafting.depths[0]
        return self._lookup(self._token_ids, rows, lengths, depth, self._min_n, self._max_n)


def look_up(
    token_ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, depth: int, min_n: int, max_n: int
) -> torch.Tensor:
    """Drafts int64 [B, depth] for rows [B] whose newest known token is number `lengths` [B], from 0.

    On the tensors' device, without waiting for it: every place of the history is compared.
    """
    history = token_ids.index_select(0, rows)  # [B, W]
    width, newest = history.shape[1], lengths[:, None]
    ends = torch.arange(width, device=history.device)[None]
    agrees = ends < newest
    num_agreeing = torch.zeros_like(history)  # of the tokens up to each place with the newest ones
    for back in range(min(max_n, width)):
        wanted = history.gather(1, (newest - back).clamp(min=0))
        agrees = agrees & (history.roll(back, 1) == wanted) & (ends >= back)
        num_agreeing += agrees
    best = (num_agreeing * width + ends).amax(1, keepdim=True)  # the longest; among them, the last
    end = best % width
    period = (newest - end).clamp(min=1)  # 0 where nothing was found
    following = end + 1 + torch.arange(depth, device=history.device) % period
    return history.gather(1, following.clamp(max=width - 1)).where(best >= min_n * width, NO_DRAFT)
