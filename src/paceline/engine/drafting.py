"""How deep rows draft, and what came of it.

The depth of a row is its request's own, or else the one chosen for the step. A *round* is one step of
a decoding row; what is counted of it is what the worker says, before the block is cut: a draft that was
right counts as accepted although a stop before it keeps it from being delivered.

A drafter that has failed stays off: from then on every depth is 0. Knows nothing of budgets, pages or
of how drafts are made.
"""

from __future__ import annotations

import logging

from paceline.engine.stats import SpeculationStats
from paceline.request import SpeculationSummary
from paceline.step import RowResult

log = logging.getLogger(__name__)


class Tally:
    """Sums over rounds with drafts."""

    def __init__(self) -> None:
        self.num_rounds = self.num_drafted = self.num_verified = self.num_accepted = 0
        self.accepted_per_pos: list[int] = []
        self._draft_probs: list[tuple[float, int]] = []  # by position: sum and number

    def add(self, got: RowResult) -> None:
        """Count a round, unless nothing was drafted in it."""
        if not got.num_drafted:
            return
        num_accepted = max(0, len(got.token_ids) - 1)
        self.num_rounds += 1
        self.num_drafted += got.num_drafted
        self.num_verified += got.num_verified
        self.num_accepted += num_accepted
        self.accepted_per_pos += [0] * (num_accepted - len(self.accepted_per_pos))
        for position in range(num_accepted):
            self.accepted_per_pos[position] += 1
        for position, prob in enumerate(got.draft_probs or ()):
            if position == len(self._draft_probs):
                self._draft_probs.append((0.0, 0))
            total, num = self._draft_probs[position]
            self._draft_probs[position] = (total + prob, num + 1)

    def summary(self) -> SpeculationSummary:
        """The sums so far."""
        return SpeculationSummary(
            num_rounds=self.num_rounds,
            num_drafted=self.num_drafted,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            accepted_per_pos=list(self.accepted_per_pos),
            top_draft_prob_per_pos=[total / num for total, num in self._draft_probs],
        )


class Drafting:
    """The depths of one engine's rows, and the counts over all of them.

    Args:
        max_depth: largest depth of any row; 0: there is no drafter.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._error: str | None = None
        self._tally = Tally()
        self._rounds_by_depth = [0] * (max_depth + 1)

    @property
    def max_depth(self) -> int:
        """Of any row in the next step."""
        return 0 if self._error is not None else self._max_depth

    def count(self, got: RowResult) -> None:
        """Take a round into the sums."""
        self._tally.add(got)
        self._rounds_by_depth[got.depth] += 1

    def fail(self, reason: str) -> None:
        """The drafter has turned itself off; the first reason is kept, and logged once."""
        if self._error is None:
            self._error = reason
            log.warning("the drafter failed and stays off; requests go on without drafts: %s", reason)

    def stats(self) -> SpeculationStats:
        """The numbers of this moment."""
        tally = self._tally
        unseen = self._max_depth - len(tally.accepted_per_pos)
        return SpeculationStats(
            max_depth=self._max_depth,
            drafter_error=self._error,
            num_rounds=tally.num_rounds,
            num_drafted=tally.num_drafted,
            num_verified=tally.num_verified,
            num_accepted=tally.num_accepted,
            accepted_per_pos=[*tally.accepted_per_pos, *[0] * unseen],
            rounds_by_depth=list(self._rounds_by_depth),
        )
