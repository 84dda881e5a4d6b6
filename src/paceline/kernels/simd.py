"""A vector of 16 float32 for numba kernels, written in portable LLVM IR.

numba leaves vectorising to LLVM, which gives up on many loops that matter here (reductions,
strided bytes, possible aliasing). `Vec` makes it explicit: LLVM maps `<16 x float>` to one
AVX-512 register, two AVX ones or four NEON ones. Addresses are plain int64, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, register_model

WIDTH = 16

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F16 = ir.FloatType(), ir.HalfType()
V_F32, V_I32 = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)
V_I16, V_I8, V_F16 = ir.VectorType(_I16, WIDTH), ir.VectorType(_I8, WIDTH), ir.VectorType(_F16, WIDTH)


class _VecType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Vec16f32")


vec_type = _VecType()


@register_model(_VecType)
class _VecModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, V_F32)


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """`scalar` in all lanes of an IR vector type."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(V_I32, [0] * WIDTH))


def load(builder: Any, address: Any, vector: Any) -> Any:
    """An unaligned load of an IR vector type from an int64 address."""
    value = builder.load(builder.inttoptr(address, vector.as_pointer()))
    value.align = 1
    return value


def store(builder: Any, value: Any, address: Any) -> None:
    """An unaligned store of an IR vector to an int64 address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 1


def call_float_op(builder: Any, name: str, args: list[Any]) -> Any:
    """An LLVM float intrinsic such as `fma` on IR vectors of 16 float32."""
    fn_type = ir.FunctionType(V_F32, [V_F32] * len(args))
    fn = cgutils.get_or_insert_function(builder.module, fn_type, f"llvm.{name}.v{WIDTH}f32")
    return builder.call(fn, args)


def op(result: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic of fixed signature from a function `(builder, *ir_args) -> ir_value`."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        signature = result(*params)
        names = ", ".join(f"a{i}" for i in range(len(params)))
        scope: dict[str, Any] = {"signature": signature, "codegen": codegen}
        # numba counts the typing function's parameters, so it must have exactly these.
        exec(f"def typing(context, {names}):\n    return signature, codegen", scope)
        scope["typing"].__name__ = emit.__name__
        scope["typing"].__doc__ = emit.__doc__
        return intrinsic(scope["typing"])

    return wrap


_addr = types.int64


@op(types.float32, _addr)
def load_f32(b: Any, address: Any) -> Any:
    """One float32."""
    return b.load(b.inttoptr(address, _F32.as_pointer()))


@op(types.void, _addr, types.float32)
def store_f32(b: Any, address: Any, value: Any) -> None:
    """One float32."""
    b.store(value, b.inttoptr(address, _F32.as_pointer()))


@op(types.int64, _addr)
def load_i32(b: Any, address: Any) -> Any:
    """One int32, widened."""
    return b.sext(b.load(b.inttoptr(address, _I32.as_pointer())), _I64)


@op(types.int64, _addr)
def load_i64(b: Any, address: Any) -> Any:
    """One int64."""
    return b.load(b.inttoptr(address, _I64.as_pointer()))


@op(types.void, _addr, types.int64)
def store_i64(b: Any, address: Any, value: Any) -> None:
    """One int64."""
    b.store(value, b.inttoptr(address, _I64.as_pointer()))


@op(types.float32, _addr)
def load_i8_f32(b: Any, address: Any) -> Any:
    """One int8 as float32."""
    return b.sitofp(b.load(b.inttoptr(address, _I8.as_pointer())), _F32)


@op(types.float32, _addr)
def load_u8_f32(b: Any, address: Any) -> Any:
    """One uint8 as float32."""
    return b.uitofp(b.load(b.inttoptr(address, _I8.as_pointer())), _F32)


@op(types.float32, _addr)
def load_f16(b: Any, address: Any) -> Any:
    """One float16 as float32."""
    return b.fpext(b.load(b.inttoptr(address, _F16.as_pointer())), _F32)


@op(types.void, _addr, types.float32)
def store_bf16(b: Any, address: Any, value: Any) -> None:
    """One float32 as bfloat16, rounded to nearest even."""
    bits = b.bitcast(value, _I32)
    odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    rounded = b.lshr(b.add(bits, b.add(odd, _I32(0x7FFF))), _I32(16))
    b.store(b.trunc(rounded, _I16), b.inttoptr(address, _I16.as_pointer()))


def emit_prefetch(builder: Any, address: Any) -> None:
    """Ask for the cache line at an address that will be read soon; any address is harmless."""
    fn_type = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(builder.module, fn_type, "llvm.prefetch.p0i8")
    read, keep, data = _I32(0), _I32(3), _I32(1)
    builder.call(fn, [builder.inttoptr(address, _I8.as_pointer()), read, keep, data])


@op(types.void, _addr)
def prefetch(b: Any, address: Any) -> None:
    """`emit_prefetch` for kernels."""
    emit_prefetch(b, address)


@op(vec_type, types.float32)
def vset(b: Any, scalar: Any) -> Any:
    """The scalar in all lanes."""
    return splat(b, scalar, V_F32)


@op(vec_type, _addr)
def vload(b: Any, address: Any) -> Any:
    """16 float32."""
    return load(b, address, V_F32)


@op(vec_type, _addr)
def vload_bf16(b: Any, address: Any) -> Any:
    """16 bfloat16, widened exactly."""
    wide = b.zext(load(b, address, V_I16), V_I32)
    return b.bitcast(b.shl(wide, ir.Constant(V_I32, [16] * WIDTH)), V_F32)


@op(types.void, _addr, vec_type)
def vstore(b: Any, address: Any, value: Any) -> None:
    """16 float32."""
    store(b, value, address)


@op(types.void, _addr, vec_type)
def vstore_bf16(b: Any, address: Any, value: Any) -> None:
    """16 bfloat16, rounded to nearest even."""
    bits = b.bitcast(value, V_I32)
    sixteen, one, half = (ir.Constant(V_I32, [x] * WIDTH) for x in (16, 1, 0x7FFF))
    odd = b.and_(b.lshr(bits, sixteen), one)
    rounded = b.lshr(b.add(bits, b.add(odd, half)), sixteen)
    store(b, b.trunc(rounded, V_I16), address)


@op(vec_type, vec_type, vec_type)
def vadd(b: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return b.fadd(x, y)


@op(vec_type, vec_type, vec_type)
def vsub(b: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return b.fsub(x, y)


@op(vec_type, vec_type, vec_type)
def vmul(b: Any, x: Any, y: Any) -> Any:
    """x * y"""
    return b.fmul(x, y)


@op(vec_type, vec_type, vec_type)
def vdiv(b: Any, x: Any, y: Any) -> Any:
    """x / y"""
    return b.fdiv(x, y)


@op(vec_type, vec_type, vec_type, vec_type)
def vfma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, rounded once"""
    return call_float_op(b, "fma", [x, y, z])


@op(vec_type, vec_type, types.int64)
def vfirst(b: Any, x: Any, count: Any) -> Any:
    """The first `count` lanes of x; -inf in the others."""
    lanes = ir.Constant(V_I32, list(range(WIDTH)))
    keep = b.icmp_signed("<", lanes, splat(b, b.trunc(count, _I32), V_I32))
    return b.select(keep, x, ir.Constant(V_F32, [float("-inf")] * WIDTH))


def _reduce(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Fold lanes pairwise, always in the same order."""
    undefined = ir.Constant(V_F32, ir.Undefined)
    for half in (8, 4, 2, 1):
        lanes = [i + half if i < half else i for i in range(WIDTH)]
        x = combine(x, b.shuffle_vector(x, undefined, ir.Constant(V_I32, lanes)))
    return b.extract_element(x, _I32(0))


@op(types.float32, vec_type)
def vsum(b: Any, x: Any) -> Any:
    """Sum of the lanes."""
    return _reduce(b, x, b.fadd)


@op(types.float32, vec_type)
def vmax(b: Any, x: Any) -> Any:
    """Largest lane."""
    return _reduce(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@op(vec_type, vec_type)
def _vround(b: Any, x: Any) -> Any:
    return call_float_op(b, "rint", [x])


@op(vec_type, vec_type)
def _vexp2_int(b: Any, n: Any) -> Any:
    """2**n for whole n in [-126, 127], made in the exponent bits."""
    biased = b.add(b.fptosi(n, V_I32), ir.Constant(V_I32, [127] * WIDTH))
    return b.bitcast(b.shl(biased, ir.Constant(V_I32, [23] * WIDTH)), V_F32)


@op(vec_type, vec_type, vec_type)
def _vzero_where_low(b: Any, y: Any, x: Any) -> Any:
    """y, but 0 where x < -87 (float32 would leave its normal range there)."""
    low = b.fcmp_unordered("<", x, ir.Constant(V_F32, [-87.0] * WIDTH))
    return b.select(low, ir.Constant(V_F32, [0.0] * WIDTH), y)


@op(vec_type, vec_type)
def _vclamp(b: Any, x: Any) -> Any:
    low, high = (ir.Constant(V_F32, [v] * WIDTH) for v in (-87.0, 88.0))
    x = b.select(b.fcmp_ordered(">", x, low), x, low)
    return b.select(b.fcmp_ordered("<", x, high), x, high)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _c(value: float) -> Any:
    return vset(types.float32(value))


@njit  # type: ignore[untyped-decorator]
def vexp(x: Any) -> Any:
    """e**x, relative error below 2e-7; 0 below -87, e**88 above 88.

    Range reduction by ln 2 in two parts, then a Taylor-like minimax polynomial of degree 6.
    """
    safe = _vclamp(x)
    n = _vround(vmul(safe, _c(1.4426950408889634)))
    r = vfma(n, _c(-0.693359375), safe)
    r = vfma(n, _c(2.12194440e-4), r)
    p = _c(1.9875691500e-4)
    p = vfma(p, r, _c(1.3981999507e-3))
    p = vfma(p, r, _c(8.3334519073e-3))
    p = vfma(p, r, _c(4.1665795894e-2))
    p = vfma(p, r, _c(1.6666665459e-1))
    p = vfma(p, r, _c(5.0000001201e-1))
    p = vfma(p, vmul(r, r), vadd(r, _c(1.0)))
    return _vzero_where_low(vmul(p, _vexp2_int(n)), x)
