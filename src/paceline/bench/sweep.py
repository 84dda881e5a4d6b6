"""The order of a sweep: which arm does what, when; twice, the second time backwards.

    pass 1   columns forwards:   warm-up, discarded, then rounds; arms take turns in each
    pass 2   columns backwards:  rounds of other prompts, arms in reversed order

The warm-up is a round of all arms, and as many more of those that adapt as bring them to a number of engine
steps: they are judged on a load that they have met.

A round is one piece of work, done by every arm in turn: its numbers are comparable pairwise, whatever the
machine does over the minutes. The best arm is chosen on pass 1 and judged on pass 2 (`summary`).

Knows nothing of engines or HTTP: an arm is something that does work and says how fast.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.bench.arms import Arm
from paceline.bench.window import Sample
from paceline.bench.workload import Column, Work, Workload
from paceline.errors import EngineDeadError, ModelError, PacelineError, describe

NUM_PASSES = 2
MIN_ROUNDS = 2  # in each pass, however short the time
PAUSE = 0.1  # seconds before each arm's work, in which the threads of the arm before fall asleep
TURN_PAUSE = 0.01


class ArmGoneError(PacelineError):
    """An arm is not there, and need not be asked again."""


class Ride(Protocol):
    """A work that is done for a while at a time."""

    def go_on(self, seconds: float) -> bool:
        """For so long, or to its end; returns whether that has come. Exceptions as of `Target.run`."""
        ...

    def result(self) -> Sample:
        """After its end."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A target whose work can be divided into turns."""

    def begin(self, work: Work) -> Ride:
        """Get ready for the work."""
        ...


class Target(Protocol):
    """An arm at work."""

    def run(self, work: Work) -> Sample:
        """Do the work. Any exception is the reason why the arm cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """One arm, one round."""

    column: Column
    arm: str
    pass_id: int  # from 1
    round_id: int  # from 1 within the pass
    begin: float  # seconds since the sweep began
    sample: Sample


@dataclass(frozen=True, slots=True)
class Failure:
    """An arm that could not go on."""

    arm: str
    column: Column | None  # None: at every load
    reason: str


class Sweep:
    """All measurements so far. Complete after `run`; usable at any moment of it, as after Ctrl-C.

    Args:
        open_target: makes an arm's target; called once an arm, when its first turn comes.
        num_rounds: in each pass and column.
        turn_seconds: in a round the arms take turns of so long; None: each does its work in one go.
        warmup_steps: engine steps of an adaptive arm's warm-up at a column, at least. Where nobody counts
            steps, as on servers, it is one round.
        max_seconds: rounds beyond the first `MIN_ROUNDS` are dropped to end in this time; None: no limit.
        say: takes lines of progress.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        columns: Sequence[Column],
        workload: Workload,
        open_target: Callable[[Arm], Target],
        *,
        num_rounds: int,
        turn_seconds: float | None = None,
        warmup_steps: int = 0,
        max_seconds: float | None = None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._arms, self._columns, self._workload = list(arms), sorted(columns), workload
        self._open_target = open_target
        self._num_rounds, self._warmup_steps = num_rounds, warmup_steps
        self._turn_seconds = turn_seconds
        self._max_seconds = max_seconds
        self._say, self._clock, self._pause = say, clock, pause
        self._targets: dict[str, Target] = {}
        self._round_seconds: dict[Column, float] = {}  # the newest round's
        self._warmup_seconds = 0.0  # the newest column's, beyond its first round
        self._began = clock()
        self.measurements: list[Measurement] = []
        self.failures: list[Failure] = []
        self.is_complete = False

    def run(self) -> None:
        """Measure everything. KeyboardInterrupt ends it between what is kept and what is not yet.

        Raises:
            ModelError: a model or a draft head cannot be loaded; no arm could say anything then.
        """
        self._open_all()
        blocks = [(1, column) for column in self._columns] + [(2, column) for column in self._columns[::-1]]
        for place, (pass_id, column) in enumerate(blocks):
            if self._able(column):
                self._run_block(pass_id, column, blocks[place + 1 :])
        self.is_complete = True

    def _open_all(self) -> None:
        for arm in opening_order(self._arms):
            with self._failing(arm, None):
                self._targets[arm.name] = self._open_target(arm)

    def _run_block(self, pass_id: int, column: Column, later: Sequence[tuple[int, Column]]) -> None:
        """One column in one pass."""
        ends = self._share_ends(later)
        first = 0 if pass_id == 1 else 1  # round 0 is the warm-up
        for round_id in range(first, self._num_rounds + 1):
            seconds = self._round_seconds.get(column, 0.0)
            if round_id > MIN_ROUNDS and self._clock() + seconds > ends:
                break
            begin = self._clock()
            samples = self._run_round(pass_id, column, round_id)
            self._round_seconds[column] = self._clock() - begin
            if not samples:
                return
            if round_id == 0:
                self._warm_up(column, samples, ends)
            left = self._left(column, self._num_rounds - round_id, ends, later)
            title = "warm-up" if round_id == 0 else f"round {round_id}/{self._num_rounds}"
            shown = "  ".join(f"{name} {got.rate:.1f}" for name, got in samples.items())
            self._say(f"pass {pass_id}/{NUM_PASSES}, {column}, {title}: {shown} tok/s; {show_left(left)}")

    def _warm_up(self, column: Column, samples: Mapping[str, Sample], ends: float) -> None:
        """Further discarded rounds of other prompts, until arms that adapt have had their steps.

        Short of time there are fewer: what is judged comes first.
        """
        began = self._clock()
        needed = MIN_ROUNDS * self._round_seconds[column]
        for arm in self._able(column):
            got = samples.get(arm.name)
            if arm.role != "adaptive" or got is None or got.num_steps is None:
                continue
            num_steps, seconds, repeat = got.num_steps, 0.0, NUM_PASSES * (self._num_rounds + 1)
            with self._failing(arm, column):
                while num_steps < self._warmup_steps and self._clock() + seconds + needed <= ends:
                    begin = self._clock()
                    num_steps += (
                        self._targets[arm.name].run(self._workload.work(column, repeat)).num_steps or 1
                    )
                    seconds, repeat = self._clock() - begin, repeat + 1
            self._say(f"pass 1/{NUM_PASSES}, {column}, warm-up: {arm.name} has had {num_steps} steps")
        self._warmup_seconds = self._clock() - began

    def _run_round(self, pass_id: int, column: Column, round_id: int) -> dict[str, Sample]:
        """Every able arm once."""
        work = self._workload.work(column, (pass_id - 1) * (self._num_rounds + 1) + round_id)
        arms = self._able(column)
        shift = round_id % len(arms)
        turns = arms[shift:] + arms[:shift]
        if pass_id == 2:
            turns.reverse()
        samples = {}
        divided = self._whole(turns, work) if self._turn_seconds is None else self._in_turns(turns, work)
        for arm, begin, got in divided:
            samples[arm.name] = got
            if round_id > 0:
                self.measurements.append(Measurement(column, arm.name, pass_id, round_id, begin, got))
        return {arm.name: samples[arm.name] for arm in arms if arm.name in samples}

    def _whole(self, arms: Sequence[Arm], work: Work) -> Iterator[tuple[Arm, float, Sample]]:
        """The work of one arm after the other, and when each began."""
        for arm in arms:
            with self._failing(arm, work.column):
                self._pause(PAUSE)
                begin = self._clock() - self._began
                yield arm, begin, self._targets[arm.name].run(work)

    def _in_turns(self, arms: Sequence[Arm], work: Work) -> Iterator[tuple[Arm, float, Sample]]:
        """The same in turns, every second time in reversed order; targets that cannot divide it go first."""
        assert self._turn_seconds is not None
        whole = [arm for arm in arms if not isinstance(self._targets[arm.name], Divisible)]
        yield from self._whole(whole, work)
        begin, rides = self._clock() - self._began, dict[Arm, Ride]()
        for arm in arms:
            target = self._targets[arm.name]
            if isinstance(target, Divisible):
                with self._failing(arm, work.column):
                    rides[arm] = target.begin(work)
        while rides:
            for arm in list(rides):
                is_over = True
                with self._failing(arm, work.column):
                    self._pause(TURN_PAUSE)
                    is_over = rides[arm].go_on(self._turn_seconds)
                    if is_over:
                        yield arm, begin, rides[arm].result()
                if is_over:
                    del rides[arm]
            rides = dict(reversed(rides.items()))

    def _able(self, column: Column) -> list[Arm]:
        """The arms that have not failed at this column, or altogether."""
        out = {failure.arm for failure in self.failures if failure.column in (None, column)}
        return [arm for arm in self._arms if arm.name not in out]

    @contextmanager
    def _failing(self, arm: Arm, column: Column | None) -> Iterator[None]:
        """An exception is kept as the arm's failure, and told; the rest goes on."""
        try:
            yield
        except Exception as error:
            if column is None and isinstance(error, ModelError):
                raise
            is_final = column is None or isinstance(error, EngineDeadError | ArmGoneError)
            reason = one_line(error)
            self.failures.append(Failure(arm.name, None if is_final else column, reason))
            where = "" if is_final else f" at {column}"
            self._say(f"{arm.name} failed{where}: {reason}")

    # Time.

    def _share_ends(self, later: Sequence[tuple[int, Column]]) -> float:
        """When this block must end, so that those to come have as much as they are likely to need."""
        if self._max_seconds is None:
            return math.inf
        left = self._began + self._max_seconds - self._clock()
        return self._clock() + left / (1 + len(later))

    def _left(
        self, column: Column, num_rounds: int, ends: float, later: Sequence[tuple[int, Column]]
    ) -> float:
        """Seconds to the end, as far as anybody knows."""
        fewest, seconds = min(MIN_ROUNDS, self._num_rounds), self._round_seconds[column]
        num_due = max(0, fewest - (self._num_rounds - num_rounds))
        mine = min(num_rounds * seconds, max(num_due * seconds, ends - self._clock()))
        others = least = 0.0
        for pass_id, other in later:
            num_first, expected = int(pass_id == 1), self._expected(other)
            others += (self._num_rounds + num_first) * expected + num_first * self._warmup_seconds
            least += (fewest + num_first) * expected
        if self._max_seconds is not None:
            others = min(others, max(least, self._began + self._max_seconds - self._clock() - mine))
        return mine + others

    def _expected(self, column: Column) -> float:
        """Seconds of a round there: as measured, or by its tokens as the nearest measured column's."""
        if column in self._round_seconds:
            return self._round_seconds[column]
        near = min(self._round_seconds, key=lambda known: abs(known.concurrency - column.concurrency))
        tokens = [self._workload.work(c, 0).num_tokens for c in (column, near)]
        return self._round_seconds[near] * tokens[0] / tokens[1]


def opening_order(arms: Sequence[Arm]) -> list[Arm]:
    """Adaptive arms first, since fixed depths run on their engine; plain later, with as many pages."""
    ranks = {"adaptive": 0, "fixed": 1, "plain": 2, "other": 3}
    return sorted(arms, key=lambda arm: ranks[arm.role])


def one_line(error: Exception) -> str:
    """The reason, as it goes into a report."""
    if isinstance(error, PacelineError):
        return str(error).strip().partition("\n")[0]
    return describe(error)


def show_left(seconds: float) -> str:
    """As one says it: `about 3 min left`."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {round(seconds / 60)} min left"
