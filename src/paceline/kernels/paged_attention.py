"""RoPE, the K/V write and causal attention over a paged bfloat16 cache, in one kernel; the write also alone.

A *segment* is the tokens that one row brings to a step: `q_len` of them from position `start` on. Each task
is one segment and one K/V head with the query heads that share it, so a task reads only K/V that it wrote
itself or that earlier steps did.

Cache of one layer, for pages of S positions (S a multiple of 16) and heads of size D (a multiple of 32):

    K  [pages, kv_heads, S/16, D, 16]   16 positions share the lanes of a vector
    V  [pages, kv_heads, S, D]

Softmax runs over blocks of 16 positions with a running maximum (Milakov and Gimelshein 2018, as in
FlashAttention), in float32; a token's result does not depend on what else is in the step.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy import float32, sqrt

from paceline.kernels.packed_gemm import normalise
from paceline.kernels.parallel import Kernel, arg, arg_f32
from paceline.kernels.simd import (
    V_F32,
    V_I16,
    V_I32,
    WIDTH,
    call_float_op,
    load,
    load_f32,
    load_i32,
    load_i64,
    prefetch,
    splat,
    store,
    store_bf16,
    store_f32,
    store_i64,
    vadd,
    vexp,
    vfirst,
    vfma,
    vload,
    vmax,
    vmul,
    vset,
    vstore,
    vstore_bf16,
    vsub,
    vsum,
)

MAX_LANES = 8  # query vectors that one pass over K/V serves
SEGMENT_FIELDS = 4  # q_begin, q_len, start, row

_I64 = ir.IntType(64)


def _emit_tile(b: Any, args: list[Any], num_lanes: int) -> None:
    """out[lane, 16] += sum over k of x[lane, k] * w[k, 16], k in blocks of 16."""
    w, w_stride, x, x_stride, num_blocks, out, out_stride = args
    lanes = range(num_lanes)
    out_at = [b.add(out, b.mul(out_stride, _I64(i))) for i in lanes]
    initial = [load(b, at, V_F32) for at in out_at]
    entry, loop, done = b.block, b.append_basic_block("block"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    block = b.phi(_I64)
    block.add_incoming(_I64(0), entry)
    sums = [b.phi(V_F32) for _ in lanes]
    for s, start in zip(sums, initial, strict=True):
        s.add_incoming(start, entry)
    first = b.mul(block, _I64(WIDTH))
    w_at = b.add(w, b.mul(w_stride, first))
    x_at = [b.add(b.add(x, b.mul(x_stride, _I64(i))), b.mul(first, _I64(4))) for i in lanes]
    even, odd = list(sums), [ir.Constant(V_F32, [0.0] * WIDTH)] * num_lanes
    for k in range(WIDTH):
        half = odd if k % 2 else even
        bits = b.zext(load(b, b.add(w_at, b.mul(w_stride, _I64(k))), V_I16), V_I32)
        weight = b.bitcast(b.shl(bits, ir.Constant(V_I32, [16] * WIDTH)), V_F32)
        for i in lanes:
            value = b.load(b.inttoptr(b.add(x_at[i], _I64(k * 4)), ir.FloatType().as_pointer()))
            half[i] = call_float_op(b, "fma", [splat(b, value, V_F32), weight, half[i]])
    new = [b.fadd(even[i], odd[i]) for i in lanes]
    following = b.add(block, _I64(1))
    block.add_incoming(following, b.block)
    for s, n in zip(sums, new, strict=True):
        s.add_incoming(n, b.block)
    b.cbranch(b.icmp_signed("<", following, num_blocks), loop, done)
    b.position_at_end(done)
    for at, n in zip(out_at, new, strict=True):
        store(b, n, at)


@intrinsic  # type: ignore[untyped-decorator]
def _tile(
    context: Any,
    count: Any,
    w: Any,
    w_stride: Any,
    x: Any,
    x_stride: Any,
    blocks: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """`_emit_tile` for `count` in 1..MAX_LANES lanes; addresses, strides in bytes, bfloat16 `w`."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        end = b.append_basic_block("end")
        switch = b.switch(args[0], end)
        for lanes in range(1, MAX_LANES + 1):
            case = b.append_basic_block(f"lanes_{lanes}")
            switch.add_case(_I64(lanes), case)
            b.position_at_end(case)
            _emit_tile(b, list(args[1:]), lanes)
            b.branch(end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), emit


@njit  # type: ignore[untyped-decorator]
def _rotate(
    x: int, bias: int, gamma: int, eps: float, cos: int, sin: int, head_dim: int, scale: float, out: int
) -> None:
    """One head's vector with bias, RMSNorm (where the model has them) and RoPE, times `scale`."""
    if bias != 0:
        for c in range(0, head_dim * 4, WIDTH * 4):
            vstore(out + c, vadd(vload(x + c), vload(bias + c)))
        x = out
    if gamma != 0:
        normalise(x, gamma, eps, head_dim, out)
        x = out
    factor = vset(float32(scale))
    half = head_dim * 2
    for c in range(0, half, WIDTH * 4):
        low, high = vload(x + c), vload(x + half + c)
        co, si = vmul(vload(cos + c), factor), vmul(vload(sin + c), factor)
        vstore(out + c, vsub(vmul(low, co), vmul(high, si)))
        vstore(out + half + c, vfma(high, co, vmul(low, si)))


@njit  # type: ignore[untyped-decorator]
def _softmax_block(scores: int, visible: int, state: int, acc: int, head_dim: int) -> None:
    """Turn 16 scores of one lane into weights against the running maximum; state is (max, sum)."""
    s = vload(scores)
    if visible < WIDTH:
        s = vfirst(s, visible)
    old, total, new = load_f32(state), load_f32(state + 4), vmax(s)
    if new > old:
        correction = vexp(vset(old - new))
        for c in range(0, head_dim * 4, WIDTH * 4):
            vstore(acc + c, vmul(vload(acc + c), correction))
        total = total * vmax(correction)
        store_f32(state, new)
    else:
        new = old
    weights = vexp(vsub(s, vset(new)))
    vstore(scores, weights)
    store_f32(state + 4, total + vsum(weights))


@njit  # type: ignore[untyped-decorator]
def _block(table: int, position: int, page_size: int, page_stride: int, block_bytes: int) -> int:
    """Offset, in either cache, of the block of 16 positions that starts at `position`."""
    page = load_i32(table + position // page_size * 4)
    return page * page_stride + position % page_size // WIDTH * block_bytes  # type: ignore[no-any-return]


@njit  # type: ignore[untyped-decorator]
def _attend(
    count: int, q: int, limits: int, table: int, k_cache: int, v_cache: int,
    page_size: int, page_stride: int, head_dim: int, work: int, acc: int,
) -> None:  # fmt: skip
    """Attention of `count` lanes; lane i sees positions [0, limits[i]). Leaves it in acc [count, D]."""
    scores, state = work, work + MAX_LANES * WIDTH * 4
    zero = vset(float32(0.0))
    for c in range(0, count * head_dim * 4, WIDTH * 4):
        vstore(acc + c, zero)
    longest = 0
    for i in range(count):
        store_f32(state + i * 8, float32(-3.0e38))
        store_f32(state + i * 8 + 4, float32(0.0))
        longest = max(longest, load_i64(limits + i * 8))
    block_bytes = head_dim * WIDTH * 2
    following = _block(table, 0, page_size, page_stride, block_bytes)
    for base in range(0, longest, WIDTH):
        at = following
        if base + WIDTH < longest:
            # Blocks are far apart and short, so the processor's own prefetching does not reach the next.
            following = _block(table, base + WIDTH, page_size, page_stride, block_bytes)
            for line in range(0, block_bytes, 64):
                prefetch(k_cache + following + line)
                prefetch(v_cache + following + line)
        for i in range(count):
            vstore(scores + i * WIDTH * 4, zero)
        _tile(count, k_cache + at, WIDTH * 2, q, head_dim * 4, head_dim // WIDTH, scores, WIDTH * 4)
        for i in range(count):
            visible = load_i64(limits + i * 8) - base
            _softmax_block(scores + i * WIDTH * 4, visible, state + i * 8, acc + i * head_dim * 4, head_dim)
        for c in range(0, head_dim, WIDTH):
            _tile(count, v_cache + at + c * 2, head_dim * 2, scores, WIDTH * 4, 1, acc + c * 4, head_dim * 4)
    for i in range(count):
        norm = vset(float32(1.0) / load_f32(state + i * 8 + 4))
        for c in range(0, head_dim * 4, WIDTH * 4):
            at = acc + i * head_dim * 4 + c
            vstore(at, vmul(vload(at), norm))


@njit  # type: ignore[untyped-decorator]
def _write_kv(
    k: int, v: int, v_bias: int, at: int, slot: int, k_cache: int, v_cache: int, head_dim: int
) -> None:
    """One position's K (rotated) and V into its page: `slot` of the page at byte offset `at`."""
    k_at = k_cache + at + slot // WIDTH * head_dim * WIDTH * 2 + slot % WIDTH * 2
    for d in range(head_dim):
        store_bf16(k_at + d * WIDTH * 2, load_f32(k + d * 4))
    v_at = v_cache + at + slot * head_dim * 2
    for d in range(0, head_dim, WIDTH):
        value = vload(v + d * 4)
        if v_bias != 0:
            value = vadd(value, vload(v_bias + d * 4))
        vstore_bf16(v_at + d * 2, value)


def scratch_floats(head_dim: int) -> int:
    """Float32 of scratch that one thread needs."""
    return 2 * MAX_LANES * head_dim + MAX_LANES * (WIDTH + 4)


@njit  # type: ignore[untyped-decorator]
def _write_segment(
    k: int, v: int, k_bias: int, v_bias: int, token_bytes: int, q_len: int, start: int, table: int,
    k_cache: int, v_cache: int, page_size: int, page_stride: int,
    cos: int, sin: int, gamma: int, eps: float, head_dim: int, rotated: int,
) -> None:  # fmt: skip
    """K and V of one head for the tokens of a segment; `rotated` is memory for one vector."""
    for j in range(q_len):
        position = start + j
        turn = position * head_dim * 2
        _rotate(k + j * token_bytes, k_bias, gamma, eps, cos + turn, sin + turn, head_dim, 1.0, rotated)
        page, slot = load_i32(table + position // page_size * 4), position % page_size
        at = page * page_stride
        _write_kv(rotated, v + j * token_bytes, v_bias, at, slot, k_cache, v_cache, head_dim)


@njit  # type: ignore[untyped-decorator]
def _attend_segment(
    q: int, q_bias: int, token_bytes: int, out: int, out_bytes: int, group: int,
    q_len: int, start: int, table: int, k_cache: int, v_cache: int, page_size: int, page_stride: int,
    cos: int, sin: int, gamma: int, eps: float, head_dim: int, scratch: int,
) -> None:  # fmt: skip
    """The `group` query heads of one K/V head for the tokens of a segment, MAX_LANES vectors at a time."""
    vector = head_dim * 4
    scale = float32(1.0) / sqrt(float32(head_dim))
    acc = scratch + MAX_LANES * vector
    limits = acc + MAX_LANES * vector
    work = limits + MAX_LANES * 8
    num_lanes = q_len * group
    for first in range(0, num_lanes, MAX_LANES):
        count = min(MAX_LANES, num_lanes - first)
        for i in range(count):
            j, at = (first + i) // group, (first + i) % group * vector
            turn = (start + j) * head_dim * 2
            source, bias = q + j * token_bytes + at, q_bias + at if q_bias != 0 else 0
            to = scratch + i * vector
            _rotate(source, bias, gamma, eps, cos + turn, sin + turn, head_dim, scale, to)
            store_i64(limits + i * 8, start + j + 1)
        _attend(count, scratch, limits, table, k_cache, v_cache, page_size, page_stride, head_dim, work, acc)
        for i in range(count):
            j, at = (first + i) // group, (first + i) % group * vector
            to = out + j * out_bytes + at
            for c in range(0, vector, WIDTH * 4):
                vstore(to + c, vload(acc + i * vector + c))


def _paged_attention(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Tasks are pairs (segment, K/V head)."""
    qkv, bias, out, k_cache, v_cache = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3), arg(args, 4)
    cos, sin, q_gamma, k_gamma, eps = arg(args, 5), arg(args, 6), arg(args, 7), arg(args, 8), arg_f32(args, 9)
    segments, tables, table_stride = arg(args, 10), arg(args, 11), arg(args, 12)
    page_size, num_heads, num_kv_heads, head_dim = arg(args, 13), arg(args, 14), arg(args, 15), arg(args, 16)
    scratch = arg(args, 17) + thread * arg(args, 18)

    group, vector = num_heads // num_kv_heads, head_dim * 4
    token_bytes, out_bytes = (num_heads + 2 * num_kv_heads) * vector, num_heads * vector
    head_stride = page_size * head_dim * 2
    page_stride = num_kv_heads * head_stride
    for task in range(begin, end):
        segment, kv = segments + task // num_kv_heads * SEGMENT_FIELDS * 8, task % num_kv_heads
        q_begin, q_len, start = load_i64(segment), load_i64(segment + 8), load_i64(segment + 16)
        table = tables + load_i64(segment + 24) * table_stride
        head_k, head_v = k_cache + kv * head_stride, v_cache + kv * head_stride
        q_at = kv * group * vector
        k_at, v_at = (num_heads + kv) * vector, (num_heads + num_kv_heads + kv) * vector
        x, to = qkv + q_begin * token_bytes, out + q_begin * out_bytes + q_at
        q_bias, k_bias, v_bias = 0, 0, 0
        if bias != 0:
            q_bias, k_bias, v_bias = bias + q_at, bias + k_at, bias + v_at
        _write_segment(
            x + k_at, x + v_at, k_bias, v_bias, token_bytes, q_len, start, table,
            head_k, head_v, page_size, page_stride, cos, sin, k_gamma, eps, head_dim, scratch,
        )  # fmt: skip
        _attend_segment(
            x + q_at, q_bias, token_bytes, to, out_bytes, group, q_len, start, table,
            head_k, head_v, page_size, page_stride, cos, sin, q_gamma, eps, head_dim, scratch,
        )  # fmt: skip


def _paged_write(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Tasks are pairs (segment, K/V head): K and V into their pages, as `_paged_attention` writes them."""
    kv_in, bias, k_cache, v_cache = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
    cos, sin, gamma, eps = arg(args, 4), arg(args, 5), arg(args, 6), arg_f32(args, 7)
    segments, tables, table_stride = arg(args, 8), arg(args, 9), arg(args, 10)
    page_size, num_kv_heads, head_dim = arg(args, 11), arg(args, 12), arg(args, 13)
    scratch = arg(args, 14) + thread * arg(args, 15)

    vector = head_dim * 4
    token_bytes = 2 * num_kv_heads * vector
    head_stride = page_size * head_dim * 2
    page_stride = num_kv_heads * head_stride
    for task in range(begin, end):
        segment, kv = segments + task // num_kv_heads * SEGMENT_FIELDS * 8, task % num_kv_heads
        q_begin, q_len, start = load_i64(segment), load_i64(segment + 8), load_i64(segment + 16)
        table = tables + load_i64(segment + 24) * table_stride
        k_at, v_at = kv * vector, (num_kv_heads + kv) * vector
        x = kv_in + q_begin * token_bytes
        k_bias, v_bias = 0, 0
        if bias != 0:
            k_bias, v_bias = bias + k_at, bias + v_at
        _write_segment(
            x + k_at, x + v_at, k_bias, v_bias, token_bytes, q_len, start, table,
            k_cache + kv * head_stride, v_cache + kv * head_stride, page_size, page_stride,
            cos, sin, gamma, eps, head_dim, scratch,
        )  # fmt: skip


paged_attention = Kernel(_paged_attention)
paged_write = Kernel(_paged_write)
