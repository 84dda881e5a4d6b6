"""The draft vocabulary's map: offsets are told from target ids, and nothing doubtful passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.draft.vocabulary import resolve_vocabulary
from paceline.errors import CheckpointError

VOCAB = 30
maps = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=VOCAB, unique=True)


def mask(ids: list[int]) -> torch.Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)


@given(ids=maps, dtype=st.sampled_from([torch.int64, torch.int32]))
def test_any_map_of_offsets_with_its_mask_is_read(ids: list[int], dtype: torch.dtype) -> None:
    """Sorted or not: engines need no order."""
    d2t = torch.tensor(ids, dtype=dtype) - torch.arange(len(ids), dtype=dtype)
    offsets, reached = resolve_vocabulary(d2t, mask(ids).to(torch.uint8), len(ids), VOCAB)
    assert (torch.arange(len(ids)) + offsets).tolist() == ids
    assert offsets.dtype == torch.int64
    assert torch.equal(reached, mask(ids))


@given(ids=maps)
def test_a_map_of_target_ids_is_never_taken_for_offsets(ids: list[int]) -> None:
    with pytest.raises(CheckpointError, match="holds target ids; offsets"):
        resolve_vocabulary(torch.tensor(ids), mask(ids), len(ids), VOCAB)
    with pytest.raises(CheckpointError, match="cannot be told from them; offsets"):
        resolve_vocabulary(torch.tensor(ids), None, len(ids), VOCAB)


@given(ids=maps)
def test_without_a_mask_offsets_need_neighbours(ids: list[int]) -> None:
    d2t = torch.tensor(sorted(ids)) - torch.arange(len(ids))
    assume(len(set(d2t.tolist())) < len(ids))
    offsets, reached = resolve_vocabulary(d2t, None, len(ids), VOCAB)
    assert torch.equal(offsets, d2t)
    assert torch.equal(reached, mask(ids))


@given(ids=maps, at=st.integers(0, VOCAB - 1))
def test_a_mask_that_differs_anywhere_is_refused(ids: list[int], at: int) -> None:
    d2t, t2d = torch.tensor(ids) - torch.arange(len(ids)), mask(ids)
    t2d[at] = ~t2d[at]
    with pytest.raises(CheckpointError, match=f"d2t and t2d disagree about target token {at}$"):
        resolve_vocabulary(d2t, t2d, len(ids), VOCAB)


def test_a_whole_vocabulary_needs_no_map() -> None:
    offsets, reached = resolve_vocabulary(None, None, VOCAB, VOCAB)
    assert not offsets.any()
    assert reached.all()


@pytest.mark.parametrize(
    ("d2t", "t2d", "words"),
    [
        (None, None, "d2t is missing: 3 draft tokens of 30 need it"),
        (torch.zeros(4).long(), None, r"d2t has shape \(4,\), the configuration needs \(3,\)"),
        (
            torch.zeros(3).long(),
            torch.ones(29).bool(),
            r"t2d has shape \(29,\), the configuration needs \(30,\)",
        ),
        (torch.zeros(3), None, "d2t must hold whole numbers, got torch.float32"),
        (torch.tensor([0, 0, 28]), None, r"d2t maps draft token 2 to 30, outside the vocabulary \[0, 30\)"),
        (torch.tensor([-1, 0, 0]), None, "d2t maps draft token 0 to -1"),
        (torch.tensor([1, 0, 0]), None, "d2t maps two draft tokens to target token 1"),
    ],
)
def test_broken_maps(d2t: torch.Tensor | None, t2d: torch.Tensor | None, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        resolve_vocabulary(d2t, t2d, 3, VOCAB)
