"""The loop: plan a step, run it, commit what it came to.

Knows nothing of processes, sockets or text. A worker that raises leaves its device in a state
that nobody knows, so the engine does not go on after it: it answers every request with an error,
then tells its owner, who starts another.
"""

from __future__ import annotations

import time

import msgspec

from paceline.config import EngineConfig
from paceline.engine.preparing import Preparing
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import SchedulerStats
from paceline.errors import EngineDeadError, QueueFullError, RequestError, describe
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
        self._max_preparing = config.max_queue
        self._preparing = Preparing()
        self._failure: Exception | None = None
        self._last_result: float | None = None  # when the last step came back, if nothing was idle since

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, or to raise."""
        return self._failure is not None or self._scheduler.has_work or len(self._preparing) > 0

    def stats(self) -> SchedulerStats:
        """The scheduler's numbers of this moment; requests that are being prepared wait."""
        stats = self._scheduler.stats()
        if not self._preparing:
            return stats
        return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + len(self._preparing))

    def add(self, request: EngineRequest) -> None:
        """Accept a request; each accepted one gets exactly one output with a `finish_reason`.

        Raises:
            RequestError: it can never run here.
            QueueFullError: no room to wait in.
            EngineDeadError: the engine has failed.
        """
        self._raise_if_dead()
        if request.request_id in self._preparing:
            raise RequestError("request_id", f"request_id {request.request_id!r} is in use")
        if request.params.grammar is None:
            self._scheduler.add(request)
            return
        self._scheduler.vet(request)
        if len(self._preparing) >= self._max_preparing:
            raise QueueFullError(
                f"the queue is full: {len(self._preparing)} requests wait for their grammars"
            )
        future = self._worker.prepare(request.params)
        if future is None or (future.done() and future.exception() is None):
            self._scheduler.add(request)
        else:
            self._preparing.add(request, future)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its final output, or None if it has had one or never came."""
        return self._preparing.drop(request_id) or self._scheduler.abort(request_id)

    def rest(self) -> None:
        """The caller was at something else: the time since the last step says nothing of the next."""
        self._last_result = None

    def step(self) -> list[RequestOutput]:
        """Run one step to its end; returns at most one output for each request.

        Raises:
            EngineDeadError: the engine has failed in an earlier step.
        """
        self._raise_if_dead()
        outputs: list[RequestOutput] = []
        try:
            outputs += self._preparing.start_ready(self._scheduler.add)
            plan = self._scheduler.schedule()
            seconds_thought = self._scheduler.take_seconds_thought()
            if plan is not None:
                if self._last_result is None:
                    begun = time.perf_counter()
                else:
                    begun = self._last_result + seconds_thought
                result = self._worker.launch(plan).result()
                self._last_result = time.perf_counter()
                outputs += self._scheduler.commit(plan, result, self._last_result - begun)
            elif self._preparing:
                self._preparing.wait()
            if plan is None or not self._scheduler.has_work:
                self._last_result = None  # what comes next is no continuation
            # Again: what this step left free is theirs before it is a newcomer's.
            outputs += self._preparing.start_ready(self._scheduler.add)
            if self._check_when_idle and not self._scheduler.has_work:
                self._scheduler.check()
        except Exception as failure:
            self._failure = failure
            outputs += self._scheduler.abandon(_reason(failure)) + self._preparing.abandon(_reason(failure))
        return outputs

    def _raise_if_dead(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(_reason(self._failure)) from self._failure


def _reason(failure: Exception) -> str:
    """The failure in one line."""
    return f"the engine failed: {describe(failure)}"
