"""The loop: plan a step, run it, commit what it came to.

Knows nothing of processes, sockets or text. A worker that raises leaves its device in a state
that nobody knows, so the engine does not go on after it: it answers every request with an error,
then tells its owner, who starts another.
"""

from __future__ import annotations

from paceline.config import EngineConfig
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import SchedulerStats
from paceline.errors import EngineDeadError
from paceline.request import EngineRequest, RequestOutput
from paceline.step import Worker


class Engine:
    """A scheduler and a worker, one step at a time. Not thread-safe, and `step` not interruptible.

    After a failure `step` returns the final outputs of every open request once; from then on
    `add` and `step` raise `EngineDeadError` (its `__cause__` is the failure) and `has_work` stays
    true, so that a plain `while engine.has_work: deliver(engine.step())` delivers first and then
    raises.
    """

    def __init__(self, scheduler: Scheduler, worker: Worker, config: EngineConfig) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._check_when_idle = config.debug
        self._failure: Exception | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, or to raise."""
        return self._failure is not None or self._scheduler.has_work

    def stats(self) -> SchedulerStats:
        """The scheduler's numbers of this moment."""
        return self._scheduler.stats()

    def add(self, request: EngineRequest) -> None:
        """Accept a request; each accepted one gets exactly one output with a `finish_reason`.

        Raises:
            RequestError: it can never run here.
            QueueFullError: no room to wait in.
            EngineDeadError: the engine has failed.
        """
        self._raise_if_dead()
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its final output, or None if it has had one or never came."""
        return self._scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step to its end; returns at most one output for each request.

        Raises:
            EngineDeadError: the engine has failed in an earlier step.
        """
        self._raise_if_dead()
        outputs: list[RequestOutput] = []
        try:
            plan = self._scheduler.schedule()
            if plan is not None:
                result = self._worker.launch(plan).result()
                outputs = self._scheduler.commit(plan, result)
            if self._check_when_idle and not self._scheduler.has_work:
                self._scheduler.check()
        except Exception as failure:
            self._failure = failure
            outputs += self._scheduler.abandon(_reason(failure))
        return outputs

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(_reason(self._failure)) from self._failure


def _reason(failure: Exception) -> str:
    """The failure in one line."""
    first_line = str(failure).strip().partition("\n")[0]
    return f"the engine failed: {type(failure).__name__}" + (f": {first_line}" if first_line else "")
