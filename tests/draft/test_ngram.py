"""Prompt lookup, compiled and in torch, against the definition in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.ngram import NgramDrafter, look_up
from paceline.draft.ngram_cpu import look_up_cpu
from paceline.draft.protocol import NO_DRAFT, Round

WIDTH = 24


def reference(known: list[int], depth: int, min_n: int, max_n: int) -> list[int]:
    """The longest suffix that stood before, its most recent place, and what followed, again and again."""
    for n in range(max_n, min_n - 1, -1):
        suffix = known[-n:]
        for start in range(len(known) - n - 1, -1, -1):
            if known[start : start + n] == suffix:
                return (known[start + n :] * depth)[:depth]
    return [NO_DRAFT] * depth


def history(rows: list[list[int]]) -> torch.Tensor:
    """Rows padded with a token that is in none of them, but would match itself."""
    return torch.tensor([row + [7] * (WIDTH - len(row)) for row in rows])


def refuse(step: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    raise AssertionError("lookup does not draw")


rows_of_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    known=rows_of_tokens,
    depth=st.integers(1, 6),
    min_n=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_both_lookups_equal_the_definition(known: list[list[int]], depth: int, min_n: int, more: int) -> None:
    rows = torch.arange(len(known)).flip(0)
    lengths = torch.tensor([len(known[row]) - 1 for row in rows])
    expected = [reference(known[row], depth, min_n, min_n + more) for row in rows]
    for implementation in (look_up, look_up_cpu):
        drafts = implementation(history(known), rows, lengths, depth, min_n, min_n + more)
        assert drafts.tolist() == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),  # bigram
        ([2, 5, 1, 2, 6, 2], [6, 2, 6]),  # the most recent of two places; behind the newest token, over again
        ([3, 1, 2, 9, 8, 2, 5, 4, 3, 1, 2], [9, 8, 2]),  # a longer match that lies further back
        ([1, 1, 1], [1, 1, 1]),  # a place may overlap the suffix
        ([1, 2, 3], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
)
def test_the_drafter_reads_on_from_the_longest_then_latest_place(
    known: list[int], expected: list[int]
) -> None:
    token_ids = history([[], known])
    drafter = NgramDrafter(token_ids, min_n=1, max_n=3)
    n = len(known) - 1
    drafting = Round(torch.tensor([1]), torch.tensor(known[-1:]), torch.tensor([n]), (3,), n)
    assert drafter.propose(drafting, refuse).tolist() == [expected]
    assert drafter.capture == ()


def test_the_history_is_read_when_asked() -> None:
    token_ids = history([[1, 2, 3, 1]])
    drafter = NgramDrafter(token_ids, min_n=1, max_n=2)
    token_ids[0, 4:6] = torch.tensor([2, 9])
    drafting = Round(torch.tensor([0]), torch.tensor([2]), torch.tensor([4]), (2,), 4)
    assert drafter.propose(drafting, refuse).tolist() == [[3, 1]]
