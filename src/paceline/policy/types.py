"""The records that a policy and the loop it serves exchange, and the Protocol between them.

    decision = policy.decide(load, rows)        before a step: how deep every decoding row drafts
    policy.observe(Observation(decision, ...))  once its results are known, in the order of the decisions

An observation carries the decision it is about, so results may come one step late, as they do when host and
device overlap. A decision depends on nothing but what the policy was made with and what it was told.

All records are frozen. Rows are told apart by `key`, which may be any hashable value; it should stay the same
as long as the request runs. Times are in seconds, contexts and prompts in tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

MIN_SECONDS, MAX_SECONDS = 1e-9, 1e6  # of a step: beyond these a clock is wrong


class PolicyError(ValueError):
    """What a policy was given is wrong; the message is one line that names it."""


class Reason(StrEnum):
    """Why a step runs at the depths it does."""

    WARMUP = "warmup"  # to learn what this depth costs at this load
    PAYS = "pays"  # drafting makes more tokens a second
    COSTS = "costs"  # drafting makes fewer
    PROBE = "probe"  # as `costs`, and some rows draft in the shadow
    GUARD = "guard"  # plain decoding: a control, or because controls did better
    PINNED = "pinned"  # every row's depth is its own
    CAPACITY = "capacity"  # no row has room for a draft


class Load(NamedTuple):
    """What a step has to do, whatever the depth."""

    num_rows: int  # decoding rows, b
    context_len: int  # tokens in their K/V, over all of them, C
    num_prompt_tokens: int = 0  # prompt tokens in the same step, p


class RowView(NamedTuple):
    """A decoding row. Build it once and pass the same object again until something in it changes."""

    key: Hashable
    max_depth: int  # deepest it has room for: tokens left to write, pages, a failed drafter (0)
    pinned: int | None = None  # its request's own depth
    drafter: str = ""  # who drafts for it


@dataclass(frozen=True, slots=True)
class Decision:
    """How the next step runs.

    `depths[i]` is for `rows[i]`. Rows `shadow` (indices) draft `shadow_depth` tokens beside it, which do
    not go through the target: they are compared with the words that follow, and told as `ShadowResult`. The
    three predictions are None where the policy makes none.
    """

    load: Load
    rows: tuple[RowView, ...]
    depths: tuple[int, ...]
    reason: Reason
    shadow: tuple[int, ...] = ()
    shadow_depth: int = 0
    is_control: bool = False  # plain only to be compared with the rounds around it
    predicted_tokens: float | None = None  # expected from the step, over all rows
    predicted_seconds: float | None = None
    plain_seconds: float | None = None  # what the same step would take at depth 0
    repeat: int = 0  # further steps that it is good for, with the same rows and without prompt tokens

    @property
    def depth(self) -> int:
        """Of the deepest row."""
        return max(self.depths, default=0)

    @property
    def num_tokens(self) -> int:
        """Through the target for decoding rows, m = b + drafts."""
        return len(self.depths) + sum(self.depths)

    @property
    def predicted_gain(self) -> float | None:
        """Tokens a second over those of plain decoding, both predicted; 1.0 is no gain."""
        if self.predicted_tokens is None or self.predicted_seconds is None or self.plain_seconds is None:
            return None
        plain_tokens = max(1, len(self.rows))
        return self.predicted_tokens / plain_tokens * self.plain_seconds / self.predicted_seconds


class ShadowResult(NamedTuple):
    """What became of a row's shadow drafts, once the words they guessed at are known.

    `start` is where they began, as a count of the request's tokens at that time; the tokens `start`, `start
    + 1`, ... are compared with the drafts, and `matched` is how many agree before the first that does not.
    A draft behind the end of an answer is not known: leave such a result out.
    """

    key: Hashable
    start: int
    depth: int
    matched: int


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step came to.

    Args:
        decision: what was decided for it.
        accepted: drafts that each row accepted, aligned with `decision.rows` (accept_len is one more).
        seconds: the step's share of wall time, from result to result, draft, sampling and host included,
            the time that `decide` took left out; None if it means nothing (idle before it, first use of a
            kernel, a row left out).
        verified: drafts of each row that went through the target; None: as decided. 0 drops a row.
        drafted: drafts of each row that were made; None: as verified.
        cut: rows (indices) whose acceptance ended for another reason than a draft that was wrong.
        shadows: shadow results that became known with this step.

    Raises:
        PolicyError: entries and rows differ in number, a row accepted more than was verified or less than
            nothing, or the time is none that a step can take.
    """

    decision: Decision
    accepted: tuple[int, ...]
    seconds: float | None
    verified: tuple[int, ...] | None = None
    drafted: tuple[int, ...] | None = None
    cut: tuple[int, ...] = ()
    shadows: tuple[ShadowResult, ...] = ()

    def __post_init__(self) -> None:
        num_rows = len(self.decision.rows)
        for name in ("accepted", "verified", "drafted"):
            values = getattr(self, name)
            if values is None:
                continue
            if len(values) != num_rows:
                raise PolicyError(f"{name} has {len(values)} entries for a decision over {num_rows} rows")
            if min(values, default=0) < 0:
                raise PolicyError(f"{name} must not be negative, got {min(values)}")
        verified = self.decision.depths if self.verified is None else self.verified
        if any(map(operator.gt, self.accepted, verified)):
            raise PolicyError(f"rows accepted {self.accepted} of {verified} drafts that were verified")
        if self.seconds is not None and not MIN_SECONDS <= self.seconds <= MAX_SECONDS:
            limits = f"{MIN_SECONDS:g} to {MAX_SECONDS:g}"
            raise PolicyError(f"seconds must be {limits}, or None, got {self.seconds}")


class Policy(Protocol):
    """Chooses depths. Deterministic: the same calls in the same order give the same decisions."""

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """The depths of the next step. `load.num_rows` is the number of rows."""
        ...

    def observe(self, observation: Observation) -> None:
        """Learn from a step that has run. Steps whose results are lost may be left out."""
        ...


@runtime_checkable
class Explains(Protocol):
    """What a policy may offer besides: what it believes at present, for whoever watches it."""

    @property
    def num_trips(self) -> int:
        """How often it has found that drafting does worse than plain decoding, against its expectation."""
        ...

    @property
    def drift(self) -> float:
        """How many times slower the machine has become since its costs were learnt."""
        ...

    def acceptance(self, drafter: str = "") -> tuple[float, ...]:
        """The chance of a draft at each position to be right if all before it were."""
        ...


def clamp_depth(depth: int, row: RowView, depths: tuple[int, ...]) -> int:
    """The largest declared depth that is at most `depth`, and that the row's pin and room allow."""
    limit = min(depth if row.pinned is None else row.pinned, row.max_depth)
    best = 0
    for declared in depths:
        if declared > limit:
            break
        best = declared
    return best
