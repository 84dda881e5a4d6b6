"""The scheduler's numbers at one moment, as they travel to whoever shows them.

Knows nothing of how they are shown: the HTTP process gives them their metric names.
"""

from __future__ import annotations

import msgspec


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Whether rows can draft, then counters since the start, over the decoding rows of all steps."""

    max_depth: int = 0  # 0: there is no drafter
    drafter_error: str | None = None  # why it has turned itself off, in one line
    num_rounds: int = 0  # in which something was drafted
    num_drafted: int = 0  # proposed
    num_verified: int = 0  # of them, those that went through the model
    num_accepted: int = 0  # of them, those that were right, delivered or not
    accepted_per_pos: list[int] = []  # rounds whose draft at this position was accepted: max_depth of them
    rounds_by_depth: list[int] = []  # rows that were let draft so many: 0 to max_depth


class RecentStep(msgspec.Struct, frozen=True, kw_only=True):
    """One of the last steps with decoding rows."""

    number: int  # of those steps, from 1
    reason: str
    rows_by_depth: list[int]  # as decided: 0 to the deepest
    num_prompt_tokens: int
    num_shadow: int  # rows that drafted beside it
    num_tokens: int  # made
    predicted_seconds: float | None  # None: the policy predicts nothing
    plain_seconds: float | None  # what the same step would take without drafts
    seconds: float | None  # measured; None if that means nothing


class PolicyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, over steps with decoding rows; what the policy says now; the last steps.

    Seconds are of steps whose time means something. Three kinds of them are told apart:
    *predicted* and *measured* are of the same steps, those that ran as decided; *plain* and *decoding* of
    those without prompt tokens and without rows that draft by their own request's wish.
    """

    error: str | None = None  # why the policy was given up, in one line: nothing drafts unasked since
    steps: dict[str, list[int]] = {}  # by reason, then by the depth of the deepest row from 0
    seconds: dict[str, float] = {}  # measured, by reason
    num_controls: int = 0  # plain steps only to compare
    num_shadow_steps: int = 0  # in which rows drafted beside the step
    num_shadow_drafts: int = 0  # tokens that they drafted
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    plain_seconds: float = 0.0  # what plain decoding would take for the same tokens, predicted
    decoding_seconds: float = 0.0  # what it took
    num_reentry_rounds: int = 0  # with drafts, just after the row has been plain for a while
    num_reentry_drafted: int = 0
    num_reentry_accepted: int = 0
    reentry_accepted_per_pos: list[int] = []

    num_guard_trips: int = 0
    drift: float | None = None  # times slower than when costs were measured; None: the policy knows no costs
    acceptance: list[float] = []  # chance of a draft at this position, if those before it were right
    recent: list[RecentStep] = []  # newest last


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, then counters since the start (they only grow)."""

    num_running: int  # requests that hold a row
    num_waiting: int  # accepted, without a row: new ones and preempted ones
    num_pages: int  # pages that requests can hold, the trash page not among them
    num_pages_used: int  # pages that a row holds
    num_pages_cached: int  # pages a prompt could hit, held by a row or not

    num_preemptions: int
    num_prompt_tokens_computed: int  # through the model in chunks; after a preemption, again
    num_prompt_tokens_cached: int  # prompt tokens that the prefix cache had at first admission
    num_generated_tokens: int  # delivered: nothing beyond a stop or a limit
    speculation: SpeculationStats = SpeculationStats()
    policy: PolicyStats = PolicyStats()
