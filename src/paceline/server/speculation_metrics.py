"""The speculation part of `/metrics`: vLLM's counters under its names, and what they leave open.

Drafted tokens are accepted, or were verified and wrong, or were never verified: three counters that add up
to a fourth. Rates divide by what was proposed. Knows the engine's numbers, not where they come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import Metric

from paceline.engine.stats import PolicyStats, SpeculationStats
from paceline.policy import Reason
from paceline.server.families import Families, Values

PREFIX = "paceline:spec_decode_"


class SpeculationMetrics:
    """The families of one model; its counters go on over all lives of an engine."""

    def __init__(self, model: str) -> None:
        self._families = Families(model, PREFIX)

    def families(self, stats: SpeculationStats) -> Iterator[Metric]:
        """Every family, from the engine's newest numbers."""
        make = self._families
        for name, help, value in (
            ("drafts", "Rounds in which something was drafted", stats.num_rounds),
            ("draft_tokens", "Tokens proposed", stats.num_drafted),
            ("accepted_tokens", "Of these, those that were right", stats.num_accepted),
            ("rejected_tokens", "Verified and wrong", stats.num_verified - stats.num_accepted),
            ("unverified_tokens", "Proposed and not verified", stats.num_drafted - stats.num_verified),
        ):
            yield make.counter(f"num_{name}", help, value)
        yield make.counters(
            "num_accepted_tokens_per_pos",
            "Rounds whose draft at this position was right, from 0",
            ("position",),
            _numbered(stats.accepted_per_pos),
        )
        yield make.counters(
            "num_rounds",
            "Steps of decoding rows, by the depth that they were given",
            ("depth",),
            _numbered(stats.rounds_by_depth),
        )
        failed = stats.drafter_error is not None
        yield make.gauge("drafter_on", "1 while rows can draft", stats.max_depth > 0 and not failed)
        yield make.gauge("drafter_failed", "1 once the drafter has failed and turned itself off", failed)


class PolicyMetrics:
    """What the policy decided and what came of it; see `engine.stats.PolicyStats`."""

    def __init__(self, model: str) -> None:
        self._families = Families(model, PREFIX)

    def families(self, stats: PolicyStats, max_depth: int) -> Iterator[Metric]:
        """Every family, from the engine's newest numbers. `max_depth` is of any row."""
        make = self._families
        yield make.counters(
            "num_steps",
            "Steps with decoding rows, by the policy's reason and the depth of the deepest row",
            ("reason", "depth"),
            _steps(stats, max_depth),
        )
        yield make.counters(
            "step_seconds",
            "Time that they took",
            ("reason",),
            [((reason.value,), stats.seconds.get(reason.value, 0.0)) for reason in Reason],
        )
        for name, help, value in (
            ("num_control_steps", "Steps that ran plain only to be compared", stats.num_controls),
            ("num_shadow_steps", "Steps beside which rows drafted in the shadow", stats.num_shadow_steps),
            ("num_shadow_draft_tokens", "Tokens drafted there", stats.num_shadow_drafts),
            ("predicted_seconds", "Steps that ran as decided: time predicted", stats.predicted_seconds),
            ("measured_seconds", "The same steps: time measured", stats.measured_seconds),
            ("plain_seconds", "Steps without prompts: time that plain decoding of the same tokens would take",
             stats.plain_seconds),
            ("decoding_seconds", "The same steps: time measured", stats.decoding_seconds),
            ("num_reentry_drafts", "Rounds with drafts just after a row was plain", stats.num_reentry_rounds),
            ("num_reentry_draft_tokens", "Tokens proposed there", stats.num_reentry_drafted),
            ("num_reentry_accepted_tokens", "Of these, those that were right", stats.num_reentry_accepted),
            ("num_guard_trips", "Times that the guard turned drafting off", stats.num_guard_trips),
        ):  # fmt: skip
            yield make.counter(name, help, value)
        yield make.gauge(
            "policy_failed", "1 once the policy has failed: nothing drafts unasked", stats.error is not None
        )
        per_pos = stats.reentry_accepted_per_pos
        yield make.counters(
            "num_reentry_accepted_tokens_per_pos",
            "Rounds there whose draft at this position was right, from 0",
            ("position",),
            _numbered([*per_pos, *[0] * (max_depth - len(per_pos))]),
        )
        drift = [] if stats.drift is None else [((), stats.drift)]
        yield make.gauges("cost_drift", "Times slower than when costs were measured", (), drift)
        yield make.gauges(
            "believed_acceptance",
            "Chance of a draft at this position, from 0, if those before it were right",
            ("position",),
            _numbered(stats.acceptance),
        )


def _numbered(values: Iterable[float]) -> Values:
    return [((str(i),), value) for i, value in enumerate(values)]


def _steps(stats: PolicyStats, max_depth: int) -> Values:
    """For every reason and depth: a counter that is not there before it counts hides its first step."""
    for reason in Reason:
        by_depth = stats.steps.get(reason.value, [])
        for depth in range(max(max_depth + 1, len(by_depth))):
            yield (reason.value, str(depth)), by_depth[depth] if depth < len(by_depth) else 0
