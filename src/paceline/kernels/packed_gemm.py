"""Matrix products with GGUF's 4- and 8-bit blocks as they are: y = x W^T, everything else in float32.

Layout. 16 output rows share the lanes of a vector. For a weight [N, K] in blocks of 32 along K:

    4-bit   codes  [N/16, K/32, 16, 16] uint8: byte (j, lane) holds code j (low nibble) and j + 16 (high)
            scales [N/16, K/32, 2, 16]  d and m of w = d q + m, float16 where the file has float16
    8-bit   codes  [N/16, K, 16] int8
            scales [N/16, K/32, 1, 16]  d of w = d q

    6-bit   codes  [N/16, K, 16] int8 and scales [N/16, K/16, 1, 16] float32, d of w = d q, blocks of 16

No value of the file is rounded: products are d * (sum of q x) + m * (sum of x), block by block, and each
output's sum runs in the same order whatever the number of tokens, so a token's result does not depend on
what else is in the batch.

`packed_dot` is this module for processors with AVX-512 VNNI, and much faster.

Three prologues and epilogues ride along, since each saves a pass and a fork of the threads:
RMSNorm of x before, adding to y (the residual stream) or SwiGLU over row pairs after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from paceline.kernels.parallel import Kernel, arg, arg_f32
from paceline.kernels.simd import (
    V_F16,
    V_F32,
    V_I8,
    V_I32,
    WIDTH,
    call_float_op,
    load,
    load_f16,
    load_f32,
    load_i8_f32,
    load_i64,
    splat,
    store,
    store_f32,
    store_i64,
    vadd,
    vdiv,
    vexp,
    vfma,
    vload,
    vmul,
    vset,
    vstore,
    vsub,
    vsum,
)

BLOCK = 32  # weights that share a scale, except in the 6-bit format
STORE, ADD, SWIGLU = 0, 1, 2  # epilogues
HEADER_BYTES = 64  # of a thread's scratch: the phase it was prepared for
GEMM_X, EMBED_IDS = 7, 3  # arguments of the kernels that a caller may want to change
MAX_TILE = 5  # tokens that one pass over the weights serves: more spill registers and are slower a token

_I64 = ir.IntType(64)


def _code_vectors(b: Any, codes: Any, bits: int, block: int) -> Iterator[tuple[int, Any]]:
    """(k, float vector of 16 rows' codes) for the columns of the block at `codes`, its halves in turn."""
    if bits == 8:
        for i in range(block):
            k = i // 2 + i % 2 * (block // 2)
            yield k, b.sitofp(b.sext(load(b, b.add(codes, _I64(k * WIDTH)), V_I8), V_I32), V_F32)
        return
    nibble, four = (ir.Constant(V_I32, [v] * WIDTH) for v in (15, 4))
    for k in range(BLOCK // 2):
        both = b.zext(load(b, b.add(codes, _I64(k * WIDTH)), V_I8), V_I32)
        yield k, b.sitofp(b.and_(both, nibble), V_F32)
        yield k + BLOCK // 2, b.sitofp(b.lshr(both, four), V_F32)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call_float_op(b, "fma", [x, y, z])


def _load_splat(b: Any, address: Any) -> Any:
    return splat(b, b.load(b.inttoptr(address, ir.FloatType().as_pointer())), V_F32)


def _emit_tile(b: Any, args: list[Any], bits: int, scale_bytes: int, block: int, num_tokens: int) -> None:
    """16 output rows times `num_tokens` tokens over all of K, as IR at the builder's place.

    Each block has two running sums a token (the halves of a dependent chain), folded in the same
    order for every `num_tokens`.
    """
    codes, scales, x, x_sums, num_blocks, x_stride, out = args
    zero = ir.Constant(V_F32, [0.0] * WIDTH)
    num_scales = 2 if bits == 4 else 1
    tokens = range(num_tokens)

    def load_scale(address: Any) -> Any:
        return b.fpext(load(b, address, V_F16), V_F32) if scale_bytes == 2 else load(b, address, V_F32)

    entry, loop, done = b.block, b.append_basic_block("block"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_I64(0), entry)
    sums = [b.phi(V_F32) for _ in tokens]
    for s in sums:
        s.add_incoming(zero, entry)
    code_at = b.add(codes, b.mul(i, _I64(block * WIDTH * bits // 8)))
    scale_at = b.add(scales, b.mul(i, _I64(num_scales * WIDTH * scale_bytes)))
    block_at = b.add(x, b.mul(i, _I64(block * 4)))
    x_at = [b.add(block_at, b.mul(x_stride, _I64(m))) for m in tokens]
    inner = [[zero] * num_tokens, [zero] * num_tokens]
    for k, weight in _code_vectors(b, code_at, bits, block):
        half = inner[k // (block // 2)]
        for m in tokens:
            half[m] = _fma(b, _load_splat(b, b.add(x_at[m], _I64(k * 4))), weight, half[m])
    d = load_scale(scale_at)
    new = [_fma(b, b.fadd(inner[0][m], inner[1][m]), d, sums[m]) for m in tokens]
    if bits == 4:
        offset = load_scale(b.add(scale_at, _I64(WIDTH * scale_bytes)))
        for m in tokens:
            sum_at = b.add(x_sums, b.mul(b.add(b.mul(num_blocks, _I64(m)), i), _I64(4)))
            new[m] = _fma(b, _load_splat(b, sum_at), offset, new[m])
    following = b.add(i, _I64(1))
    i.add_incoming(following, b.block)
    for s, n in zip(sums, new, strict=True):
        s.add_incoming(n, b.block)
    b.cbranch(b.icmp_signed("<", following, num_blocks), loop, done)
    b.position_at_end(done)
    for m in tokens:
        store(b, new[m], b.add(out, _I64(m * WIDTH * 4)))


def _tile(bits: int, scale_bytes: int, block: int = BLOCK) -> Any:
    """The inner loop of one format, as an intrinsic over addresses (strides in bytes):

    (count, codes, scales, x, x_sums, num_blocks, x_stride, out): for 16 rows of the weight and `count` in
    1..MAX_TILE tokens, `out` [count, 16] float32; `x_sums` is [count, num_blocks], read by the 4-bit formats.
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

    def typing(
        context: Any,
        count: Any,
        codes: Any,
        scales: Any,
        x: Any,
        sums: Any,
        blocks: Any,
        stride: Any,
        out: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8), emit

    return intrinsic(typing)


@njit  # type: ignore[untyped-decorator]
def normalise(x: int, gamma: int, eps: float, num_columns: int, out: int) -> None:
    """RMSNorm of one token's vector into `out`."""
    squares = vset(np.float32(0.0))
    for c in range(0, num_columns * 4, WIDTH * 4):
        v = vload(x + c)
        squares = vfma(v, v, squares)
    mean = vsum(squares) / np.float32(num_columns)
    factor = vset(np.float32(1.0) / np.sqrt(mean + np.float32(eps)))
    for c in range(0, num_columns * 4, WIDTH * 4):
        vstore(out + c, vmul(vmul(vload(x + c), factor), vload(gamma + c)))


@njit  # type: ignore[untyped-decorator]
def _sum_blocks(x: int, num_blocks: int, out: int) -> None:
    """Sum of each block of 32 of one token's vector."""
    for i in range(num_blocks):
        at = x + i * BLOCK * 4
        store_f32(out + i * 4, vsum(vadd(vload(at), vload(at + WIDTH * 4))))


@njit  # type: ignore[untyped-decorator]
def finish(epilogue: int, tile: int, gate: int, out: int) -> None:
    """Put one token's 16 outputs where they go."""
    v = vload(tile)
    if epilogue == ADD:
        v = vadd(vload(out), v)
    elif epilogue == SWIGLU:
        g = vload(gate)
        v = vmul(vdiv(g, vadd(vset(np.float32(1.0)), vexp(vsub(vset(np.float32(0.0)), g)))), v)
    vstore(out, v)


def scratch_floats(num_tokens: int, num_columns: int) -> int:
    """Float32 of scratch that one thread needs, zeroed at first."""
    return HEADER_BYTES // 4 + num_tokens * (num_columns + num_columns // BLOCK) + 2 * MAX_TILE * WIDTH


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gemm(
    args: int, thread: int, token: int, begin: int, end: int,
    tile: Any, block: int, code_bytes: int, scale_bytes: int, has_offset: bool,
) -> None:  # fmt: skip
    """Tasks are tiles of 16 outputs; `code_bytes` and `scale_bytes` are those of a tile's block."""
    codes, scales, gamma, eps = arg(args, 0), arg(args, 1), arg(args, 2), arg_f32(args, 3)
    num_rows, num_columns, epilogue = arg(args, 4), arg(args, 5), arg(args, 6)
    x, out, out_stride, num_tokens = arg(args, 7), arg(args, 8), arg(args, 9), arg(args, 10)
    scratch = arg(args, 11) + thread * arg(args, 12)

    blocks, stride = num_columns // block, num_columns * 4
    pair = num_rows // WIDTH // 2 if epilogue == SWIGLU else 0

    gate = scratch + HEADER_BYTES
    value = gate + MAX_TILE * WIDTH * 4
    normed = value + MAX_TILE * WIDTH * 4
    sums = normed + num_tokens * stride  # only the formats with an offset have them
    raw = x
    x = normed if gamma != 0 else x
    if load_i64(scratch) != token:  # each thread prepares its own x once a phase
        store_i64(scratch, token)
        for m in range(num_tokens):
            at = m * stride
            if gamma != 0:
                normalise(raw + at, gamma, eps, num_columns, normed + at)
            if has_offset:
                _sum_blocks(x + at, blocks, sums + m * blocks * 4)

    num_parts = (num_tokens + MAX_TILE - 1) // MAX_TILE
    for t in range(begin, end):
        w, s = codes + t * blocks * code_bytes, scales + t * blocks * scale_bytes
        w_up, s_up = w + pair * blocks * code_bytes, s + pair * blocks * scale_bytes
        m = 0
        for left in range(num_parts, 0, -1):  # passes of even size
            count = (num_tokens - m + left - 1) // left
            x_at, at_sums = x + m * stride, sums + m * blocks * 4
            if epilogue == SWIGLU:
                tile(count, w, s, x_at, at_sums, blocks, stride, gate)
            tile(count, w_up, s_up, x_at, at_sums, blocks, stride, value)
            for j in range(count):
                lane = j * WIDTH * 4
                finish(epilogue, value + lane, gate + lane, out + (m + j) * out_stride + t * WIDTH * 4)
            m += count


_tile_q4, _tile_q4_wide, _tile_q8, _tile_q6 = _tile(4, 2), _tile(4, 4), _tile(8, 2), _tile(8, 4, block=16)


def _gemm_q4(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q4, 32, 256, 64, True)


def _gemm_q4_wide(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q4_wide, 32, 256, 128, True)


def _gemm_q8(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q8, 32, 512, 32, False)


def _gemm_q6(args: int, thread: int, token: int, begin: int, end: int) -> None:
    _gemm(args, thread, token, begin, end, _tile_q6, 16, 256, 64, False)


@njit  # type: ignore[untyped-decorator]
def _code(codes: int, at: int, lane: int) -> float:
    """Row `lane` of a tile at column `at`, columns counted through all tiles."""
    return load_i8_f32(codes + at * WIDTH + lane)  # type: ignore[no-any-return]


@njit(inline="always")  # type: ignore[untyped-decorator]
def embed(args: int, begin: int, end: int, block: int, wide: bool, code: Any) -> None:
    """Tasks are tokens; `code` reads one from the layout's bytes, see `_code`."""
    codes, scales, num_columns = arg(args, 0), arg(args, 1), arg(args, 2)
    ids, out = arg(args, 3), arg(args, 4)
    for m in range(begin, end):
        row = load_i64(ids + m * 8)
        tile, lane = row // WIDTH, row % WIDTH
        for k in range(num_columns):
            at = tile * num_columns + k
            place = at // block * WIDTH + lane
            scale = load_f32(scales + place * 4) if wide else load_f16(scales + place * 2)
            store_f32(out + (m * num_columns + k) * 4, code(codes, at, lane) * scale)


def _embed_q8(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Rows of an 8-bit matrix as float32: an embedding look-up."""
    embed(args, begin, end, 32, False, _code)


def _embed_q6(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """The same for the 6-bit format."""
    embed(args, begin, end, 16, True, _code)


gemm_q4 = Kernel(_gemm_q4)  # 4-bit codes, float16 scales
gemm_q4_wide = Kernel(_gemm_q4_wide)  # 4-bit codes, float32 scales
gemm_q8 = Kernel(_gemm_q8)  # 8-bit codes, float16 scales
gemm_q6 = Kernel(_gemm_q6)  # 6-bit codes in bytes, float32 scales of 16 columns
embed_q8 = Kernel(_embed_q8)
embed_q6 = Kernel(_embed_q6)
