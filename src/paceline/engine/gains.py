"""What the policy's decisions came to, counted step by step: reasons, predictions, gains, re-entries.

A *re-entry* is a row's first rounds with drafts after it has been plain for a while: a drafter that has not
kept up with the words in the meantime shows there, and nowhere else.

Knows nothing of the scheduler, of policies' insides or of how numbers are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.policy import Decision
from paceline.step import RowResult

OFF_STEPS = 8  # plain steps that make a row's next draft a re-entry: more than a control or a warm-up needs
REENTRY_ROUNDS = 4


@dataclass(slots=True)
class _Row:
    last_draft: int  # number of the step, or of the one before its first
    num_reentry_left: int = 0


@dataclass(slots=True)
class Gains:
    """The counts of one engine. See `stats.PolicyStats` for what they mean."""

    num_steps: int = 0
    steps: dict[str, list[int]] = field(default_factory=dict)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_controls: int = 0
    num_shadow_steps: int = 0
    num_shadow_drafts: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    plain_seconds: float = 0.0
    decoding_seconds: float = 0.0
    num_reentry_rounds: int = 0
    num_reentry_drafted: int = 0
    num_reentry_accepted: int = 0
    reentry_accepted_per_pos: list[int] = field(default_factory=list)
    _rows: dict[str, _Row] = field(default_factory=dict)

    def begin(self, key: str) -> None:
        """A row decodes from the next step on."""
        self._rows.setdefault(key, _Row(self.num_steps))

    def end(self, key: str) -> None:
        """A row is gone."""
        self._rows.pop(key, None)

    def count(self, decision: Decision, found: Sequence[RowResult | None], seconds: float | None) -> None:
        """Take a step in.

        Args:
            found: results of `decision.rows`; None for rows that did not run.
            seconds: of wall time; None if they mean nothing.
        """
        self.num_steps += 1
        ran = [got for got in found if got is not None]
        depth = max([got.depth for got in ran], default=0)
        by_depth = self.steps.setdefault(decision.reason.value, [])
        by_depth += [0] * (depth + 1 - len(by_depth))
        by_depth[depth] += 1
        self.num_controls += decision.is_control
        num_shadow_drafts = sum([len(got.shadow_ids) for got in ran]) if decision.shadow else 0
        if num_shadow_drafts:
            self.num_shadow_steps += 1
            self.num_shadow_drafts += num_shadow_drafts
        if depth:
            self._count_drafts(decision, found)
        if seconds is not None and len(ran) == len(found):
            self.seconds[decision.reason.value] += seconds
            self._count_seconds(decision, ran, seconds)

    def _count_seconds(self, decision: Decision, ran: Sequence[RowResult], seconds: float) -> None:
        is_as_decided = tuple([got.num_verified for got in ran]) == decision.depths and not decision.shadow
        if decision.predicted_seconds is not None and is_as_decided:
            self.predicted_seconds += decision.predicted_seconds
            self.measured_seconds += seconds
        has_own_depths = any([view.pinned for view in decision.rows])  # with them, plain is not plain
        if decision.plain_seconds is not None and not decision.load.num_prompt_tokens and not has_own_depths:
            num_tokens = sum([len(got.token_ids) for got in ran])
            self.plain_seconds += decision.plain_seconds * num_tokens / len(ran)
            self.decoding_seconds += seconds

    def _count_drafts(self, decision: Decision, found: Sequence[RowResult | None]) -> None:
        """Find the rounds that are re-entries."""
        for view, got in zip(decision.rows, found, strict=True):
            row = self._rows.get(str(view.key))
            if got is None or row is None or not got.num_drafted:
                continue
            if self.num_steps - row.last_draft > OFF_STEPS:
                row.num_reentry_left = REENTRY_ROUNDS
            row.last_draft = self.num_steps
            if row.num_reentry_left:
                row.num_reentry_left -= 1
                self._count_reentry(got)

    def _count_reentry(self, got: RowResult) -> None:
        num_accepted = max(0, len(got.token_ids) - 1)
        self.num_reentry_rounds += 1
        self.num_reentry_drafted += got.num_drafted
        self.num_reentry_accepted += num_accepted
        per_pos = self.reentry_accepted_per_pos
        per_pos += [0] * (num_accepted - len(per_pos))
        for position in range(num_accepted):
            per_pos[position] += 1
