"""The products of `packed_gemm` in integers, on AVX-512 VNNI: an instruction multiplies 64 pairs of bytes.

The weights' codes take part as they are, x is rounded to blocks of 16-bit numbers (`packed_planes`: s and
q = 256 high + low). Then

    y = sum over blocks of s (d (codes . q) + m (sum of q)),   codes . q = 256 (codes . high) + (codes . low)

where the integers are exact and the rest is float32.

Layout. As in `packed_gemm` 16 output rows share the lanes of a vector, and scales are the same. Codes of 4
consecutive columns share a 32-bit lane, group g of a block being its columns 4 g to 4 g + 3; for [N, K]:

    4-bit   codes  [N/16, K/32, 4, 16, 4] uint8: code i of groups g (low nibble) and g + 4 at (g, lane, i)
    8-bit   codes  [N/16, K/32, 8, 16, 4] uint8: code + 128
    6-bit   codes  [N/16, K/16, 4, 16, 4] uint8: code + 128

Each output's sum runs in the same order whatever the number of tokens, as there.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.kernels.packed_gemm import BLOCK, HEADER_BYTES, SWIGLU, embed, finish
from paceline.kernels.packed_planes import BIAS, FACTS_BYTES, constant, plane_at, round_blocks
from paceline.kernels.parallel import Kernel, arg, arg_f32
from paceline.kernels.simd import (
    V_F16,
    V_F32,
    V_I32,
    WIDTH,
    call_float_op,
    emit_prefetch,
    load,
    load_i64,
    load_u8_f32,
    splat,
    store,
    store_i64,
)

MAX_TILE = 8  # tokens that one pass over the weights serves
_AHEAD = 6  # blocks between the one at work and the one that is fetched: two streams of weights are short
_LINE = 64

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def supported() -> bool:
    """Whether this processor has the instructions."""
    features = llvm.get_host_cpu_features()
    return all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vnni"))


def _dot(b: Any, total: Any, codes: Any, x: Any) -> Any:
    """total + the sums over each lane's four bytes of unsigned codes times signed x, all in int32."""
    fn_type = ir.FunctionType(V_I32, [V_I32] * 3)
    fn = cgutils.get_or_insert_function(b.module, fn_type, "llvm.x86.avx512.vpdpbusd.512")
    return b.call(fn, [total, codes, x])


def _load_splat(b: Any, address: Any, scalar: Any, vector: Any) -> Any:
    value = b.load(b.inttoptr(address, scalar.as_pointer()))
    value.align = 4
    return splat(b, value, vector)


def _code_vectors(b: Any, codes: Any, bits: int, block: int) -> list[Any]:
    """The codes of each group of the block at `codes`, four to a lane."""
    if bits == 8:
        return [load(b, b.add(codes, _I64(g * WIDTH * 4)), V_I32) for g in range(block // 4)]
    both = [load(b, b.add(codes, _I64(g * WIDTH * 4)), V_I32) for g in range(block // 8)]
    nibbles = constant(0x0F0F0F0F)
    return [b.and_(v, nibbles) for v in both] + [b.and_(b.lshr(v, constant(4)), nibbles) for v in both]


def _emit_tile(b: Any, args: list[Any], bits: int, scale_bytes: int, block: int, num_tokens: int) -> None:
    """16 output rows times `num_tokens` tokens over all of K, as IR at the builder's place."""
    codes, scales, x, num_blocks, out = args
    tokens, planes = range(num_tokens), 2 * block
    num_scales = 2 if bits == 4 else 1

    def load_scale(address: Any) -> Any:
        return b.fpext(load(b, address, V_F16), V_F32) if scale_bytes == 2 else load(b, address, V_F32)

    entry, loop, done = b.block, b.append_basic_block("block"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_I64(0), entry)
    sums = [b.phi(V_F32) for _ in tokens]
    for s in sums:
        s.add_incoming(ir.Constant(V_F32, [0.0] * WIDTH), entry)
    code_bytes, scales_bytes = block * WIDTH * bits // 8, num_scales * WIDTH * scale_bytes
    code_at = b.add(codes, b.mul(i, _I64(code_bytes)))
    scale_at = b.add(scales, b.mul(i, _I64(scales_bytes)))
    for line in range(0, code_bytes, _LINE):
        emit_prefetch(b, b.add(code_at, _I64(_AHEAD * code_bytes + line)))
    for line in range(0, scales_bytes, _LINE):
        emit_prefetch(b, b.add(scale_at, _I64(_AHEAD * scales_bytes + line)))
    x_at = b.add(x, b.mul(i, _I64(num_tokens * (planes + FACTS_BYTES))))
    facts_at = [b.add(x_at, _I64(num_tokens * planes + m * FACTS_BYTES)) for m in tokens]

    high = [constant(0)] * num_tokens
    low = [
        constant(0) if bits == 4 else _load_splat(b, b.add(facts_at[m], _I64(4)), _I32, V_I32) for m in tokens
    ]
    for g, weights in enumerate(_code_vectors(b, code_at, bits, block)):
        for m in tokens:
            for plane, sums_of in enumerate((low, high)):
                at = b.add(x_at, _I64(m * planes + plane_at(g, plane, block)))
                sums_of[m] = _dot(b, sums_of[m], weights, _load_splat(b, at, _I32, V_I32))
    d = load_scale(scale_at)
    new = [b.fmul(b.sitofp(b.add(b.shl(high[m], constant(8)), low[m]), V_F32), d) for m in tokens]
    if bits == 4:
        offset = load_scale(b.add(scale_at, _I64(WIDTH * scale_bytes)))
        for m in tokens:
            sum_q = _load_splat(b, b.add(facts_at[m], _I64(4)), _F32, V_F32)
            new[m] = call_float_op(b, "fma", [sum_q, offset, new[m]])
    new = [
        call_float_op(b, "fma", [new[m], _load_splat(b, facts_at[m], _F32, V_F32), sums[m]]) for m in tokens
    ]
    following = b.add(i, _I64(1))
    i.add_incoming(following, b.block)
    for s, n in zip(sums, new, strict=True):
        s.add_incoming(n, b.block)
    b.cbranch(b.icmp_signed("<", following, num_blocks), loop, done)
    b.position_at_end(done)
    for m in tokens:
        store(b, new[m], b.add(out, _I64(m * WIDTH * 4)))


def _tile(bits: int, scale_bytes: int, block: int = BLOCK) -> Any:
    """The inner loop of one format, as an intrinsic over addresses:

    (count, codes, scales, x, num_blocks, out): for 16 rows of the weight and `count` in 1..MAX_TILE tokens,
    `out` [count, 16] float32; `x` is what `round_blocks` made for these tokens.
    """

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        end = b.append_basic_block("end")
        switch = b.switch(args[0], end)
        for count in range(1, MAX_TILE + 1):
            case = b.append_basic_block(f"tokens_{count}")
            switch.add_case(_I64(count), case)
            b.position_at_end(case)
            _emit_tile(b, list(args[1:]), bits, scale_bytes, block, count)
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    def typing(context: Any, count: Any, codes: Any, scales: Any, x: Any, blocks: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 6), emit

    return intrinsic(typing)


def scratch_floats(num_tokens: int, num_columns: int, block: int = BLOCK) -> int:
    """Float32 of scratch that one thread needs, zeroed at first, in whole cache lines."""
    rounded = num_tokens * (num_columns // block) * (2 * block + FACTS_BYTES) // 4
    return -(-(HEADER_BYTES // 4 + 2 * MAX_TILE * WIDTH + rounded) // WIDTH) * WIDTH


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gemm(
    args: int, thread: int, token: int, begin: int, end: int,
    tile: Any, block: int, code_bytes: int, scale_bytes: int, signed: bool,
) -> None:  # fmt: skip
    """Tasks are tiles of 16 outputs; `code_bytes` and `scale_bytes` are those of a tile's block."""
    codes, scales, gamma, eps = arg(args, 0), arg(args, 1), arg(args, 2), arg_f32(args, 3)
    num_rows, num_columns, epilogue = arg(args, 4), arg(args, 5), arg(args, 6)
    x, out, out_stride, num_tokens = arg(args, 7), arg(args, 8), arg(args, 9), arg(args, 10)
    scratch = arg(args, 11) + thread * arg(args, 12)

    blocks = num_columns // block
    num_products = 2 if epilogue == SWIGLU else 1
    pair = num_rows // WIDTH // 2 if epilogue == SWIGLU else 0
    num_parts = (num_tokens + MAX_TILE - 1) // MAX_TILE
    gate = scratch + HEADER_BYTES
    value = gate + (num_products - 1) * MAX_TILE * WIDTH * 4
    rounded = gate + 2 * MAX_TILE * WIDTH * 4  # for each pass [blocks, planes and facts of its tokens]
    block_bytes = 2 * block + FACTS_BYTES

    if load_i64(scratch) != token:  # each thread prepares its own x once a phase
        store_i64(scratch, token)
        m = 0
        for left in range(num_parts, 0, -1):
            count = (num_tokens - m + left - 1) // left
            first = rounded + m * blocks * block_bytes
            for j in range(count):
                planes, facts = first + j * 2 * block, first + count * 2 * block + j * FACTS_BYTES
                round_blocks(
                    x + (m + j) * num_columns * 4, gamma, eps, num_columns, block, signed,
                    planes, facts, count * block_bytes,
                )  # fmt: skip
            m += count

    for t in range(begin, end):
        m = 0
        for left in range(num_parts, 0, -1):  # passes of even size
            count = (num_tokens - m + left - 1) // left
            for i in range(num_products):
                place = (t + i * pair) * blocks
                x_at, y = rounded + m * blocks * block_bytes, gate + i * MAX_TILE * WIDTH * 4
                tile(count, codes + place * code_bytes, scales + place * scale_bytes, x_at, blocks, y)
            for j in range(count):
                lane = j * WIDTH * 4
                finish(epilogue, value + lane, gate + lane, out + (m + j) * out_stride + t * WIDTH * 4)
            m += count


_tile_q4, _tile_q4_wide, _tile_q8, _tile_q6 = _tile(4, 2), _tile(4, 4), _tile(8, 2), _tile(8, 4, block=16)


def _dot_q4(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q4, 32, 256, 64, False)


def _dot_q4_wide(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q4_wide, 32, 256, 128, False)


def _dot_q8(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q8, 32, 512, 32, True)


def _dot_q6(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q6, 16, 256, 64, True)


@njit  # type: ignore[untyped-decorator]
def _code(codes: int, at: int, lane: int) -> float:
    """Row `lane` of a tile at column `at`, columns counted through all tiles."""
    return load_u8_f32(codes + (at // 4 * WIDTH + lane) * 4 + at % 4) - np.float32(BIAS)  # type: ignore[no-any-return]


def _embed_q8(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Rows of an 8-bit matrix as float32: an embedding look-up."""
    embed(args, begin, end, 32, False, _code)


def _embed_q6(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """The same for the 6-bit format."""
    embed(args, begin, end, 16, True, _code)


dot_q4 = Kernel(_dot_q4)  # 4-bit codes, float16 scales
dot_q4_wide = Kernel(_dot_q4_wide)  # 4-bit codes, float32 scales
dot_q8 = Kernel(_dot_q8)  # 8-bit codes, float16 scales
dot_q6 = Kernel(_dot_q6)  # 6-bit codes in bytes, float32 scales of 16 columns
embed_q8 = Kernel(_embed_q8)
embed_q6 = Kernel(_embed_q6)
