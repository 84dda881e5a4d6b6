"""What the CPU kernels share: how they are compiled, the bits of floats, and an exponential.

Knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., Any])

# numba would widen a Python float or int to 64 bits, and halve the vector width.
ZERO, ONE = np.float32(0.0), np.float32(1.0)
INFINITY = np.float32(np.inf)
LOWEST = np.int32(-(2**31))  # below `order` of any number
MINUS_INFINITY = np.int32(-0x7F800001)  # `order` of it
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(1.5 * 2**23)  # adding and taking it away rounds to an integer
_EXP_LOW = np.float32(-87.0)
_E2, _E3, _E4, _E5, _E6, _E7 = (
    np.float32(c)
    for c in (
        5.0000001201e-1,
        1.6666665459e-1,
        4.1665795894e-2,
        8.3334519073e-3,
        1.3981999507e-3,
        1.9875691500e-4,
    )
)


def kernel(function: Function) -> Function:
    """Compile without fast-math: the order and rounding of operations are part of the result.

    Only the entry point is cached on disk, and it holds the code of all that it calls: a callee
    loaded from a cache cannot be inlined, and its loop then is not vectorised (12 times slower).
    """
    return cast(Function, njit(nogil=True, error_model="numpy")(function))


def fused_kernel(function: Function) -> Function:
    """Like `kernel`, but a * b + c may become one instruction (more accurate, not the same bits)."""
    return cast(Function, njit(nogil=True, error_model="numpy", fastmath={"contract"})(function))


def reduction_kernel(function: Function) -> Function:
    """Like `kernel`, but sums may be taken in vector lanes: in another order, always the same one."""
    return cast(Function, njit(nogil=True, error_model="numpy", fastmath={"reassoc"})(function))


def entry_kernel(function: Function) -> Function:
    """A `kernel` cached on disk by its file's time stamp: touch it after changing what it imports."""
    return cast(Function, njit(nogil=True, cache=True, error_model="numpy")(function))


@intrinsic  # type: ignore[untyped-decorator]
def to_bits(context: Any, value: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(context: Any, value: Any) -> Any:
    """The float32 of int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@kernel
def order(x: np.float32) -> np.int32:
    """An integer in the order of floats, with equal zeros and NaN lowest (below -inf)."""
    bits = to_bits(x + ZERO)
    ordered = bits if bits >= 0 else np.int32(bits ^ 0x7FFFFFFF)
    return ordered if x == x else LOWEST


@fused_kernel
def exp(z: np.float32) -> np.float32:
    """e^z for z <= 0 within 2e-7 of it; 0 below -87 and for NaN. After Cephes' expf."""
    inside = z if z > _EXP_LOW else _EXP_LOW
    n = (inside * _LOG2E + _ROUND) - _ROUND
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2
    power = from_bits(np.int32((np.int32(n) + np.int32(127)) << 23))
    return (p * (r * r) + r + ONE) * power if z > _EXP_LOW else ZERO
