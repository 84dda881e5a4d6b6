"""An engine for `front.py` that costs next to nothing: one token a stream a step, at a fixed pace.

It begins when all streams are there, and in the end writes when each step was sent, so that the client
can tell what the server added. Settings come through the environment, as `Pace` has them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.factory import BuiltEngine
from paceline.engine.messages import Ready
from paceline.engine.stats import SchedulerStats
from paceline.request import EngineRequest, RequestOutput
from paceline.tokenizer import load_tokenizer

TEXT = " the quick brown fox jumps over a lazy dog and runs on through old woods by night"


@dataclass(frozen=True, slots=True)
class Pace:
    """How the engine goes."""

    num_streams: int
    steps_per_second: float
    core: int  # that it runs on
    times_file: str  # where the times go: seconds of time.monotonic, one per step

    @classmethod
    def from_environment(cls) -> Pace:
        return cls(**json.loads(os.environ["FRONT_PACE"]))

    def to_environment(self) -> dict[str, str]:
        return {"FRONT_PACE": json.dumps({name: getattr(self, name) for name in self.__slots__})}


class PacedEngine:
    """See the module."""

    def __init__(self, pace: Pace, token_ids: list[int]) -> None:
        self._pace = pace
        self._token_ids = token_ids
        self._live: dict[str, EngineRequest] = {}
        self._times: list[float] = []
        self._next_step = 0.0

    @property
    def has_work(self) -> bool:
        return len(self._live) == self._pace.num_streams or bool(self._times)

    def add(self, request: EngineRequest) -> None:
        self._live[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        self._wait()
        token_id = self._token_ids[len(self._times) % len(self._token_ids)]
        self._times.append(time.monotonic())
        outputs = [self._output(request, token_id) for request in self._live.values()]
        self._live = {o.request_id: self._live[o.request_id] for o in outputs if o.finish_reason is None}
        if not self._live:
            Path(self._pace.times_file).write_text(json.dumps(self._times), encoding="utf-8")
            self._times = []
        return outputs

    def _wait(self) -> None:
        now = time.monotonic()
        if not self._times:
            self._next_step = now
        self._next_step += 1 / self._pace.steps_per_second
        if self._next_step > now:
            time.sleep(self._next_step - now)

    def _output(self, request: EngineRequest, token_id: int) -> RequestOutput:
        is_last = len(self._times) == request.params.max_tokens
        return RequestOutput(request.request_id, [token_id], finish_reason="length" if is_last else None)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._live),
            num_waiting=0,
            num_pages=1,
            num_pages_used=0,
            num_pages_cached=0,
            num_preemptions=0,
            num_prompt_tokens_computed=0,
            num_prompt_tokens_cached=0,
            num_generated_tokens=0,
        )


def build(config: EngineConfig) -> BuiltEngine:
    """The factory."""
    pace = Pace.from_environment()
    os.sched_setaffinity(0, {pace.core})
    tokenizer = load_tokenizer(Path(config.model))
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)
    ready = Ready(max_model_len=65536, vocab_size=tokenizer.vocab_size)
    return BuiltEngine(PacedEngine(pace, token_ids), ready)
