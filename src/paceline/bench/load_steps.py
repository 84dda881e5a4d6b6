"""The load changes while requests are served: what depth, throughput and acceptance do then.

Every arm goes through the same script (one request in flight, then many, then one again) on the same jobs.
When the load falls, requests under way are finished, as real ones would be. Numbers are differences of the
engine's counters over short bins. For engines in this process only.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.bench.arms import Arm
from paceline.bench.charts import Axis, Chart, Line
from paceline.bench.figures import colours
from paceline.bench.local import ClosedLoop, LocalTarget, counters
from paceline.bench.page import document, figures, notes
from paceline.bench.report import FORMAT, INTERRUPTED, About, failure_lines, finite
from paceline.bench.sweep import Failure
from paceline.bench.workload import Column, Job, Workload
from paceline.engine.stats import SchedulerStats

BIN_SECONDS = 0.5
MIN_DRAFTED = 8  # in a bin, for a share of them to mean anything


@dataclass(frozen=True, slots=True)
class Phase:
    """So many requests in flight for so long."""

    concurrency: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bin:
    """What happened in a short while that ended at `time` seconds."""

    time: float
    num_running: int  # at its end
    rate: float  # tokens a second
    mean_depth: float  # over rows and steps; 0 without a drafter
    acceptance: float | None  # accepted of drafted; None: next to nothing was drafted


@dataclass(frozen=True, slots=True)
class Profile:
    """All arms through the script."""

    about: About
    arms: Sequence[Arm]
    phases: Sequence[Phase]
    courses: Mapping[str, Sequence[Bin]]  # by arm
    failures: Sequence[Failure]
    is_complete: bool


def jobs_of(workload: Workload, temperature: float) -> Iterator[Job]:
    """Jobs without end, the same for every arm; at this temperature but for prompts that have their own."""
    column = Column(temperature, None, 1)
    for round_id in itertools.count():
        yield from workload.work(column, round_id).jobs


def follow(
    target: LocalTarget,
    phases: Sequence[Phase],
    jobs: Iterator[Job],
    clock: Callable[[], float],
    bin_seconds: float = BIN_SECONDS,
) -> list[Bin]:
    """Take an arm through the script.

    Raises:
        PacelineError: a request or the engine failed.
    """
    bins: list[Bin] = []
    loop = target.loop()
    began = bin_began = clock()
    before = target.stats()
    try:
        while (wanted := _wanted(phases, clock() - began)) is not None:
            while loop.num_open < wanted:
                loop.send(target.request(next(jobs)))
            loop.step()
            now = clock()
            if now - bin_began >= bin_seconds:
                after = target.stats()
                bins.append(_bin(before, after, now - began, now - bin_began))
                before, bin_began = after, now
    finally:
        loop.give_up()
    return bins


def warm_up(target: LocalTarget, jobs: Iterator[Job]) -> None:
    """One request, not counted."""
    loop: ClosedLoop = target.loop()
    loop.send(target.request(next(jobs)))
    while loop.num_open:
        loop.step()


def _wanted(phases: Sequence[Phase], elapsed: float) -> int | None:
    """How many requests should be in flight; None: the script is over."""
    for phase in phases:
        if elapsed < phase.seconds:
            return phase.concurrency
        elapsed -= phase.seconds
    return None


def _bin(before: SchedulerStats, after: SchedulerStats, time: float, seconds: float) -> Bin:
    drafted = counters(after).since(counters(before))
    num_drafted = drafted.num_drafted
    return Bin(
        time=time,
        num_running=after.num_running,
        rate=(after.num_generated_tokens - before.num_generated_tokens) / seconds,
        mean_depth=drafted.mean_depth or 0.0,
        acceptance=drafted.num_accepted / num_drafted if num_drafted >= MIN_DRAFTED else None,
    )


# The report.


def to_json(profile: Profile) -> str:
    """The whole profile; docs/sweep.md has the schema."""
    record = {
        "format": FORMAT,
        "kind": "profile",
        **asdict(profile.about),
        "is_complete": profile.is_complete,
        "phases": [asdict(phase) for phase in profile.phases],
        "failures": [asdict(failure) for failure in profile.failures],
        "courses": {name: [asdict(b) for b in bins] for name, bins in profile.courses.items()},
    }
    return json.dumps(finite(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_text(profile: Profile) -> str:
    """Mean throughput and depth of each arm in each phase."""
    lines = [profile.about.work]
    for name, bins in profile.courses.items():
        shown = []
        ends = list(itertools.accumulate(phase.seconds for phase in profile.phases))
        for phase, end in zip(profile.phases, ends, strict=True):
            mine = [b for b in bins if end - phase.seconds < b.time <= end]
            if mine:
                rate = statistics.fmean(b.rate for b in mine)
                depth = statistics.fmean(b.mean_depth for b in mine)
                shown.append(f"{phase.concurrency} in flight: {rate:.1f} tok/s at depth {depth:.1f}")
        lines.append(f"{name}: {'; '.join(shown)}")
    lines += failure_lines(profile.failures)
    if not profile.is_complete:
        lines.append(INTERRUPTED)
    return "\n".join(lines) + "\n"


def to_html(profile: Profile) -> str:
    """The page."""
    parts = [figures(charts(profile))]
    parts += notes(failure_lines(profile.failures), profile.is_complete)
    return document(profile.about, "Paceline under changing load", parts)


def charts(profile: Profile) -> list[Chart]:
    """Depth, throughput and acceptance over time."""
    begins = [0.0, *itertools.accumulate(phase.seconds for phase in profile.phases)]
    marks = [
        (begin, f"{phase.concurrency} in flight")
        for begin, phase in zip(begins, profile.phases, strict=False)
    ]
    x = Axis("seconds", high=begins[-1])
    return [
        Chart("Depth", x, Axis("mean depth", high=1.0), _lines(profile, lambda b: b.mean_depth), marks=marks),
        Chart("Throughput", x, Axis("tok/s"), _lines(profile, lambda b: b.rate), marks=marks),
        Chart(
            "Acceptance",
            x,
            Axis("accepted of drafted", high=1.0),
            _lines(profile, lambda b: b.acceptance),
            marks=marks,
        ),
    ]


def _lines(profile: Profile, value: Callable[[Bin], float | None]) -> list[Line]:
    palette = colours(profile.arms)
    lines = []
    for arm in profile.arms:
        width = 2.6 if arm.role == "adaptive" else 1.6
        for points in _stretches([(b.time, value(b)) for b in profile.courses.get(arm.name, ())]):
            line = Line(
                arm.name, palette[arm.name], points, dash=arm.role == "plain", width=width, dots=False
            )
            lines.append(line)
    return lines


def _stretches(values: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The runs of values that are known: no line is drawn where nothing was drafted."""
    found: list[list[tuple[float, float]]] = [[]]
    for time, value in values:
        if value is None:
            found.append([])
        else:
            found[-1].append((time, value))
    return [points for points in found if points]
