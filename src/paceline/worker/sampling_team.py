"""Sampling on CPU by a team of kernel threads: a place, or a share of one, at a time.

Chooses what `sampling_cpu` does on one thread, bit for bit. Arguments lie in words that the kernels read anew
at every run: a run is one native call, and few words written before it.

Does not know how a token is chosen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from paceline.kernels.parallel import Kernel, Program, Team, address_of, arg
from paceline.kernels.simd import op
from paceline.worker.cpu_math import kernel
from paceline.worker.race_cpu import I64
from paceline.worker.sampler_state import NUM_FLOATS, NUM_INTS, StateArrays
from paceline.worker.sampling_cpu import Places, Scratch, draft_place, sample_place

_MIN_SHARE = 8_192  # tokens; each share looks for the greatest logit by itself
_MAX_SHARED = 4  # places for each thread: with more, all threads have enough to do without shares

# The words: addresses and sizes.
_LOGITS, _NUM_COLUMNS, _ROWS, _POSITIONS, _NUM_PLACES = range(5)
_DRAFTED, _NUM_TOKENS, _DRAFTED_ENDS, _NUM_DRAFTED, _NUM_ENDS = range(5, 10)  # a `Prefix`, or of size 0
_NAMES, _NUM_NAMES, _TOKEN_IDS, _WINNERS, _SCORES, _NUM_SHARES = range(10, 16)
_STATE = 16  # seven arrays, then their sizes
_NUM_ROWS, _NUM_BIASES, _NUM_COUNTED, _VOCAB_SIZE, _SCRATCH, _SCRATCH_STRIDE, _NUM_WORDS = range(23, 30)


@op(types.voidptr, types.int64)
def _at(b: Any, address: Any) -> Any:
    return b.inttoptr(address, ir.IntType(8).as_pointer())


@kernel
def _words(args: int) -> I64:
    return carray(_at(arg(args, 0)), _NUM_WORDS, np.int64)  # type: ignore[no-any-return]


@kernel
def _places(words: I64) -> Places:
    num = words[_NUM_PLACES]
    return Places(
        carray(_at(words[_LOGITS]), (num, words[_NUM_COLUMNS]), np.float32),
        carray(_at(words[_ROWS]), num, np.int64),
        carray(_at(words[_POSITIONS]), num, np.int64),
        carray(_at(words[_DRAFTED]), words[_NUM_TOKENS], np.int64),
        carray(_at(words[_DRAFTED_ENDS]), words[_NUM_ENDS], np.int64),
        carray(_at(words[_NUM_DRAFTED]), words[_NUM_ENDS], np.int64),
    )


@kernel
def _state(words: I64) -> StateArrays:
    num, num_biases = words[_NUM_ROWS], words[_NUM_BIASES]
    counted = (words[_NUM_COUNTED], words[_VOCAB_SIZE])
    return StateArrays(
        carray(_at(words[_STATE]), (num, NUM_FLOATS), np.float32),
        carray(_at(words[_STATE + 1]), (num, NUM_INTS), np.int64),
        carray(_at(words[_STATE + 2]), (num, num_biases), np.int64),
        carray(_at(words[_STATE + 3]), (num, num_biases), np.float32),
        carray(_at(words[_STATE + 4]), (num, num_biases), np.int64),
        carray(_at(words[_STATE + 5]), counted, np.int32),
        carray(_at(words[_STATE + 6]), counted, np.bool_),
    )


@kernel
def _scratch(words: I64, thread: int) -> Scratch:
    size = words[_NUM_COLUMNS]
    base, step = words[_SCRATCH] + thread * words[_SCRATCH_STRIDE], size * 4
    return Scratch(
        carray(_at(base), size, np.float32),
        carray(_at(base + step), size, np.uint32),
        carray(_at(base + 2 * step), size, np.int32),
        carray(_at(base + 3 * step), size, np.float32),
        carray(_at(base + 4 * step), size, np.float32),
    )


def _sample(args: int, thread: int, token: int, begin: int, end: int) -> None:
    words = _words(args)
    places, state, scratch = _places(words), _state(words), _scratch(words, thread)
    num_shares, num = words[_NUM_SHARES], places.rows.size * words[_NUM_SHARES]
    winners = carray(_at(words[_WINNERS]), num, np.int64)
    scores = carray(_at(words[_SCORES]), num, np.float64)
    for task in range(begin, end):
        p, share = task // num_shares, task % num_shares
        winners[task], scores[task] = sample_place(p, share, num_shares, places, state, scratch)


def _merge(args: int, thread: int, token: int, begin: int, end: int) -> None:
    words = _words(args)
    num_shares, num = words[_NUM_SHARES], end * words[_NUM_SHARES]
    winners = carray(_at(words[_WINNERS]), num, np.int64)
    scores = carray(_at(words[_SCORES]), num, np.float64)
    token_ids = carray(_at(words[_TOKEN_IDS]), end, np.int64)
    for p in range(begin, end):
        best = p * num_shares
        for i in range(best + 1, best + num_shares):
            if scores[i] > scores[best] or (scores[i] == scores[best] and winners[i] < winners[best]):
                best = i
        token_ids[p] = winners[best]


def _draft(args: int, thread: int, token: int, begin: int, end: int) -> None:
    words = _words(args)
    places, state, scratch = _places(words), _state(words), _scratch(words, thread)
    names = carray(_at(words[_NAMES]), words[_NUM_NAMES], np.int64)
    token_ids = carray(_at(words[_TOKEN_IDS]), end, np.int64)
    for b in range(begin, end):
        row, position = places.rows[b], places.positions[b]
        token_ids[b] = draft_place(places.logits[b], names, row, position, state.floats, state.ints, scratch)


_sample_kernel, _merge_kernel, _draft_kernel = Kernel(_sample), Kernel(_merge), Kernel(_draft)


class SamplingTeam:
    """Samples on the threads of `team`, in the memory of a `SamplerState` of `vocab_size` tokens.

    Tensors are int64 and contiguous, but for fp32 logits.
    """

    def __init__(self, team: Team, vocab_size: int) -> None:
        self._team = team
        stride = -(-5 * vocab_size // 16) * 16 + 16  # in whole cache lines, and none that two share
        self._scratch = np.empty((team.num_threads, stride), np.float32)
        self._winners, self._scores = np.empty(0, np.int64), np.empty(0)
        self._words, self._num_tasks = np.zeros(_NUM_WORDS, np.int64), np.zeros(2, np.int64)
        self._words[_VOCAB_SIZE:_NUM_WORDS] = vocab_size, address_of(self._scratch), stride * 4
        self._arrays: StateArrays | None = None
        tasks, places = self._num_tasks[:1], self._num_tasks[1:]
        phases = [
            _sample_kernel.bind(self._words, num_tasks=tasks),
            _merge_kernel.bind(self._words, num_tasks=places, step=1 << 20),
        ]
        self._sample, self._merged = Program(phases[:1]), Program(phases)
        self._draft = Program([_draft_kernel.bind(self._words, num_tasks=places)])

    def num_shares(self, num_places: int, num_columns: int) -> int:
        """Into how many parts each of the places is cut: 1 where every thread has as many whole ones."""
        num_threads = self._team.num_threads
        if num_places >= num_threads * _MAX_SHARED:
            return 1
        wanted = num_threads // math.gcd(num_places, num_threads)
        return max(1, min(wanted, num_columns // _MIN_SHARE))

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        arrays: StateArrays,
        prefix: tuple[Tensor, Tensor, Tensor],
        token_ids: Tensor,
    ) -> None:
        """`sampling_cpu.sample_positions`; the prefix: tokens, ends, numbers of drafted ones, or empty."""
        num, num_columns = logits.shape
        num_shares = self.num_shares(num, num_columns)
        if len(self._winners) < num * num_shares:
            self._winners, self._scores = np.empty(num * num_shares, np.int64), np.empty(num * num_shares)
            self._words[_SCORES] = address_of(self._scores)
        winners = token_ids.data_ptr() if num_shares == 1 else address_of(self._winners)
        self._write(logits, rows, positions, arrays, token_ids)
        drafted, ends, num_drafted = prefix
        self._words[_DRAFTED:_NAMES] = (
            drafted.data_ptr(), len(drafted), ends.data_ptr(), num_drafted.data_ptr(), len(ends),
        )  # fmt: skip
        self._words[_WINNERS], self._words[_NUM_SHARES] = winners, num_shares
        self._num_tasks[:] = num * num_shares, num
        self._team.run(self._sample if num_shares == 1 else self._merged)

    def draft(
        self,
        logits: Tensor,
        names: Tensor | None,
        rows: Tensor,
        positions: Tensor,
        arrays: StateArrays,
        token_ids: Tensor,
    ) -> None:
        """`sampling_cpu.draft_positions`."""
        self._write(logits, rows, positions, arrays, token_ids)
        self._words[_NAMES : _NUM_NAMES + 1] = (0, 0) if names is None else (names.data_ptr(), len(names))
        self._num_tasks[1] = len(logits)
        self._team.run(self._draft)

    def _write(
        self, logits: Tensor, rows: Tensor, positions: Tensor, arrays: StateArrays, token_ids: Tensor
    ) -> None:
        words = self._words
        num, num_columns = logits.shape
        assert num_columns <= words[_VOCAB_SIZE], "the scratch memory is for the state's vocabulary"
        words[: _NUM_PLACES + 1] = (
            logits.data_ptr(), num_columns, rows.data_ptr(), positions.data_ptr(), num,
        )  # fmt: skip
        words[_TOKEN_IDS] = token_ids.data_ptr()
        if arrays is not self._arrays:
            self._arrays = arrays
            words[_STATE:_NUM_ROWS] = [address_of(array) for array in arrays]
            words[_NUM_ROWS:_VOCAB_SIZE] = len(arrays.floats), arrays.bias_ids.shape[1], len(arrays.counts)
