"""Packed matrices as phases of kernel programs, and a place for programs by size.

Does not know which matrices a model has or in what order they run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from paceline.kernels.packed_gemm import STORE, SWIGLU
from paceline.kernels.parallel import Phase, Team
from paceline.kernels.simd import WIDTH
from paceline.models.packed import PackedMatrix

_MAX_PROGRAMS = 256
_SHARES = 4  # of a phase for each thread: fewer cost balance, more cost atomics

T = TypeVar("T")


class Recent(Generic[T]):
    """The values of the most recently used keys."""

    def __init__(self) -> None:
        self._kept = OrderedDict[int, T]()

    def get(self, key: int, make: Callable[[int], T]) -> T:
        """The value, made when it is not there.

        `make` is passed each time and not kept: as its owner's bound method it would close a cycle, and what
        the owner holds, threads among them, would outlive it until the garbage collector comes by.
        """
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make(key)
            if len(self._kept) > _MAX_PROGRAMS:
                self._kept.popitem(last=False)
        return self._kept[key]


class Products:
    """Makes phases that multiply by packed matrices; they share the scratch memory of the team's threads."""

    def __init__(self, team: Team, eps: float) -> None:
        self._team, self._eps = team, eps
        self._scratch = torch.empty(0)

    def gemm(
        self,
        matrix: PackedMatrix,
        x: torch.Tensor,
        out: torch.Tensor,
        epilogue: int = STORE,
        norm: torch.Tensor | None = None,
    ) -> Phase:
        """out [M, N] = x [M, K] W^T, fp32; x through RMSNorm first if `norm` is its weight."""
        num_tokens, per_thread = len(x), matrix.scratch_floats(len(x))
        needed = per_thread * self._team.num_threads
        if len(self._scratch) < needed:
            self._scratch = torch.zeros(1 << (needed - 1).bit_length())  # older phases keep theirs
        num_tiles = matrix.num_rows // WIDTH // (2 if epilogue == SWIGLU else 1)
        return matrix.gemm.bind(
            matrix.codes, matrix.scales, 0 if norm is None else norm, self._eps,
            matrix.num_rows, matrix.num_columns, epilogue,
            x, out, out.stride(0) * 4, num_tokens, self._scratch, per_thread * 4,
            num_tasks=num_tiles, step=_step(num_tiles, self._team.num_threads),
        )  # fmt: skip


def _step(num_tasks: int, num_threads: int) -> int:
    """Tasks to take at a time: few times a thread, and such that all threads end together."""

    def longest(step: int) -> int:
        return -(-num_tasks // step // num_threads) * step

    most = max(1, num_tasks // (num_threads * _SHARES))
    return min(range(most, most // 2, -1), key=longest)


def embed(matrix: PackedMatrix, token_ids: torch.Tensor, out: torch.Tensor) -> Phase:
    """out fp32 [M, K] = the rows `token_ids` int64 [M] of a matrix whose format has a look-up."""
    assert matrix.format.embed is not None
    return matrix.format.embed.bind(
        matrix.codes, matrix.scales, matrix.num_columns, token_ids, out, num_tasks=len(token_ids), step=16
    )
