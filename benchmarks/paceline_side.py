"""Paceline's engine in this process, timed: the scheduler, the worker and nothing around them.

Knows nothing of the engine it is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from common import TimedRun
from paceline.config import EngineConfig
from paceline.engine.factory import build
from paceline.prepare import ModelLimits, prepare
from paceline.request import SamplingParams


class PacelineSide:
    """The engine with its default settings."""

    def __init__(self, model: Path, num_threads: int) -> None:
        built = build(EngineConfig(model=str(model), threads=num_threads))
        self._engine = built.engine
        self._limits = ModelLimits(max_model_len=built.ready.max_model_len, vocab_size=built.ready.vocab_size)
        self._num_runs = 0

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> TimedRun:
        """Submit all prompts at once and step until all are done."""
        self._num_runs += 1
        requests = [
            prepare(f"{self._num_runs}.{i}", prompt, params, self._limits)[0]
            for i, prompt in enumerate(prompts)
        ]
        token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_started = num_cached = decode_tokens = 0
        start = time.perf_counter()
        all_started = decode_end = 0.0
        for request in requests:
            self._engine.add(request)
        is_decode_over = False
        while self._engine.has_work:
            outputs = self._engine.step()
            now = time.perf_counter()
            if all_started and not is_decode_over:
                decode_tokens += sum(len(output.token_ids) for output in outputs)
                decode_end = now
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                num_started += not token_ids[output.request_id]
                token_ids[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    is_decode_over = True
                    num_cached += output.num_cached_tokens
            if not all_started and num_started == len(prompts):
                all_started = now
        return TimedRun(
            prompt_seconds=all_started - start,
            decode_seconds=decode_end - all_started,
            decode_tokens=decode_tokens,
            whole_seconds=now - start,
            whole_tokens=sum(map(len, token_ids.values())),
            num_cached_tokens=num_cached,
            token_ids=tuple(map(tuple, token_ids.values())),
        )
