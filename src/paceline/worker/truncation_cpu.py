"""`top_k`, `top_p` and `min_p` on CPU, at a cost that is linear whatever the distribution.

Instead of sorting, a radix search over the bits of the logits finds the exact border. Kernels that
`sampling_cpu` calls; they must not raise.

Knows nothing of rows or noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.worker.cpu_math import LOWEST, ONE, ZERO, from_bits, kernel, order, reduction_kernel

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]  # token ids: an unsigned index needs no check for counting from the end

_TINY = np.float32(2.0**-126)  # below every weight but 0
_BELOW = np.float32(0.999)
_SMALL_BLOCK = 64
_RADIX_BITS = 9


@kernel
def greatest(x: F32) -> np.int32:
    """`order` of the greatest number."""
    found = LOWEST
    for v in range(x.size):
        found = max(found, order(x[v]))
    return found


@reduction_kernel
def total(weights: F32) -> float:
    """Their sum."""
    mass = 0.0
    for v in range(weights.size):
        mass += np.float64(weights[v])
    return mass


@kernel
def _num_reaching(weights: F32, least: np.float32) -> int:
    num = 0
    for v in range(weights.size):
        num += weights[v] >= least
    return num


@kernel
def _collect(weights: F32, least: np.float32, ids: U32) -> int:
    """Fill `ids` with the tokens of weight >= `least`, ascending; returns how many."""
    num = 0
    for begin in range(0, weights.size, _SMALL_BLOCK):
        end = min(begin + _SMALL_BLOCK, weights.size)
        if _num_reaching(weights[begin:end], least):
            for v in range(begin, end):
                ids[num] = v
                num += weights[v] >= least
    return num


@kernel
def _differing_bits(keys: I32) -> int:
    """How many low bits of the keys differ: all higher ones are the same in every key."""
    differing = np.int32(0)
    for i in range(keys.size):
        differing |= np.int32(keys[i] ^ keys[0])
    num, rest = 0, np.int64(differing) & 0xFFFFFFFF
    while rest:
        num, rest = num + 1, rest >> 1
    return num


@kernel
def _border(keys: I32, weights: F32, target: float, by_count: bool) -> tuple[np.int64, float]:
    """The greatest key such that the tokens with keys >= it weigh `target` or more.

    Returns that key and the weight of all tokens above it. With `by_count` each token weighs 1.
    Finds up to 9 bits of the key at a time, summing by them what shares the bits found so far. Each
    sum is kept in four parts: many equal keys in a row would otherwise wait for one another.
    """
    sums = np.empty((1 << _RADIX_BITS, 4))
    shift = _differing_bits(keys)
    above, prefix = 0.0, (np.int64(keys[0]) + 2**31) >> shift
    while shift > 0:
        bits = min(_RADIX_BITS, shift)
        known, shift = shift, shift - bits
        digit = (1 << bits) - 1
        sums[: digit + 1] = 0.0
        for i in range(keys.size):
            key = np.int64(keys[i]) + 2**31
            if key >> known == prefix:
                sums[(key >> shift) & digit, i & 3] += 1.0 if by_count else np.float64(weights[i])
        while digit > 0 and above + sums[digit].sum() < target:
            above += sums[digit].sum()
            digit -= 1
        prefix = (prefix << bits) | digit
    return prefix - 2**31, above


@kernel
def _keep_heaviest(ids: U32, keys: I32, weights: F32, target: float, by_count: bool) -> int:
    """Keep, in place, the fewest heaviest candidates that weigh `target`; returns how many.

    Of equal candidates at the border the lowest ids stay.
    """
    border, mass = _border(keys, weights, target, by_count)
    num = 0
    for i in range(ids.size):
        keep = keys[i] > border
        if keys[i] == border and mass < target:
            keep = True
            mass += 1.0 if by_count else np.float64(weights[i])
        if keep:
            ids[num], keys[num], weights[num] = ids[i], keys[i], weights[i]
            num += 1
    return num


@kernel
def _top_k_floor(weights: F32, top_k: int, keys: I32) -> np.float32:
    """A weight that `top_k` tokens or more reach, because that many blocks' greatest do."""
    num = 0
    for begin in range(0, weights.size, _SMALL_BLOCK):
        keys[num] = greatest(weights[begin : begin + _SMALL_BLOCK])
        num += 1
    if top_k > num:
        return ZERO
    border, _ = _border(keys[:num], weights, np.float64(top_k), True)
    floor: np.float32 = from_bits(np.int32(border)) * _BELOW
    return floor


@kernel
def _least_weight(weights: F32, top_k: int, top_p: np.float32, min_p: np.float32, keys: I32) -> np.float32:
    """A weight below which nothing can survive `top_k`, `top_p` and `min_p`: cheap, and seldom tight."""
    least = _TINY
    if top_k > 0:
        least = max(least, _top_k_floor(weights, top_k, keys))
    elif top_p < ONE:
        # All the tokens below it weigh less than 1 - top_p together.
        least = max(least, np.float32((1.0 - top_p) * total(weights) / weights.size) * _BELOW)
    return max(least, min_p) if top_p == ONE else least


@kernel
def truncate(
    x: F32, weights: F32, top_k: int, top_p: np.float32, min_p: np.float32, ids: U32, keys: I32, kept: F32
) -> int:
    """Candidates after `top_k`, `top_p`, `min_p`: fills `ids`, `kept` (their weights); returns how many."""
    num = _collect(weights, _least_weight(weights, top_k, top_p, min_p, keys), ids)
    for i in range(num):
        keys[i] = order(x[ids[i]])
        kept[i] = weights[ids[i]]
    if 0 < top_k < num:
        num = _keep_heaviest(ids[:num], keys[:num], kept[:num], np.float64(top_k), True)
    if top_p < ONE:
        mass = total(weights) if top_k == 0 else total(kept[:num])
        num = _keep_heaviest(ids[:num], keys[:num], kept[:num], np.float64(top_p) * mass, False)
        num = _drop_light(ids[:num], kept[:num], min_p)
    return num


@kernel
def _drop_light(ids: U32, weights: F32, min_p: np.float32) -> int:
    """Keep, in place, the candidates of weight >= `min_p`; returns how many."""
    num = 0
    for i in range(ids.size):
        keep = weights[i] >= min_p
        ids[num], weights[num] = ids[i], weights[i]
        num += keep
    return num
