"""How an engine comes to be, and what is asked of one: the seam where tests put a fake.

Imports nothing heavy until `build` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from paceline.config import EngineConfig
from paceline.engine.messages import Ready
from paceline.engine.stats import SchedulerStats
from paceline.request import EngineRequest, RequestOutput


class StepEngine(Protocol):
    """What the engine process and `LLM` drive."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises QueueFullError or RequestError."""
        ...

    def abort(self, request_id: str) -> object:
        """Give a request up; unknown ids are ignored."""
        ...

    def step(self) -> list[RequestOutput]:
        """Run one step and return what it gave. Raises EngineDeadError after a failure."""
        ...

    def stats(self) -> SchedulerStats:
        """Where it stands."""
        ...


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to run, and what there is to know of it."""

    engine: StepEngine
    ready: Ready


Factory: TypeAlias = Callable[[EngineConfig], BuiltEngine]


def build(config: EngineConfig) -> BuiltEngine:
    """Load the model and make the engine.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: a setting does not fit the model or the machine.
    """
    from paceline.engine.engine import Engine
    from paceline.engine.scheduler import Scheduler
    from paceline.worker.build import build_worker

    worker, info = build_worker(config, progress=sys.stderr.isatty())
    scheduler = Scheduler(
        config,
        num_pages=info.num_pages,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
    ready = Ready(max_model_len=info.max_model_len, vocab_size=info.vocab_size)
    return BuiltEngine(Engine(scheduler, worker, config), ready)
