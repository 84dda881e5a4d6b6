from __future__ import annotations

import gc
import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.memory import Arena, huge_zeros

DTYPES = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70_000), st.sampled_from(DTYPES)), min_size=1, max_size=12))
def test_an_arena_keeps_its_tensors_apart(sizes: list[tuple[int, torch.dtype]]) -> None:
    arena = Arena()
    placed = [arena.copy(torch.full((size,), i + 1).to(dtype)) for i, (size, dtype) in enumerate(sizes)]
    for i, (tensor, (size, dtype)) in enumerate(zip(placed, sizes, strict=True)):
        assert (tensor.shape, tensor.dtype) == ((size,), dtype)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == i + 1).all())


def test_an_arenas_tensors_outlive_it_and_may_be_larger_than_a_chunk() -> None:
    arena = Arena()
    small, large = torch.arange(100), torch.arange(10_000_000)
    copies = [arena.copy(t) for t in (small, large, small)]
    del arena
    gc.collect()
    assert all(torch.equal(copy, t) for copy, t in zip(copies, (small, large, small), strict=True))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (5, 7), (3, 1 << 20)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = huge_zeros(shape, dtype)
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == (shape, dtype, True)
    assert not bool(zeros.any())
    zeros += 1
    assert bool((zeros == 1).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_a_system_that_refuses_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # no such advice: EINVAL, as from a kernel without them
    assert not bool(huge_zeros((4, 4), torch.float32).any())
