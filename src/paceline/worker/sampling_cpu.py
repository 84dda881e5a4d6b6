"""Sampling on CPU: the semantics of `sampling_torch` in kernels that touch each logit few times.

Instead of noise for every token it runs the race of exponentials that the Gumbel argmax is: with
w = p(v) / p(best) and E = -log u, the token of least E / w wins, and E >= 1 - u. One multiplication
therefore tells for nearly every token that it cannot win, and only the few others meet a logarithm.
Instead of sorting for `top_k` and `top_p`, a radix search over the bits of the logits finds the
exact border; its cost is linear whatever the distribution.

`sample_positions` works on a range of positions with its own scratch memory, so disjoint ranges may
run on several threads. Kernels are compiled at first use and cached on disk; they must not raise.

Knows nothing of torch: plain numpy arrays in the layout of `sampler_state`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from paceline.worker import noise
from paceline.worker.cpu_math import (
    INFINITY,
    LOWEST,
    MINUS_INFINITY,
    ONE,
    ZERO,
    entry_kernel,
    exp,
    from_bits,
    kernel,
    order,
    reduction_kernel,
)
from paceline.worker.sampler_state import (
    CHOICE,
    FREQUENCY,
    HAS_PENALTIES,
    INV_TEMPERATURE,
    MIN_P,
    NUM_BIASES,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TOP_K,
    TOP_P,
)

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U32 = NDArray[np.uint32]  # token ids: an unsigned index needs no check for counting from the end
I64 = NDArray[np.int64]

_TO_UNIT = np.float32(2.0**-32)
_SLACK = 1.0001  # far more than all roundings between a bound and the exact score
_TINY = np.float32(2.0**-126)  # below every weight but 0
_BELOW = np.float32(0.999)
_BLOCK, _SMALL_BLOCK = 512, 64
_RADIX_BITS = 9


# Inlined by force: with its ten rounds unrolled it is past the size that LLVM inlines by itself.
_philox = njit(forceinline=True, error_model="numpy")(noise.philox)


@kernel
def _scaled(x: np.float32, top: np.float32, inv_temperature: np.float32) -> np.float32:
    return (x - top) * inv_temperature


@kernel
def _greatest(x: F32) -> np.int32:
    greatest = LOWEST
    for v in range(x.size):
        greatest = max(greatest, order(x[v]))
    return greatest


@kernel
def argmax(x: F32) -> int:
    """Index of the greatest value, the lowest among equals; 0 if nothing is above -inf."""
    best, best_begin = MINUS_INFINITY, 0
    for begin in range(0, x.size, _BLOCK):
        greatest = _greatest(x[begin : begin + _BLOCK])
        if greatest > best:
            best, best_begin = greatest, begin
    for v in range(best_begin, x.size):
        if order(x[v]) == best:
            return v
    return 0


@kernel
def _weigh(x: F32, top: np.float32, inv_temperature: np.float32, weights: F32) -> None:
    """weights = p / p(best) at this temperature."""
    for v in range(x.size):
        weights[v] = exp(_scaled(x[v], top, inv_temperature))


@reduction_kernel
def _total(weights: F32) -> float:
    total = 0.0
    for v in range(weights.size):
        total += np.float64(weights[v])
    return total


@kernel
def _collect(weights: F32, least: np.float32, ids: U32) -> int:
    """Fill `ids` with the tokens of weight >= `least`, ascending; returns how many."""
    num = 0
    for v in range(weights.size):
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
        keys[num] = _greatest(weights[begin : begin + _SMALL_BLOCK])
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
        least = max(least, np.float32((1.0 - top_p) * _total(weights) / weights.size) * _BELOW)
    return max(least, min_p) if top_p == ONE else least


@kernel
def _truncate(
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
        mass = _total(weights) if top_k == 0 else _total(kept[:num])
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


@kernel
def _fill_tails(ids: U32, position: int, ints: I64, tails: F32) -> None:
    """Lower bounds (but for rounding) of the tokens' 1 - u, from the first word of the noise alone."""
    low, high, choice = ints[SEED_LOW], ints[SEED_HIGH], ints[CHOICE]  # the stores below might alias them
    for i in range(ids.size):
        word, _, _, _ = _philox(np.int64(ids[i]), position, choice, 0, low, high)
        tails[i] = np.float32(word) * _TO_UNIT


@kernel
def _num_below(tails: F32, weights: F32, limit: np.float32) -> int:
    num = 0
    for i in range(weights.size):
        num += tails[i] < weights[i] * limit
    return num


@kernel
def _score(scaled: np.float32, token_id: np.int64, position: int, ints: I64) -> float:
    """Scaled logit plus Gumbel noise, the very number of `noise.gumbel`."""
    w0, w1, _, _ = _philox(token_id, position, ints[CHOICE], 0, ints[SEED_LOW], ints[SEED_HIGH])
    tail = (np.float64((w0 << 20) | (w1 >> 12)) + 0.5) * 2.0**-52
    return np.float64(scaled) - math.log(-math.log1p(-tail))


@kernel
def _race(
    x: F32, ids: U32, weights: F32, top: np.float32, inv: np.float32, position: int, ints: I64
) -> np.int64:
    """The candidate of greatest scaled logit plus Gumbel noise, the lowest id among equals."""
    tails = np.empty(_BLOCK, np.float32)
    winner, best, limit = np.int64(ids[0]), -np.inf, INFINITY
    for begin in range(0, ids.size, _BLOCK):
        block_ids, block_weights = ids[begin : begin + _BLOCK], weights[begin : begin + _BLOCK]
        _fill_tails(block_ids, position, ints, tails)
        if not _num_below(tails, block_weights, limit):
            continue
        for i in range(block_ids.size):
            if tails[i] < block_weights[i] * limit:
                v = np.int64(block_ids[i])
                score = _score(_scaled(x[v], top, inv), v, position, ints)
                if score > best:
                    winner, best, limit = v, score, np.float32(_SLACK * math.exp(-score))
    return winner


@kernel
def _process(
    x: F32,
    row: int,
    position: int,
    floats: F32,
    ints: I64,
    bias_ids: I64,
    bias_values: F32,
    bias_until: I64,
    counts: I32,
    prompt_mask: NDArray[np.bool_],
) -> None:
    """Biases and penalties of a row, on its logits `x` in place; the other arrays are the state's."""
    for j in range(ints[row, NUM_BIASES]):
        if position < bias_until[row, j]:
            x[bias_ids[row, j]] += bias_values[row, j]
    if ints[row, HAS_PENALTIES]:  # only then do `counts` and `prompt_mask` surely have the row
        _penalize(x, floats[row], counts[row], prompt_mask[row])


@kernel
def _penalize(x: F32, floats: F32, counts: I32, prompt_mask: NDArray[np.bool_]) -> None:
    repetition, frequency, presence = floats[REPETITION], floats[FREQUENCY], floats[PRESENCE]
    for v in range(x.size):
        generated = counts[v] > 0
        value = x[v]
        if generated or prompt_mask[v]:
            value = value / repetition if value > ZERO else value * repetition
        x[v] = value - frequency * np.float32(counts[v]) - presence * (ONE if generated else ZERO)


@entry_kernel
def sample_positions(
    begin: int,
    end: int,
    logits: F32,
    rows: I64,
    positions: I64,
    floats: F32,
    ints: I64,
    bias_ids: I64,
    bias_values: F32,
    bias_until: I64,
    counts: I32,
    prompt_mask: NDArray[np.bool_],
    token_ids: I64,
) -> None:
    """Sample positions `begin` to `end` into `token_ids` [P]; see `sampling.sample` and `SamplerState`."""
    vocab_size = logits.shape[1]
    ids, keys = np.empty(vocab_size, np.uint32), np.empty(vocab_size, np.int32)
    weights, kept = np.empty(vocab_size, np.float32), np.empty(vocab_size, np.float32)
    for p in range(begin, end):
        row, position = rows[p], positions[p]
        x = logits[p]
        if ints[row, NUM_BIASES] or ints[row, HAS_PENALTIES]:
            x = logits[p].copy()
            _process(x, row, position, floats, ints, bias_ids, bias_values, bias_until, counts, prompt_mask)
        best = argmax(x)
        token_ids[p] = best
        top, inv = x[best], floats[row, INV_TEMPERATURE]
        if inv == ZERO or not np.isfinite(top):
            continue
        _weigh(x, top, inv, weights)
        top_k, top_p, min_p = ints[row, TOP_K], floats[row, TOP_P], floats[row, MIN_P]
        num = _truncate(x, weights, top_k, top_p, min_p, ids, keys, kept)
        token_ids[p] = _race(x, ids[:num], kept[:num], top, inv, position, ints[row])
