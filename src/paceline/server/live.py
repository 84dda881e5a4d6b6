"""The last ten minutes of an engine, a point a second: what the live page draws.

Made from the reports that the engine sends anyway, and bounded. An idle engine sends none, so there are no
points of idle times. Knows nothing of HTTP or of the page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from paceline.engine.stats import RecentStep, SchedulerStats
from paceline.server.speculation import SpeculationHealth

INTERVAL = 1.0  # seconds between points, at least
MAX_POINTS = 600


class LivePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What happened between the point before and this one."""

    at: float  # seconds since 1970
    seconds: float  # since the point before
    num_running: int  # at its end
    num_waiting: int
    num_tokens: int  # delivered
    steps: dict[str, list[int]]  # by reason, then by the depth of the deepest row from 0
    rounds_by_depth: list[int]
    accepted_per_pos: list[int]
    plain_seconds: float  # as in `engine.stats.PolicyStats`, and the three below
    decoding_seconds: float
    predicted_seconds: float
    measured_seconds: float


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `GET /live`."""

    model: str
    now: float  # seconds since 1970
    unavailable: str | None  # why requests are not taken at present
    speculation: SpeculationHealth
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of the K/V pages
    num_guard_trips: int
    cost_drift: float | None  # times slower than when costs were measured; null: the policy knows no costs
    believed_acceptance: list[float]  # of a draft at each position, if those before it were right
    recent: list[RecentStep]
    points: list[LivePoint]


class History:
    """Points, and the newest report. The clock is the caller's: any monotonic one, in seconds."""

    def __init__(self, now: float) -> None:
        self._to_epoch = time.time() - now
        self._points: deque[LivePoint] = deque(maxlen=MAX_POINTS)
        self._base: tuple[SchedulerStats, float] | None = None  # where the next point begins
        self._pending: tuple[SchedulerStats, float] | None = None  # later than that, and not a point yet

    def add(self, stats: SchedulerStats, now: float) -> None:
        """A report has come."""
        self._settle(now)
        if self._base is None or _began_anew(self._base[0], stats):
            self._base, self._pending = (stats, now), None
            return
        self._pending = (stats, now)
        if now - self._base[1] >= INTERVAL:
            self._close()

    def points(self, since: float, now: float) -> list[LivePoint]:
        """Those later than `since`, in seconds since 1970, oldest first."""
        self._settle(now)
        return [point for point in self._points if point.at > since]

    def epoch(self, now: float) -> float:
        """`now` in seconds since 1970."""
        return self._to_epoch + now

    def _settle(self, now: float) -> None:
        """A report that none has followed was the last before idleness: it ends a point of its own."""
        if self._pending is not None and now - self._pending[1] >= INTERVAL:
            self._close()

    def _close(self) -> None:
        assert self._base is not None
        assert self._pending is not None
        (before, began), (after, ended) = self._base, self._pending
        self._points.append(_point(before, after, self.epoch(ended), ended - began))
        self._base, self._pending = self._pending, None


def _began_anew(before: SchedulerStats, after: SchedulerStats) -> bool:
    """Whether this is another engine, whose counters start again."""
    return (
        after.num_generated_tokens < before.num_generated_tokens
        or after.num_prompt_tokens_computed < before.num_prompt_tokens_computed
    )


def _point(before: SchedulerStats, after: SchedulerStats, at: float, seconds: float) -> LivePoint:
    old, new = before.policy, after.policy
    return LivePoint(
        at=round(at, 3),
        seconds=round(seconds, 3),
        num_running=after.num_running,
        num_waiting=after.num_waiting,
        num_tokens=after.num_generated_tokens - before.num_generated_tokens,
        steps={
            reason: since
            for reason, counts in new.steps.items()
            if any(since := _since(old.steps.get(reason, ()), counts))
        },
        rounds_by_depth=_since(before.speculation.rounds_by_depth, after.speculation.rounds_by_depth),
        accepted_per_pos=_since(before.speculation.accepted_per_pos, after.speculation.accepted_per_pos),
        plain_seconds=round(new.plain_seconds - old.plain_seconds, 5),
        decoding_seconds=round(new.decoding_seconds - old.decoding_seconds, 5),
        predicted_seconds=round(new.predicted_seconds - old.predicted_seconds, 5),
        measured_seconds=round(new.measured_seconds - old.measured_seconds, 5),
    )


def _since(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Differences; what was not there before was 0."""
    return [value - (before[i] if i < len(before) else 0) for i, value in enumerate(after)]
