"""Small kernels over rows of float32, a task each: what stands between two matrix products.

A row's result does not depend on what else is in the batch.
"""

from __future__ import annotations

from numba import njit

from paceline.kernels.packed_gemm import normalise
from paceline.kernels.paged_attention import SEGMENT_FIELDS
from paceline.kernels.parallel import Kernel, arg, arg_f32
from paceline.kernels.simd import WIDTH, load_i64, store_i64, vload, vstore


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy(source: int, num_bytes: int, out: int) -> None:
    for at in range(0, num_bytes, WIDTH * 4):
        vstore(out + at, vload(source + at))


def _copy_rows(args: int, thread: int, token: int, begin: int, end: int) -> None:
    source, source_stride, out, out_stride = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
    num_bytes = arg(args, 4)
    for m in range(begin, end):
        _copy(source + m * source_stride, num_bytes, out + m * out_stride)


def _move_rows(args: int, thread: int, token: int, begin: int, end: int) -> None:
    source, sources, out, outs, num_bytes = (
        arg(args, 0),
        arg(args, 1),
        arg(args, 2),
        arg(args, 3),
        arg(args, 4),
    )
    for m in range(begin, end):
        from_row = load_i64(sources + m * 8) if sources != 0 else m
        to_row = load_i64(outs + m * 8) if outs != 0 else m
        _copy(source + from_row * num_bytes, num_bytes, out + to_row * num_bytes)


def _norm_rows(args: int, thread: int, token: int, begin: int, end: int) -> None:
    x, gamma, eps, num_columns, out = arg(args, 0), arg(args, 1), arg_f32(args, 2), arg(args, 3), arg(args, 4)
    for m in range(begin, end):
        at = m * num_columns * 4
        normalise(x + at, gamma, eps, num_columns, out + at)


def _pair_rows(args: int, thread: int, token: int, begin: int, end: int) -> None:
    first, second, first_gamma, second_gamma = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
    eps, num_columns, out, kept, keeps_normed = (
        arg_f32(args, 4), arg(args, 5), arg(args, 6), arg(args, 7), arg(args, 8),
    )  # fmt: skip
    num_bytes = num_columns * 4
    for m in range(begin, end):
        at, pair = m * num_bytes, out + 2 * m * num_bytes
        normalise(first + at, first_gamma, eps, num_columns, pair)
        normalise(second + at, second_gamma, eps, num_columns, pair + num_bytes)
        if kept != 0:
            _copy(pair + num_bytes if keeps_normed != 0 else second + at, num_bytes, kept + at)


def _segment_rows(args: int, thread: int, token: int, begin: int, end: int) -> None:
    rows, positions, segments = arg(args, 0), arg(args, 1), arg(args, 2)
    for m in range(begin, end):
        segment = segments + m * SEGMENT_FIELDS * 8
        store_i64(segment, m)
        store_i64(segment + 8, 1)
        store_i64(segment + 16, load_i64(positions + m * 8))
        store_i64(segment + 24, load_i64(rows + m * 8))


# Arguments that a caller may want to change.
MOVE_SOURCE, MOVE_FROM, MOVE_TO = 0, 1, 3
SEGMENT_ROWS, SEGMENT_POSITIONS = 0, 1

copy_rows = Kernel(_copy_rows)
"""(source, source_stride, out, out_stride, num_bytes): strides in bytes, whole vectors."""

move_rows = Kernel(_move_rows)
"""(source, sources, out, outs, num_bytes): row sources[m] of `source` to row outs[m] of `out`, int64 each;
0 for either: m itself."""

norm_rows = Kernel(_norm_rows)
"""(x, gamma, eps, num_columns, out): RMSNorm."""

pair_rows = Kernel(_pair_rows)
"""(first, second, first_gamma, second_gamma, eps, num_columns, out, kept, keeps_normed): the norms of two
rows side by side in `out` [M, 2 num_columns], and `second`, as it is or normed, in `kept` (0: nowhere), which
may be `second` itself."""

segment_rows = Kernel(_segment_rows)
"""(rows, positions, segments): segments of one token for each of some rows, as attention takes them."""
