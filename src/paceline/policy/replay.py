"""A recorded trace against any policy: tokens a second, and the regret against the best fixed depth in
hindsight.

A trace is a sequence of plain dicts, the first of which is its header. There are two kinds.

*Requests* (`"kind": "requests"`): how many drafts would have matched at every position of every answer,
recorded in the shadow at full depth. Everything can be replayed: requests are served as they arrive, in a
loop whose steps take what the header's cost model says, and rounds start wherever the policy's own depths
bring them.

    {"schema": 1, "kind": "requests", "depths": [0, 1, 2, 4], "costs": CostModel.to_dict(), "max_rows": 16}
    {"key": "a", "arrival": 0.0, "prompt_len": 25, "matched": [2, 1, 0, 4, ...]}

`matched[i]` is for a round that starts with i tokens of the answer known; the answer has `len(matched)`
tokens. A request may have "pinned" and "drafter", as `RowView` has.

*Steps* (`"kind": "steps"`): what a server did. Each step is decided anew and none changes the next: the
loads are those of the record. A row can run at most as deep as it did, since nobody knows what deeper
drafts would have been.

    {"schema": 1, "kind": "steps", "depths": [0, 1, 2, 4], "costs": CostModel.to_dict()}
    {"context_len": 812, "num_prompt_tokens": 0, "seconds": 0.0113, "rows": [["a", 4, 2], ["b", 4, 0], ...]}

Rows are [key, depth, accepted], optionally with a pinned depth (null: none) and the deepest that the row had
room for. Shadow drafts get no results there. Reading and writing files is the caller's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.policy.checks import (
    MAX_DEPTH,
    MAX_STEP_TOKENS,
    MAX_TOKENS,
    check_depths,
    real,
    whole,
)
from paceline.policy.cost import CostModel
from paceline.policy.rivals import Fixed
from paceline.policy.types import (
    MAX_SECONDS,
    MIN_SECONDS,
    Decision,
    Load,
    Observation,
    Policy,
    PolicyError,
    Reason,
    RowView,
    ShadowResult,
)

SCHEMA = 1


class Request(NamedTuple):
    """One answer, and what drafting would have done in it."""

    key: Hashable
    arrival: float  # seconds
    prompt_len: int
    matched: tuple[int, ...]
    pinned: int | None = None
    drafter: str = ""


class Step(NamedTuple):
    """One recorded step."""

    load: Load
    rows: tuple[RowView, ...]
    depths: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that has been read; either `requests` or `steps` is empty."""

    depths: tuple[int, ...]
    costs: CostModel
    requests: tuple[Request, ...] = ()
    steps: tuple[Step, ...] = ()
    max_rows: int = 1


@dataclass(slots=True)
class Replay:
    """What a policy made of a trace."""

    tokens: int = 0
    seconds: float = 0.0
    rounds_by_depth: Counter[int] = field(default_factory=Counter)  # deepest row
    rounds_by_reason: Counter[Reason] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens a second; 0 for a trace without steps."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, decision: Decision, tokens: int, seconds: float) -> None:
        """A step has run."""
        self.tokens += tokens
        self.seconds += seconds
        self.rounds_by_depth[decision.depth] += 1
        self.rounds_by_reason[decision.reason] += 1


@dataclass(frozen=True, slots=True)
class Regret:
    """A policy beside every fixed depth on the same trace."""

    policy: Replay
    fixed: Mapping[int, Replay]

    @property
    def best_depth(self) -> int:
        """The best fixed depth in hindsight."""
        return max(self.fixed, key=lambda depth: self.fixed[depth].rate)

    @property
    def share(self) -> float:
        """What the policy lost against that, of its rate; less than 0 if it did better."""
        best = self.fixed[self.best_depth].rate
        return 1 - self.policy.rate / best if best else 0.0


def read_trace(records: Iterable[Mapping[str, Any]]) -> Trace:
    """The trace that these records hold.

    Raises:
        PolicyError: it has no header or is of another schema; or a record is wrong, which the message
        numbers.
    """
    iterator = iter(records)
    header = next(iterator, None)
    if header is None or "schema" not in header:
        raise PolicyError("trace: there is no header")
    if header["schema"] != SCHEMA:
        raise PolicyError(f"trace: schema must be {SCHEMA}, got {header['schema']!r}")
    kind = header.get("kind")
    if kind not in ("requests", "steps"):
        raise PolicyError(f"trace: kind must be requests or steps, got {kind!r}")
    parse: Callable[[Mapping[str, Any], int], Request | Step] = _request if kind == "requests" else _step
    number = 1
    try:
        depths = check_depths(tuple(header["depths"]))
        costs = CostModel.from_dict(header["costs"])
        max_rows = whole("max_rows", header["max_rows"], 1, MAX_STEP_TOKENS) if kind == "requests" else 1
        parsed = []
        for record in iterator:
            number += 1
            parsed.append(parse(record, depths[-1]))
    except KeyError as error:
        raise PolicyError(f"trace: record {number}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise PolicyError(f"trace: record {number}: {error}") from None
    requests = tuple(record for record in parsed if isinstance(record, Request))
    steps = tuple(record for record in parsed if isinstance(record, Step))
    return Trace(depths, costs, requests, steps, max_rows)


def replay_trace(trace: Trace, policy: Policy) -> Replay:
    """Run a policy over a trace.

    Raises:
        PolicyError: it drafts deeper than what the trace holds.
    """
    if trace.steps:
        return _replay_steps(trace, policy)
    return _Loop(trace, policy).run()


def fixed_depths(trace: Trace) -> dict[int, Replay]:
    """A trace at every fixed depth that it declares, as far as it holds them: a trace of steps may not."""
    fixed = {}
    for depth in trace.depths:
        try:
            fixed[depth] = replay_trace(trace, Fixed(depth))
        except PolicyError:
            if not depth:
                raise
            break  # nor does it hold what is deeper
    return fixed


def regret(trace: Trace, policy: Policy, fixed: Mapping[int, Replay] | None = None) -> Regret:
    """Run a policy over a trace, beside the fixed depths (None: `fixed_depths`).

    Raises:
        PolicyError: the policy drafts deeper than what the trace holds.
    """
    replayed = replay_trace(trace, policy)
    return Regret(replayed, fixed_depths(trace) if fixed is None else fixed)


def _request(record: Mapping[str, Any], deepest: int) -> Request:
    matched = tuple(whole("matched", num, 0, deepest) for num in record["matched"])
    if not matched:
        raise PolicyError("matched must not be empty")
    return Request(
        _key(record["key"]),
        real("arrival", record["arrival"], 0.0, MAX_SECONDS),
        whole("prompt_len", record["prompt_len"], 0, MAX_STEP_TOKENS),
        matched,
        _pinned(record.get("pinned")),
        str(record.get("drafter", "")),
    )


def _key(value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise PolicyError(f"key must be a text or a number, got {value!r}")
    return value


def _pinned(value: Any) -> int | None:
    return None if value is None else whole("pinned", value, 0, MAX_DEPTH)


def _step(record: Mapping[str, Any], deepest: int) -> Step:
    views, depths, accepted = [], [], []
    for key, depth, num, *more in record["rows"]:
        pinned, room = [*more, None, None][:2]
        limit = deepest if room is None else min(whole("room", room, 0, MAX_TOKENS), deepest)
        views.append(RowView(_key(key), limit, _pinned(pinned)))
        depths.append(whole("depth", depth, 0, deepest))
        accepted.append(whole("accepted", num, 0, depths[-1]))
    load = Load(
        len(views),
        whole("context_len", record["context_len"], 0, MAX_TOKENS),
        whole("num_prompt_tokens", record["num_prompt_tokens"], 0, MAX_STEP_TOKENS),
    )
    seconds = real("seconds", record["seconds"], MIN_SECONDS, MAX_SECONDS)
    return Step(load, tuple(views), tuple(depths), tuple(accepted), seconds)


def _replay_steps(trace: Trace, policy: Policy) -> Replay:
    result = Replay()
    model = trace.costs
    for number, step in enumerate(trace.steps, start=1):
        decision = policy.decide(step.load, step.rows)
        for depth, held in zip(decision.depths, step.depths, strict=True):
            if depth > held:
                raise PolicyError(f"step {number}: a row drafts {depth} deep, the trace holds {held} there")
        accepted = tuple(map(min, decision.depths, step.accepted))
        recorded = model.step_seconds(step.load, _by_drafter(step.rows, step.depths))
        replayed = model.step_seconds(step.load, _by_drafter(step.rows, decision.depths))
        seconds = step.seconds * replayed / recorded
        result.add(decision, len(step.rows) + sum(accepted), seconds)
        policy.observe(Observation(decision, accepted, seconds))
    return result


def _by_drafter(rows: Sequence[RowView], depths: Sequence[int]) -> list[tuple[str, int]]:
    return [(row.drafter, depth) for row, depth in zip(rows, depths, strict=True)]


@dataclass(slots=True)
class _Running:
    """A request under way."""

    request: Request
    view: RowView
    num_tokens: int = 0
    shadows: list[ShadowResult] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.request.matched) - self.num_tokens


class _Loop:
    """Serves a trace's requests: prompts whole, in the step after they arrive; then a round a step."""

    def __init__(self, trace: Trace, policy: Policy) -> None:
        self._trace, self._policy = trace, policy
        self._deepest = trace.depths[-1]
        self._waiting = sorted(trace.requests, key=lambda request: request.arrival)
        self._running: list[_Running] = []
        self._clock = 0.0
        self._result = Replay()

    def run(self) -> Replay:
        while self._waiting or self._running:
            if not self._running:
                self._clock = max(self._clock, self._waiting[0].arrival)
            self._step()
        return self._result

    def _step(self) -> None:
        rows = self._running[:]
        num_prompt_tokens = self._admit()
        views = tuple([self._view(row) for row in rows])
        context = sum(row.request.prompt_len + row.num_tokens for row in rows)
        load = Load(len(rows), context, num_prompt_tokens)
        if not rows:  # prompts alone
            self._clock += self._trace.costs.step_seconds(load, ())
            self._result.seconds += self._trace.costs.step_seconds(load, ())
            return
        decision = self._policy.decide(load, views)
        seconds = self._trace.costs.step_seconds(load, _by_drafter(views, decision.depths))
        shadow_rows = [len(decision.shadow)] * decision.shadow_depth
        seconds += self._trace.costs.draft_seconds(shadow_rows, views[0].drafter)
        for i in decision.shadow:
            self._draft_aside(rows[i], decision.shadow_depth)
        accepted = tuple(self._advance(row, depth) for row, depth in zip(rows, decision.depths, strict=True))
        self._clock += seconds
        self._result.add(decision, len(rows) + sum(accepted), seconds)
        shadows = tuple(known for row in rows for known in self._known(row))
        self._policy.observe(Observation(decision, accepted, seconds, shadows=shadows))
        self._running = [row for row in self._running if row.num_left > 0]

    def _admit(self) -> int:
        """Let requests that have arrived in, as far as there is room; their prompt tokens."""
        num_tokens = 0
        while self._waiting and self._waiting[0].arrival <= self._clock:
            if len(self._running) >= self._trace.max_rows:
                break
            request = self._waiting.pop(0)
            view = RowView(request.key, self._deepest, request.pinned, request.drafter)
            self._running.append(_Running(request, view))
            num_tokens += request.prompt_len
        return num_tokens

    def _view(self, row: _Running) -> RowView:
        room = min(self._deepest, row.num_left - 1)
        if row.view.max_depth != room:
            row.view = row.view._replace(max_depth=room)
        return row.view

    def _draft_aside(self, row: _Running, depth: int) -> None:
        matched = min(row.request.matched[row.num_tokens], depth)
        row.shadows.append(ShadowResult(row.request.key, row.num_tokens, depth, matched))

    def _advance(self, row: _Running, depth: int) -> int:
        if depth > row.view.max_depth:
            raise PolicyError(f"a row drafts {depth} deep, and there is room for {row.view.max_depth}")
        accepted = min(row.request.matched[row.num_tokens], depth)
        row.num_tokens += accepted + 1
        return accepted

    def _known(self, row: _Running) -> list[ShadowResult]:
        """Shadow results whose words are there; those behind the end never are."""
        known = [s for s in row.shadows if s.start + min(s.matched + 1, s.depth) <= row.num_tokens]
        row.shadows = [s for s in row.shadows if s not in known]
        return known
