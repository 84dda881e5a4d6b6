"""One side of an integer product: float32 vectors, normalised or not, as blocks of 16-bit numbers.

A block of x is rounded to q s, where s = max|x| / 32512 and q = 256 high + low of two signed bytes. So a
product that is exact in q is that of a vector that differs from x by at most 1/65024 of its block's largest
value. A block with a NaN or an infinity gives NaN or infinity.

Beside its two *planes* of bytes a block has *facts*: s as float32, and either the sum of q as float32, which
offsets of codes are multiplied by, or, where codes carry `BIAS`, the int32 that takes it out of the product.

Knows nothing of codes and scales (`packed_dot`). AVX-512.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from paceline.kernels.packed_gemm import BLOCK
from paceline.kernels.simd import (
    V_F32,
    V_I32,
    WIDTH,
    call_float_op,
    op,
    splat,
    store,
    vadd,
    vec_type,
    vfma,
    vload,
    vmul,
    vset,
    vsum,
)

BIAS = 128  # added to signed codes, since the instruction's weights are unsigned
FACTS_BYTES = 8  # of a token's block, beside its planes

_LARGEST = 32512  # of |q|: 127 * 256
_LEAST = 1e-30  # scales go no lower, so that 1 / s is finite: x below 1e-35 counts as 0
_MAGIC = 1.5 * 2.0**23 + 128  # a float32 added to round to an integer, whose low bits are then q + 128
_MAGIC_BITS = 0x4B400080

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_V_BYTES = ir.VectorType(ir.IntType(8), 64)


def constant(value: int) -> Any:
    """A vector of that int32."""
    return ir.Constant(V_I32, [value] * WIDTH)


def _f32(value: float) -> Any:
    return ir.Constant(_F32, float(np.float32(value)))


def _fold(b: Any, x: Any, name: str) -> Any:
    """The lanes of an int32 vector as one number: `add`, `umax`."""
    fn_type = ir.FunctionType(_I32, [V_I32])
    fn = cgutils.get_or_insert_function(b.module, fn_type, f"llvm.vector.reduce.{name}.v{WIDTH}i32")
    return b.call(fn, [x])


def _emit_facts(b: Any, total: Any, signed: bool, address: Any) -> None:
    """The block's sum of q, as the float that offsets are multiplied by or as what takes BIAS out again."""
    if signed:
        b.store(b.mul(total, _I32(-BIAS)), b.inttoptr(address, _I32.as_pointer()))
    else:
        b.store(b.sitofp(total, _F32), b.inttoptr(address, _F32.as_pointer()))


def _emit_planes(b: Any, rounded: list[Any], planes: Any) -> None:
    """Store bytes of q from the low halves of q + 128: the upper one is `high`, the lower one `low` ^ 128."""
    pairs = b.and_(rounded[0], constant(0xFFFF))
    if len(rounded) == 2:
        pairs = b.or_(pairs, b.shl(rounded[1], constant(16)))
    num_bytes = 2 * len(rounded)  # of a lane that count
    order = [
        quarter * 16 + lane * 4 + half * 2 + plane
        for quarter in range(4)
        for plane in range(2)
        for half in range(len(rounded))
        for lane in range(4)
    ]
    as_bytes = b.xor(b.bitcast(pairs, _V_BYTES), ir.Constant(_V_BYTES, [128, 0] * 32))
    undefined = ir.Constant(_V_BYTES, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(_I32, 16 * num_bytes), order)
    store(b, b.shuffle_vector(as_bytes, undefined, lanes), planes)


def plane_at(group: int, plane: int, block: int) -> int:
    """Where `_emit_planes` puts a group's low (0) or high (1) bytes. A quarter's groups lie together."""
    groups = block // WIDTH
    return (group % 4 * 2 * groups + plane * groups + group // 4) * 4


def _emit_block(b: Any, vectors: list[Any], planes: Any, facts: Any, signed: bool) -> None:
    """One block of x, 16 columns a vector, to its planes and facts."""
    largest = constant(int(np.float32(_LEAST).view(np.int32)))
    for v in vectors:  # floats of one sign are ordered as their bits are, and NaN is above all
        size = b.and_(b.bitcast(v, V_I32), constant(0x7FFFFFFF))
        largest = b.select(b.icmp_unsigned(">", size, largest), size, largest)
    top = b.bitcast(_fold(b, largest, "umax"), _F32)
    b.store(b.fmul(top, _f32(1 / _LARGEST)), b.inttoptr(facts, _F32.as_pointer()))
    inverse = splat(b, b.fdiv(_f32(_LARGEST), top), V_F32)
    magic = ir.Constant(V_F32, [_MAGIC] * WIDTH)
    rounded = [b.bitcast(call_float_op(b, "fma", [v, inverse, magic]), V_I32) for v in vectors]
    _emit_planes(b, rounded, planes)
    total = rounded[0] if len(rounded) == 1 else b.add(*rounded)
    sum_q = b.sub(_fold(b, total, "add"), _I32(len(vectors) * WIDTH * _MAGIC_BITS % 2**32))
    _emit_facts(b, sum_q, signed, b.add(facts, _I64(4)))


@op(types.void, vec_type, vec_type, types.int64, types.int64)
def _round_32(b: Any, left: Any, right: Any, planes: Any, facts: Any) -> None:
    """A block of 32 columns, for codes with an offset."""
    _emit_block(b, [left, right], planes, facts, signed=False)


@op(types.void, vec_type, vec_type, types.int64, types.int64)
def _round_32_signed(b: Any, left: Any, right: Any, planes: Any, facts: Any) -> None:
    """A block of 32 columns, for codes with BIAS."""
    _emit_block(b, [left, right], planes, facts, signed=True)


@op(types.void, vec_type, types.int64, types.int64)
def _round_16_signed(b: Any, x: Any, planes: Any, facts: Any) -> None:
    """A block of 16 columns, for codes with BIAS."""
    _emit_block(b, [x], planes, facts, signed=True)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _norm_factor(x: int, eps: float, num_columns: int) -> Any:
    """What RMSNorm multiplies one token's vector by, beside its weights."""
    even, odd = vset(np.float32(0.0)), vset(np.float32(0.0))  # two sums: each waits for its last addition
    for at in range(x, x + num_columns * 4, BLOCK * 4):
        left, right = vload(at), vload(at + WIDTH * 4)
        even, odd = vfma(left, left, even), vfma(right, right, odd)
    mean = vsum(vadd(even, odd)) / np.float32(num_columns)
    return vset(np.float32(1.0) / np.sqrt(mean + np.float32(eps)))


@njit(inline="always")  # type: ignore[untyped-decorator]
def _columns(x: int, gamma: int, factor: Any) -> Any:
    """16 columns of one token's vector, normalised where `gamma` is the address of weights."""
    v = vload(x)
    if gamma != 0:
        v = vmul(vmul(v, factor), vload(gamma))
    return v


@njit(inline="always")  # type: ignore[untyped-decorator]
def round_blocks(
    x: int, gamma: int, eps: float, num_columns: int, block: int, signed: bool,
    planes: int, facts: int, stride: int,
) -> None:  # fmt: skip
    """One token's blocks, `stride` bytes apart; `gamma` = 0 for no norm."""
    factor = vset(np.float32(1.0))
    if gamma != 0:
        factor = _norm_factor(x, eps, num_columns)
    for i in range(num_columns // BLOCK):
        at = i * BLOCK * 4
        weights = gamma + at if gamma != 0 else 0
        left = _columns(x + at, weights, factor)
        right = _columns(x + at + WIDTH * 4, weights + WIDTH * 4 if gamma != 0 else 0, factor)
        if block == 16:
            _round_16_signed(left, planes + 2 * i * stride, facts + 2 * i * stride)
            _round_16_signed(right, planes + (2 * i + 1) * stride, facts + (2 * i + 1) * stride)
        elif signed:
            _round_32_signed(left, right, planes + i * stride, facts + i * stride)
        else:
            _round_32(left, right, planes + i * stride, facts + i * stride)
