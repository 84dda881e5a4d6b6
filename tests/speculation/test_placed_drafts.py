"""Which drafts go through the target: those of a row before its own depth and its first that is no token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.protocol import NO_DRAFT
from paceline.worker.proposing import placed, placed_torch

VOCAB_SIZE = 5


@pytest.mark.parametrize("function", [placed, placed_torch])
@given(
    data=st.data(), depths=st.lists(st.integers(1, 4), min_size=1, max_size=4), num_others=st.integers(0, 2)
)
def test_placed_as_by_hand(function: object, data: st.DataObject, depths: list[int], num_others: int) -> None:
    assert callable(function)
    depths, num_rows = sorted(depths, reverse=True), len(depths) + num_others
    places = data.draw(st.permutations(range(num_rows)))[: len(depths)]
    tokens = st.lists(st.integers(-2, VOCAB_SIZE + 1), min_size=depths[0], max_size=depths[0])
    drafts = [data.draw(tokens) for _ in depths]
    expected = [[NO_DRAFT] * depths[0] for _ in range(num_rows)]
    for place, depth, given_drafts in zip(places, depths, drafts, strict=True):
        for j in range(depth):
            if not 0 <= given_drafts[j] < VOCAB_SIZE:
                break
            expected[place][j] = given_drafts[j]
    got = function(torch.tensor(drafts), depths, places, num_rows, VOCAB_SIZE)
    assert got.dtype == torch.int64
    assert got.tolist() == expected
