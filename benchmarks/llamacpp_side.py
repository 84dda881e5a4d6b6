"""llama.cpp in this process, timed, through the low-level API of llama-cpp-python.

One sequence per request; every step is one `llama_batch` with one token for each of them. What Python does
beside it is kept to a few numpy calls a step: the batch's arrays are filled in place, and the greedy choice
is one `argmax` over all sequences' logits where llama.cpp left them (its own greedy sampler copies
every logit into a struct first, and is slower).

Knows nothing of the engine it is compared with.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from common import TimedRun


def _quiet(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """Takes the place of the log on standard error."""


_QUIET = lib.llama_log_callback(_quiet)  # must live as long as the library


def build_version() -> str:
    """llama.cpp's own version and the features that it was built with."""
    features = lib.llama_print_system_info().decode()
    used = [f.partition("=")[0].strip() for f in features.partition(":")[2].split("|") if "= 1" in f]
    return f"{lib.llama_version().decode()} ({' '.join(used)})"


class LlamaCppModel:
    """The model's weights, loaded once with llama.cpp's default settings."""

    def __init__(self, path: Path) -> None:
        lib.llama_log_set(_QUIET, None)
        lib.llama_backend_init()
        self.handle = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.handle:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.handle))


class LlamaCppSide:
    """A context for a given number of sequences: use as a context manager.

    Args:
        row_len: most tokens of a sequence, prompt and answer. The K/V cache holds so many for each.
    """

    def __init__(self, model: LlamaCppModel, num_rows: int, row_len: int, num_threads: int) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = num_rows * row_len
        params.n_seq_max = num_rows
        params.n_threads = params.n_threads_batch = num_threads
        self._context: Any = lib.llama_init_from_model(model.handle, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context for {num_rows} sequences")
        self._vocab_size = model.vocab_size
        self._capacity = lib.llama_n_batch(self._context)
        self._batch = lib.llama_batch_init(self._capacity, 0, 1)
        self._tokens = _array(self._batch.token, self._capacity)
        self._positions = _array(self._batch.pos, self._capacity)
        self._wants_logits = _array(self._batch.logits, self._capacity)
        _array(self._batch.n_seq_id, self._capacity)[:] = 1

    def __enter__(self) -> LlamaCppSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lib.llama_batch_free(self._batch)
        lib.llama_free(self._context)

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> TimedRun:
        """Submit all prompts at once; greedy, whatever the tokens are, until each has `num_tokens`."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        num_rows = len(prompts)
        chosen = np.empty((num_tokens, num_rows), np.int64)
        start = time.perf_counter()
        chosen[0] = self._process_prompts(prompts)
        all_started = time.perf_counter()
        self._positions[:num_rows] = [len(prompt) for prompt in prompts]
        self._wants_logits[:num_rows] = 1
        for row in range(num_rows):
            self._batch.seq_id[row][0] = row
        self._batch.n_tokens = num_rows
        for i in range(1, num_tokens):
            self._tokens[:num_rows] = chosen[i - 1]
            chosen[i] = self._decode(num_rows)
            self._positions[:num_rows] += 1
        end = time.perf_counter()
        return TimedRun(
            prompt_seconds=all_started - start,
            decode_seconds=end - all_started,
            decode_tokens=(num_tokens - 1) * num_rows,
            whole_seconds=end - start,
            whole_tokens=num_tokens * num_rows,
            num_cached_tokens=0,
            token_ids=tuple(map(tuple, chosen.T.tolist())),
        )

    def _process_prompts(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Each prompt's first token; as many whole prompts in a batch as it takes."""
        first_ids: list[int] = []
        size = num_ends = 0
        for row, prompt in enumerate(prompts):
            if size + len(prompt) > self._capacity:
                first_ids += self._flush(size, num_ends)
                size = num_ends = 0
            end = size + len(prompt)
            self._tokens[size:end] = prompt
            self._positions[size:end] = np.arange(len(prompt))
            self._wants_logits[size:end] = 0
            self._wants_logits[end - 1] = 1
            for i in range(size, end):
                self._batch.seq_id[i][0] = row
            size, num_ends = end, num_ends + 1
        return first_ids + self._flush(size, num_ends)

    def _flush(self, size: int, num_ends: int) -> list[int]:
        self._batch.n_tokens = size
        token_ids: list[int] = self._decode(num_ends).tolist()
        return token_ids

    def _decode(self, num_outputs: int) -> NDArray[np.int64]:
        """Run the batch; the greedy choice at each of its outputs."""
        status = lib.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = lib.llama_get_logits(self._context)
        token_ids: NDArray[np.int64] = _array(logits, num_outputs, self._vocab_size).argmax(axis=1)
        return token_ids


def _array(pointer: Any, *shape: int) -> NDArray[Any]:
    """llama.cpp's memory as an array."""
    return np.ctypeslib.as_array(pointer, shape)
