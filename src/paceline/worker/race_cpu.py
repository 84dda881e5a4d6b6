"""The draw on CPU: which token has the greatest scaled logit plus Gumbel noise.

Instead of noise for every token it runs the race of exponentials that the Gumbel argmax is: with
w = p(v) / p(best) and E = -log u, the token of least E / w wins, and E >= 1 - u. The most likely token
sets a time; one multiplication then tells for nearly every other that it cannot beat it, and only the few
that might meet a logarithm.

Knows nothing of rows, or of why a token is a candidate. Kernels that must not raise.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.worker import noise
from paceline.worker.cpu_math import ZERO, exp, kernel
from paceline.worker.sampler_state import CHOICE, SEED_HIGH, SEED_LOW
from paceline.worker.truncation_cpu import F32, U32

I64 = NDArray[np.int64]
Leader = tuple[np.int64, float, np.float32]  # its name, its score, and the E / w that another must beat

BLOCK = 512
_TO_UNIT = np.float32(2.0**-32)
_SLACK = 1.0001  # far more than all roundings between a bound and the exact score
_LEAST_TAIL = np.float32(2.0**-53)  # of all that the noise can give

# Inlined by force: with its ten rounds unrolled it is past the size that LLVM inlines by itself.
philox = njit(forceinline=True, error_model="numpy")(noise.philox)


@kernel
def scale(x: np.float32, top: np.float32, inv_temperature: np.float32) -> np.float32:
    """The logit as the noise is added to it, 0 for the greatest."""
    return (x - top) * inv_temperature


@kernel
def weigh(x: F32, top: np.float32, inv_temperature: np.float32, weights: F32) -> None:
    """weights = p / p(best) at this temperature."""
    for v in range(x.size):
        weights[v] = exp(scale(x[v], top, inv_temperature))


@kernel
def _weigh_above(x: F32, top: np.float32, inv: np.float32, least: np.float32, weights: F32) -> int:
    """As `weigh`, but 0 for weights below `least`; returns how many are not."""
    num = 0
    for v in range(x.size):
        weight = exp(scale(x[v], top, inv))
        num += int(weight >= least)
        weights[v] = weight if weight >= least else ZERO
    return num


@kernel
def _fill_tails(names: I64, offset: np.int64, position: int, ints: I64, tails: F32) -> None:
    """Lower bounds (but for rounding) of the tokens' 1 - u, from the first word of the noise alone."""
    low, high, choice = ints[SEED_LOW], ints[SEED_HIGH], ints[CHOICE]  # the stores below might alias them
    for i in range(names.size):
        word, _, _, _ = philox(names[i] + offset, position, choice, 0, low, high)
        tails[i] = np.float32(word) * _TO_UNIT


@kernel
def _num_below(tails: F32, weights: F32, limit: np.float32) -> int:
    num = 0
    for i in range(weights.size):
        num += tails[i] < weights[i] * limit
    return num


@kernel
def _lead(scaled: np.float32, name: np.int64, position: int, ints: I64) -> Leader:
    """A token with its scaled logit plus noise, which is the very number of `noise.gumbel`."""
    w0, w1, _, _ = philox(name, position, ints[CHOICE], 0, ints[SEED_LOW], ints[SEED_HIGH])
    tail = (np.float64((w0 << 20) | (w1 >> 12)) + 0.5) * 2.0**-52
    score = np.float64(scaled) - math.log(-math.log1p(-tail))
    return name, score, np.float32(_SLACK * math.exp(-score))


@kernel
def _challenge(
    leader: Leader,
    x: F32,
    names: I64,
    offset: np.int64,
    weights: F32,
    tails: F32,
    top: np.float32,
    inv: np.float32,
    position: int,
    ints: I64,
) -> Leader:
    """The leader after a block of candidates: logits, names (less `offset`) and weights; `tails`: scratch."""
    _fill_tails(names, offset, position, ints, tails)
    name, best, limit = leader
    if _num_below(tails, weights, limit):
        for i in range(names.size):
            if tails[i] < weights[i] * limit:
                other = _lead(scale(x[i], top, inv), names[i] + offset, position, ints)
                if other[1] > best or (other[1] == best and other[0] < name):
                    name, best, limit = other
    return name, best, limit


@kernel
def race(
    best: int, ids: U32, weights: F32, x: F32, names: I64, inv: np.float32, position: int, ints: I64
) -> np.int64:
    """The name of the winner among the columns `ids`, `best` among them; the lowest name among equals.

    Args:
        best: the column of greatest logit, the first of them.
        weights: of the columns `ids`.
        x: all logits; names: the token of each column, or empty: a column is its token.
    """
    top, own = x[best], names.size == 0
    leader = _lead(ZERO, np.int64(best) if own else names[best], position, ints)
    logits, tails = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    called = np.empty(BLOCK, np.int64)
    for begin in range(0, ids.size, BLOCK):
        block = ids[begin : begin + BLOCK]
        num = block.size
        for i in range(num):
            logits[i] = x[block[i]]
            called[i] = np.int64(block[i]) if own else names[block[i]]
        racing = weights[begin : begin + num]
        leader = _challenge(
            leader, logits[:num], called[:num], np.int64(0), racing, tails, top, inv, position, ints
        )
    return leader[0]


@kernel
def race_all(
    best: int,
    begin: int,
    end: int,
    least: np.float32,
    x: F32,
    names: I64,
    inv: np.float32,
    position: int,
    ints: I64,
) -> tuple[np.int64, float]:
    """The winner, and its score, among `best` and those of columns `begin` to `end` that weigh `least`.

    The other arguments are those of `race`.
    """
    top, own = x[best], names.size == 0
    leader = _lead(ZERO, np.int64(best) if own else names[best], position, ints)
    weights, tails = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    called = np.empty(BLOCK, np.int64)
    for i in range(BLOCK):
        called[i] = i
    for at in range(begin, end, BLOCK):
        block = x[at : min(at + BLOCK, end)]
        num = block.size
        # What weighs less could not win with the best of noise either: mostly what a grammar forbids.
        able = max(least, _LEAST_TAIL / leader[2])
        if _weigh_above(block, top, inv, able, weights):
            block_names = called[:num] if own else names[at : at + num]
            offset = np.int64(at) if own else np.int64(0)
            leader = _challenge(
                leader, block, block_names, offset, weights[:num], tails, top, inv, position, ints
            )
    return leader[0], leader[1]
