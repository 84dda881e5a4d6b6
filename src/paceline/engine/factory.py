"""How an engine comes to be, and what is asked of one: the seam where tests put a fake.

Imports nothing heavy until `build` is called.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from paceline.config import EngineConfig
from paceline.engine.messages import Ready
from paceline.engine.stats import SchedulerStats
from paceline.request import EngineRequest, RequestOutput

if TYPE_CHECKING:
    from paceline.policy import CostModel
    from paceline.worker.build import ModelInfo
    from paceline.worker.worker import ModelWorker

log = logging.getLogger(__name__)


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

    def rest(self) -> None:
        """Before a `step` that does not follow at once on the one before."""
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
    from paceline.draft.load import NONE
    from paceline.engine.engine import Engine
    from paceline.engine.policies import make_steering
    from paceline.engine.scheduler import Scheduler
    from paceline.engine.trace import check_path
    from paceline.worker.build import build_worker

    if config.trace is not None:
        check_path(Path(config.trace))  # before minutes of loading
    worker, info = build_worker(config, progress=sys.stderr.isatty())
    is_auto = config.depth == "auto" and info.max_depth > 0
    asks_costs = is_auto and config.policy == "governor"
    asks_costs |= info.max_depth > 0 and config.trace is not None  # a trace says what its steps cost
    costs = _costs(worker, info, config) if asks_costs else None
    scheduler = Scheduler(
        config,
        num_pages=info.num_pages,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_depth=info.max_depth,
        steering=make_steering(config, info.max_depth, costs),
    )
    ready = Ready(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_depth=info.max_depth,
        depth="auto" if is_auto else min(int(config.depth), info.max_depth) if info.max_depth else 0,
        draft=None if info.draft == NONE else _shown(info.draft),
    )
    return BuiltEngine(Engine(scheduler, worker, config), ready)


def _costs(worker: ModelWorker, info: ModelInfo, config: EngineConfig) -> CostModel | None:
    """What the governor starts from; None: a guess, which serving corrects."""
    from paceline.engine.policies import auto_depths
    from paceline.worker.calibrated import calibrate

    if not config.calibration:
        return None
    deepest = auto_depths(info.max_depth)[-1]
    try:
        return calibrate(worker, info, config, deepest, progress=sys.stderr.isatty()).costs
    except Exception as error:  # whatever it is, the server can do without
        log.warning("the model could not be timed, costs are learnt while serving: %s", error)
        log.info("where timing failed", exc_info=error)
        return None


def _shown(draft: str) -> str:
    """A drafter's name for everybody: where a head lies on this machine is nobody's business."""
    return Path(draft).resolve().name if Path(draft).is_dir() else draft
