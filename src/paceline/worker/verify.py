"""Acceptance: which of a row's drafts the target has chosen too, and the tokens that the step yields.

The target has chosen a token y at each place of a row, each as if the drafts before it were known to be
right. Drafts are accepted while they equal y; the first y that no draft equals is the step's last token.
Nothing is drawn here: what is accepted is what plain decoding would have chosen, whatever the drafts.

Knows nothing of how the tokens were chosen, of stop conditions or of grammars.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Accepted(NamedTuple):
    """The new tokens of R rows: `token_ids[r, : accept_len[r]]`; what stands behind is without meaning."""

    accept_len: Tensor  # int64 [R]
    token_ids: Tensor  # int64 [R, 1 + D]


def accept(y: Tensor, drafts: Tensor, first: Tensor, depths: Tensor, room: Tensor) -> Accepted:
    """Compare the drafts with the target's tokens. Reads nothing back from the device.

    Args:
        y: int64 [P], the target's token at each place.
        drafts: int64 [R, D], NO_DRAFT where there is none.
        first: int64 [R]; the places of row r are first[r] to first[r] + depths[r].
        depths: int64 [R], at most D; drafts beyond a row's own are not looked at.
        room: int64 [R], tokens that the row may still take.
    """
    if y.device.type == "cpu":
        return _accept_in_lists(y, drafts, first, depths, room)
    return accept_torch(y, drafts, first, depths, room)


def accept_torch(y: Tensor, drafts: Tensor, first: Tensor, depths: Tensor, room: Tensor) -> Accepted:
    """`accept` in torch operations, on any device."""
    steps = torch.arange(1 + drafts.shape[1], device=y.device)
    places = first[:, None] + torch.minimum(steps, depths[:, None])
    token_ids = y[places]
    agree = (drafts == token_ids[:, :-1]) & (steps[:-1] < depths[:, None])
    num_accepted = agree.cumprod(1).sum(1)
    return Accepted(torch.minimum(1 + num_accepted, room), token_ids)


def _accept_in_lists(y: Tensor, drafts: Tensor, first: Tensor, depths: Tensor, room: Tensor) -> Accepted:
    """`accept` of a few rows, for which every operation on tensors would cost more than all of this."""
    chosen, width = y.tolist(), 1 + drafts.shape[1]
    accept_len, token_ids = [], []
    for begin, depth, most, guesses in zip(
        first.tolist(), depths.tolist(), room.tolist(), drafts.tolist(), strict=True
    ):
        block = chosen[begin : begin + depth + 1]
        num = 1
        while num <= depth and guesses[num - 1] == block[num - 1]:
            num += 1
        accept_len.append(min(num, most))
        token_ids.append(block + block[-1:] * (width - len(block)))
    return Accepted(
        torch.from_numpy(np.array(accept_len, np.int64)),
        torch.from_numpy(np.array(token_ids, np.int64).reshape(len(token_ids), width)),
    )
