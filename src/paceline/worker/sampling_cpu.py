"""Sampling on CPU: the semantics of `sampling_torch` in kernels that touch each logit few times.

A place's token is a function of its logits, its row and its position, and nothing that others may read is
written on the way: places, or ranges of them, may be sampled on several threads, each with its own scratch
memory. Where nothing but the draw is to be done, the *shares* of one place may be, too: each names the
winner of a part of the vocabulary. Kernels are compiled at first use and cached on disk; they must not raise.

Knows nothing of torch: plain numpy arrays in the layout of `sampler_state`. Nothing of threads: see
`sampling_team`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.worker.cpu_math import MINUS_INFINITY, ONE, ZERO, entry_kernel, kernel, order
from paceline.worker.race_cpu import BLOCK, I64, race, race_all, weigh
from paceline.worker.sampler_state import (
    FREQUENCY,
    HAS_PENALTIES,
    INV_TEMPERATURE,
    MIN_P,
    NUM_BIASES,
    PRESENCE,
    REPETITION,
    TOP_K,
    TOP_P,
    StateArrays,
)
from paceline.worker.truncation_cpu import F32, I32, U32, greatest, total, truncate

_NOT_MINE = (np.int64(0), -np.inf)  # of a share when another one does all


class Places(NamedTuple):
    """Where tokens are to be sampled: P places, V token ids.

    The last three are a `sampling.Prefix`, or empty.
    """

    logits: F32  # [P, V]
    rows: I64  # [P]
    positions: I64  # [P]
    drafted: I64
    drafted_ends: I64
    num_drafted: I64


class Scratch(NamedTuple):
    """Memory of one thread, [V] each."""

    logits: F32
    ids: U32
    keys: I32
    weights: F32
    kept: F32


@kernel
def make_scratch(num_columns: int) -> Scratch:
    """Memory that costs as far as it is used."""
    return Scratch(
        np.empty(num_columns, np.float32),
        np.empty(num_columns, np.uint32),
        np.empty(num_columns, np.int32),
        np.empty(num_columns, np.float32),
        np.empty(num_columns, np.float32),
    )


@kernel
def argmax(x: F32) -> int:
    """Index of the greatest value, the lowest among equals; 0 if nothing is above -inf."""
    best, best_begin = MINUS_INFINITY, 0
    for begin in range(0, x.size, BLOCK):
        found = greatest(x[begin : begin + BLOCK])
        if found > best:
            best, best_begin = found, begin
    for v in range(best_begin, x.size):
        if order(x[v]) == best:
            return v
    return 0


@kernel
def _process(x: F32, row: int, position: int, state: StateArrays, drafted: I64) -> None:
    """Biases and penalties of a row, on its logits `x` in place.

    `drafted` are tokens behind those that the state has counted.
    """
    for j in range(state.ints[row, NUM_BIASES]):
        if position < state.bias_until[row, j]:
            x[state.bias_ids[row, j]] += state.bias_values[row, j]
    if state.ints[row, HAS_PENALTIES]:  # only then do `counts` and `prompt_mask` surely have the row
        _penalize(x, state.floats[row], state.counts[row], state.prompt_mask[row], drafted)


@kernel
def _penalized(
    value: np.float32,
    count: np.int32,
    in_prompt: bool,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> np.float32:
    generated = count > 0
    if generated or in_prompt:
        value = value / repetition if value > ZERO else value * repetition
    return value - frequency * np.float32(count) - presence * (ONE if generated else ZERO)


@kernel
def _penalize(x: F32, floats: F32, counts: I32, prompt_mask: NDArray[np.bool_], drafted: I64) -> None:
    # Read once: the stores below might alias them.
    repetition, frequency, presence = floats[REPETITION], floats[FREQUENCY], floats[PRESENCE]
    before = np.empty(drafted.size, np.float32)
    for i in range(drafted.size):
        before[i] = x[drafted[i]]
    for v in range(x.size):
        x[v] = _penalized(x[v], counts[v], prompt_mask[v], repetition, frequency, presence)
    for i in range(drafted.size):
        v, count = drafted[i], counts[drafted[i]]
        for j in range(drafted.size):
            count += np.int32(drafted[j] == v)
        x[v] = _penalized(before[i], np.int32(count), prompt_mask[v], repetition, frequency, presence)


@kernel
def _draw_truncated(
    x: F32, best: int, names: I64, position: int, floats: F32, ints: I64, scratch: Scratch
) -> np.int64:
    """A token of a row with `top_k` or `top_p`; otherwise as `_draw`."""
    ids, keys, kept, inv = scratch.ids, scratch.keys, scratch.kept, floats[INV_TEMPERATURE]
    weigh(x, x[best], inv, scratch.weights)
    num = truncate(x, scratch.weights, ints[TOP_K], floats[TOP_P], floats[MIN_P], ids, keys, kept)
    return race(best, ids[:num], kept[:num], x, names, inv, position, ints)


@kernel
def _draw(
    x: F32,
    best: int,
    names: I64,
    position: int,
    floats: F32,
    ints: I64,
    scratch: Scratch,
    begin: int,
    end: int,
) -> tuple[np.int64, float]:
    """A token of a row at a temperature above 0, and its score.

    Args:
        best: the first column of greatest logit, which is finite.
        names: the tokens of the columns, or empty: a column is its token.
        begin, end: the columns that take part beside `best`, where neither `top_k` nor `top_p` applies.
    """
    if ints[TOP_K] > 0 or floats[TOP_P] < ONE:
        return _draw_truncated(x, best, names, position, floats, ints, scratch), np.inf
    return race_all(best, begin, end, floats[MIN_P], x, names, floats[INV_TEMPERATURE], position, ints)


@kernel
def _shared(row: int, state: StateArrays) -> bool:
    """Whether the shares of a row's place each do their part: else the first does all."""
    floats, ints = state.floats[row], state.ints[row]
    draws = floats[INV_TEMPERATURE] != ZERO and ints[TOP_K] == 0 and floats[TOP_P] >= ONE
    return bool(draws and ints[NUM_BIASES] == 0 and ints[HAS_PENALTIES] == 0)


@kernel
def sample_place(
    p: int, share: int, num_shares: int, places: Places, state: StateArrays, scratch: Scratch
) -> tuple[np.int64, float]:
    """The winner at place `p` in one of its shares, and its score, infinite if no other matters.

    The place's token is the winner of greatest score of all shares, the lowest among equals.
    """
    row, position, x = places.rows[p], places.positions[p], places.logits[p]
    begin, end = 0, x.size
    if _shared(row, state):
        begin = x.size * share // num_shares
        end = x.size * (share + 1) // num_shares
    elif share:
        return _NOT_MINE
    if state.ints[row, NUM_BIASES] or state.ints[row, HAS_PENALTIES]:
        x = scratch.logits
        for v in range(x.size):
            x[v] = places.logits[p, v]
        drafted = places.drafted[:0]
        if places.num_drafted.size:
            ends = places.drafted_ends[p]
            drafted = places.drafted[ends - places.num_drafted[p] : ends]
        _process(x, row, position, state, drafted)
    best = argmax(x)
    if state.floats[row, INV_TEMPERATURE] != ZERO and np.isfinite(x[best]):
        floats, ints = state.floats[row], state.ints[row]
        return _draw(x, best, places.rows[:0], position, floats, ints, scratch, begin, end)
    return np.int64(best), np.inf


@entry_kernel
def sample_positions(
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
    drafted: I64,
    drafted_ends: I64,
    num_drafted: I64,
    token_ids: I64,
) -> None:
    """Sample all `Places` into `token_ids` [P] with a `SamplerState`'s arrays; see `sampling.sample`."""
    places = Places(logits, rows, positions, drafted, drafted_ends, num_drafted)
    state = StateArrays(floats, ints, bias_ids, bias_values, bias_until, counts, prompt_mask)
    scratch = make_scratch(logits.shape[1])
    for p in range(rows.size):
        token_ids[p], _ = sample_place(p, 0, 1, places, state, scratch)


@kernel
def _lowest_best(x: F32, best: int, names: I64) -> np.int64:
    """The lowest name among the columns that equal column `best`, the first of them."""
    winner, top = np.int64(names[best]), order(x[best])
    for begin in range(best - best % BLOCK, x.size, BLOCK):
        block = x[begin : begin + BLOCK]
        if greatest(block) == top:
            for i in range(block.size):
                if order(block[i]) == top:
                    winner = min(winner, np.int64(names[begin + i]))
    return winner


@kernel
def draft_place(
    x: F32, names: I64, row: int, position: int, floats: F32, ints: I64, scratch: Scratch
) -> np.int64:
    """The draft of one row; see `draft_positions`."""
    best = argmax(x)
    if floats[row, INV_TEMPERATURE] != ZERO and np.isfinite(x[best]):
        return _draw(x, best, names, position, floats[row], ints[row], scratch, 0, x.size)[0]
    return _lowest_best(x, best, names) if names.size else np.int64(best)


@entry_kernel
def draft_positions(
    logits: F32, names: I64, rows: I64, positions: I64, floats: F32, ints: I64, token_ids: I64
) -> None:
    """Drafts of rows without biases and penalties into `token_ids` [B]; see `drafting.CoupledChoice`.

    Args:
        logits: [B, C]; names: [C], the token of each column, or empty: a column is its token. Columns that
            equal one another at a border of `top_k` or `top_p` stay in their own order.
    """
    scratch = make_scratch(logits.shape[1])
    for b in range(rows.size):
        token_ids[b] = draft_place(logits[b], names, rows[b], positions[b], floats, ints, scratch)


@entry_kernel
def top_probabilities(logits: F32, at: I64, step: int, probabilities: F32) -> None:
    """The greatest softmax probability of each row `at` of `logits`, into column `step`."""
    weights = np.empty(logits.shape[1], np.float32)
    for b in at:
        x = logits[b]
        weigh(x, x[argmax(x)], ONE, weights)
        mass = total(weights)
        probabilities[b, step] = 1.0 / mass if mass > 0.0 else 0.0  # 0: no number is finite
