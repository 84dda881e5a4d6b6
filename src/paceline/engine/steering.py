"""Between the scheduler and a policy: what a step's rows look like to it, and what it is told afterwards.

The policy chooses depths, rows that draft in the shadow and control rounds; the scheduler may cut what it
chose, for pages or for the budget. A result is told with what really ran: to the policy, to the counts, to a
trace if there is one. Shadow drafts are kept here until the tokens that they guessed at are committed.

Knows nothing of the worker or of pages. The seconds of a step are told; only how long the policy thinks is
measured here: a round served out of turn always comes with a long thought, a repeated one with none, and
what is learnt from many rounds at once is learnt in one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.engine.gains import Gains
from paceline.engine.stats import PolicyStats, RecentStep
from paceline.engine.trace import StepTrace
from paceline.errors import describe
from paceline.policy import Decision, Explains, Fixed, Load, Observation, Policy, RowView, ShadowResult
from paceline.step import RowResult

NUM_RECENT = 16  # steps that are kept to be shown

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decoding row before a step."""

    key: str
    room: int  # deepest that pages, budget and its own limit allow
    pinned: int | None  # its request's own depth
    context_len: int  # known tokens


@dataclass(frozen=True, slots=True)
class Round:
    """What the policy decided for a step."""

    decision: Decision
    depths: Mapping[str, int]
    shadow_depths: Mapping[str, int]


@dataclass(slots=True)
class _Shadow:
    """Drafts of a row that nobody verified."""

    start: int  # the request's tokens when they were made: the place of the first guess
    token_ids: tuple[int, ...]
    num_matched: int = 0


class _Ran(NamedTuple):
    """A step, when its results are there."""

    number: int
    decision: Decision
    num_tokens: int
    seconds: float | None


@dataclass(slots=True)
class Steering:
    """Asks the policy, and tells it, the counts and the trace what came of it."""

    policy: Policy
    trace: StepTrace | None = None
    failure: str | None = None  # why the policy was given up, in one line
    _gains: Gains = field(default_factory=Gains)
    # Decision, results, seconds: counting many at once costs a fraction.
    _uncounted: list[tuple[Decision, list[RowResult | None], float | None]] = field(default_factory=list)
    _recent: deque[_Ran] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    _views: dict[str, RowView] = field(default_factory=dict)
    _shadows: dict[str, list[_Shadow]] = field(default_factory=dict)
    _known: list[ShadowResult] = field(default_factory=list)
    _last: tuple[Sequence[Candidate], Round] | None = None  # what was decided, if it may be repeated
    _num_repeats: int = 0  # left
    _seconds_thought: float = 0.0  # by the policy, since it was last asked for

    def take_seconds_thought(self) -> float:
        """How long the policy has been at work since this was last asked for."""
        seconds, self._seconds_thought = self._seconds_thought, 0.0
        return seconds

    def decide(self, rows: Sequence[Candidate], num_prompt_tokens: int) -> Round:
        """The depths of a step over these decoding rows, with so many prompt tokens beside them."""
        if self._num_repeats and self._last is not None and not num_prompt_tokens:
            before, chosen = self._last
            if _is_good_for(chosen, before, rows):
                self._num_repeats -= 1
                return chosen
        views = tuple([self._view(row) for row in rows])
        load = Load(len(rows), sum(row.context_len for row in rows), num_prompt_tokens)
        begun = time.perf_counter()
        try:
            decision = self.policy.decide(load, views)
        except Exception as error:
            self._give_up(error)
            decision = self.policy.decide(load, views)
        self._seconds_thought += time.perf_counter() - begun
        depths = {
            row.key: min(depth if row.pinned is None else row.pinned, row.room)
            for row, depth in zip(rows, decision.depths, strict=True)
        }
        shadows = {rows[i].key: decision.shadow_depth for i in decision.shadow}
        chosen = Round(decision, depths, shadows)
        self._last, self._num_repeats = (rows, chosen), decision.repeat
        return chosen

    def _view(self, row: Candidate) -> RowView:
        """The same object as long as nothing in it changes: policies go by that."""
        view = self._views.get(row.key)
        if view is None:
            self._count()
            self._gains.begin(row.key)
        if view is None or (view.max_depth, view.pinned) != (row.room, row.pinned):
            view = self._views[row.key] = RowView(row.key, row.room, row.pinned)
        return view

    def drafted(self, key: str, start: int, token_ids: tuple[int, ...]) -> None:
        """A row has drafted in the shadow, with `start` tokens known."""
        if token_ids:
            self._shadows.setdefault(key, []).append(_Shadow(start, token_ids))

    def committed(self, key: str, token_ids: Sequence[int]) -> None:
        """A row has all these tokens now, prompt included: settle the shadows that they decide."""
        shadows = self._shadows.get(key)
        if not shadows:
            return
        open_shadows: list[_Shadow] = []
        for shadow in shadows:
            known = token_ids[shadow.start + shadow.num_matched :]
            guesses = shadow.token_ids[shadow.num_matched :]
            num_same = 0
            while num_same < min(len(known), len(guesses)) and known[num_same] == guesses[num_same]:
                num_same += 1
            shadow.num_matched += num_same
            if num_same < len(known) or num_same == len(guesses):
                depth = len(shadow.token_ids)
                self._known.append(ShadowResult(key, shadow.start, depth, shadow.num_matched))
            else:
                open_shadows.append(shadow)
        self._shadows[key] = open_shadows

    def ended(self, key: str) -> None:
        """A request is over: what its last shadows guessed at will never be known."""
        self._views.pop(key, None)
        self._shadows.pop(key, None)
        self._count()
        self._gains.end(key)

    def observe(self, decision: Decision, results: Mapping[str, RowResult], seconds: float | None) -> None:
        """A step's results are committed.

        Args:
            results: of the rows that ran, by key.
            seconds: of wall time from result to result; None if it means nothing.
        """
        found = [results.get(str(row.key)) for row in decision.rows]
        left_out = any(got is None for got in found)
        accepted = tuple([max(0, len(got.token_ids) - 1) if got else 0 for got in found])
        if left_out:
            seconds = None
        observation = Observation(
            decision,
            accepted,
            seconds,
            verified=tuple([got.num_verified if got else 0 for got in found]),
            drafted=tuple([got.num_drafted if got else 0 for got in found]),
            shadows=tuple(self._known),
        )
        begun = time.perf_counter()
        try:
            self.policy.observe(observation)
        except Exception as error:
            self._give_up(error)
        self._seconds_thought += time.perf_counter() - begun
        self._known.clear()
        self._uncounted.append((decision, found, seconds))
        if len(self._uncounted) >= NUM_RECENT:
            self._count()
        if self.trace is not None and seconds is not None:
            self.trace.add(decision, tuple([got.depth if got else 0 for got in found]), accepted, seconds)

    def _count(self) -> None:
        for decision, found, seconds in self._uncounted:
            self._gains.count(decision, found, seconds)
            num_tokens = sum([len(got.token_ids) for got in found if got])
            self._recent.append(_Ran(self._gains.num_steps, decision, num_tokens, seconds))
        self._uncounted.clear()

    def _give_up(self, error: Exception) -> None:
        """Go on plainly: requests can do without a policy."""
        self.failure = describe(error)
        log.exception("the policy failed; from now on nothing is drafted that no request asks for")
        self.policy, self._last = Fixed(0), None

    def stats(self) -> PolicyStats:
        """The numbers of this moment."""
        self._count()
        gains, policy = self._gains, self.policy
        explained = (
            (policy.num_trips, policy.drift, policy.acceptance()) if isinstance(policy, Explains) else None
        )
        num_trips, drift, acceptance = explained or (0, None, ())
        return PolicyStats(
            error=self.failure,
            steps={reason: list(by_depth) for reason, by_depth in gains.steps.items()},
            seconds=dict(gains.seconds),
            num_controls=gains.num_controls,
            num_shadow_steps=gains.num_shadow_steps,
            num_shadow_drafts=gains.num_shadow_drafts,
            predicted_seconds=gains.predicted_seconds,
            measured_seconds=gains.measured_seconds,
            plain_seconds=gains.plain_seconds,
            decoding_seconds=gains.decoding_seconds,
            num_reentry_rounds=gains.num_reentry_rounds,
            num_reentry_drafted=gains.num_reentry_drafted,
            num_reentry_accepted=gains.num_reentry_accepted,
            reentry_accepted_per_pos=list(gains.reentry_accepted_per_pos),
            num_guard_trips=num_trips,
            drift=drift,
            acceptance=list(acceptance),
            recent=[_shown(ran) for ran in self._recent],
        )


def _is_good_for(chosen: Round, before: Sequence[Candidate], rows: Sequence[Candidate]) -> bool:
    """Whether what was decided for `before` may be repeated: the rows are the same, and have room for it."""
    depths = chosen.depths
    return len(before) == len(rows) and all(
        [
            a.key == b.key and a.pinned == b.pinned and b.room >= depths[a.key]
            for a, b in zip(before, rows, strict=True)
        ]
    )


def _shown(ran: _Ran) -> RecentStep:
    decision = ran.decision
    rows_by_depth = [0] * (decision.depth + 1)
    for depth in decision.depths:
        rows_by_depth[depth] += 1
    return RecentStep(
        number=ran.number,
        reason=decision.reason.value,
        rows_by_depth=rows_by_depth,
        num_prompt_tokens=decision.load.num_prompt_tokens,
        num_shadow=len(decision.shadow),
        num_tokens=ran.num_tokens,
        predicted_seconds=decision.predicted_seconds,
        plain_seconds=decision.plain_seconds,
        seconds=ran.seconds,
    )
