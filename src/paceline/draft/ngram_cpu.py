"""`ngram.look_up` for the CPU: one pass back through each row's history, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from paceline.draft.protocol import NO_DRAFT

_Ints = np.ndarray[Any, np.dtype[np.int64]]


def look_up_cpu(
    token_ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, depth: int, min_n: int, max_n: int
) -> torch.Tensor:
    """See `ngram.look_up`."""
    drafts = rows.new_full((len(rows), depth), NO_DRAFT)
    _look_up(token_ids.numpy(), rows.numpy(), lengths.numpy(), min_n, max_n, drafts.numpy())
    return drafts


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _look_up(token_ids: _Ints, rows: _Ints, lengths: _Ints, min_n: int, max_n: int, drafts: _Ints) -> None:
    for i in range(len(rows)):
        history, newest = token_ids[rows[i]], lengths[i]
        longest, follows = min_n - 1, 0
        for end in range(newest - 1, -1, -1):
            if longest == max_n:
                break
            agreeing = 0
            while (
                agreeing < max_n and agreeing <= end and history[end - agreeing] == history[newest - agreeing]
            ):
                agreeing += 1
            if agreeing > longest:
                longest, follows = agreeing, end + 1
        if longest >= min_n:
            period = newest - follows + 1
            for j in range(drafts.shape[1]):
                drafts[i, j] = history[follows + j % period]
