"""How likely drafts are accepted: by position, by kind of row, by row. One `Acceptance` per drafter.

A round of depth d that accepts a drafts has *reached* positions 1..min(a + 1, d); nothing is learnt about the
others. With n_i and s_i the discounted numbers of rounds that reached and that accepted position i, the
conditional acceptance is

    a_i = (s_i + w q_i) / (n_i + w)         q_1 = the prior,  q_i = a_{i-1} + (a_{i-1} - a_{i-2}) / 2

so a position that has not been seen continues the slope of those before it. Each batch of results multiplies
n_i and s_i of the positions it reached by `discount`, of the others by `idle_discount`: old evidence on deep
positions fades towards that continuation while only shallow ones are drafted. No n_i exceeds `max_rounds`.

Rows differ. A row that accepted s of the n positions it reached, where a_i made e expected, is shrunk to
the rest,

    m = (s + kappa e/n) / (n + kappa),      g = ln m / ln (e/n),      S_rj ~ (a_1 ... a_j) ** g

with exponent g = 1 for a row like all, 0 for one that accepts everything. Rows are sorted into `NUM_KINDS`
kinds by their exponent. Those around 1 are expected to do what all do; every other kind counts its own n_i
and s_i, with a_i ** g as its prior of weight kappa: what a row has shown decides where it belongs, what
rows of that kind went on to do decides what is expected of it.

Sources: discounted Beta counts and shrinkage as in the literature on adaptive speculation (SmartSpec
2406.14066, DSpark 2607.05147); conditional acceptance by position because it rises with depth for EAGLE-3
and falls for others. Knows nothing of cost or time.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from paceline.policy.types import PolicyError, ShadowResult

_EDGES = (0.3, 0.5, 0.75, 4 / 3, 2.0, 3.3)  # of the exponent, between kinds
_EXPONENTS = (0.2, 0.39, 0.61, 1.0, 1.63, 2.57, 4.5)  # what stands for each kind until it has evidence
NUM_KINDS = len(_EXPONENTS)
COMMON_KIND = 3  # of a row without evidence
_LOW, _HIGH = 0.01, 0.99  # bounds of a mean, so that logarithms are finite
_MAX_CHAINS = 4096
_MANY = 64  # batches that are counted even if no estimate is asked for
_NUM_SEEN = 60.0
_OUTWEIGHS = 3.0  # times the prior's weight
_LITTLE = 16.0  # positions reached, below which a row is sorted anew after each of its rounds
_SORT_EVERY = 4  # rounds, afterwards


@dataclass(frozen=True, slots=True)
class AcceptanceConfig:
    """What the estimates rest on; counts are in rounds that reached a position."""

    prior: float = 0.5  # first position, before anything is seen
    prior_weight: float = 8.0  # w
    kappa: float = 12.0  # what a row or kind must have shown to count half
    discount: float = 0.99  # a batch, for positions it reached
    idle_discount: float = 0.998  # a batch, for the others
    row_discount: float = 0.98  # a round of that row
    max_rounds: float = 400.0  # counts are scaled down to this, so that few new rounds can outweigh many old
    max_kind_rounds: float = 100.0  # the same for those of a kind

    def __post_init__(self) -> None:
        for name in ("prior", "discount", "idle_discount", "row_discount"):
            if not 0 < getattr(self, name) <= 1:
                raise PolicyError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        for name in ("prior_weight", "kappa", "max_rounds", "max_kind_rounds"):
            if not 0 < getattr(self, name) < math.inf:
                raise PolicyError(f"{name} must be positive and finite, got {getattr(self, name)}")


class RowEvidence:
    """What one row has shown: discounted sums over its rounds, and the kind they put it in."""

    __slots__ = ("accepted", "expected", "kind", "num_rounds", "reached")

    def __init__(self) -> None:
        self.reached = self.accepted = self.expected = 0.0
        self.num_rounds = 0
        self.kind = COMMON_KIND

    def fade(self, factor: float, config: AcceptanceConfig) -> None:
        """Forget some of it: the row was not drafted for, and is to be tried again some day."""
        self.reached *= factor
        self.accepted *= factor
        self.expected *= factor
        self._sort(config.kappa)

    def add(self, num_reached: int, num_accepted: int, expected: float, config: AcceptanceConfig) -> None:
        """Take in a round of which `expected` would have been accepted by a row like all."""
        factor = config.row_discount
        self.reached = self.reached * factor + num_reached
        self.accepted = self.accepted * factor + num_accepted
        self.expected = self.expected * factor + expected
        self.num_rounds += 1
        if self.reached < _LITTLE or not self.num_rounds % _SORT_EVERY:
            self._sort(config.kappa)

    def _sort(self, kappa: float) -> None:
        if not self.reached:
            return
        usual = min(max(self.expected / self.reached, _LOW), _HIGH)
        mean = (self.accepted + kappa * usual) / (self.reached + kappa)
        exponent = math.log(min(max(mean, _LOW), _HIGH)) / math.log(usual)
        self.kind = bisect.bisect(_EDGES, exponent)


class _Counts:
    """Discounted numbers of rounds that reached and that accepted each position."""

    __slots__ = ("accepted", "reached")

    def __init__(self, max_depth: int) -> None:
        self.reached = [0.0] * max_depth
        self.accepted = [0.0] * max_depth

    def add(
        self, rounds: Iterable[tuple[int, int, int]], config: AcceptanceConfig, max_rounds: float
    ) -> None:
        """Take in a batch: (positions reached, drafts accepted, number of rounds like this)."""
        num_positions = len(self.reached)
        reached, accepted = [0] * num_positions, [0] * num_positions
        for num_reached, num_accepted, num in rounds:
            for i in range(num_reached):
                reached[i] += num
            for i in range(num_accepted):
                accepted[i] += num
        for i in range(num_positions):
            factor = config.discount if reached[i] else config.idle_discount
            self.reached[i] = self.reached[i] * factor + reached[i]
            self.accepted[i] = self.accepted[i] * factor + accepted[i]
        self.shrink(max_rounds)

    def shrink(self, max_rounds: float) -> None:
        """Count no position as more rounds than that."""
        for i, reached in enumerate(self.reached):
            if reached > max_rounds:
                self.accepted[i] *= max_rounds / reached
                self.reached[i] = max_rounds


class Acceptance:
    """What is known of one drafter.

    Args:
        max_depth: positions that are kept account of.
    """

    def __init__(self, max_depth: int, config: AcceptanceConfig | None = None) -> None:
        self._max_depth = max_depth
        self._config = config or AcceptanceConfig()
        self._all = _Counts(max_depth)
        self._kinds = [_Counts(max_depth) for _ in range(NUM_KINDS)]
        self._survivals: dict[int, tuple[float, ...]] = {}
        self._enough = max(_NUM_SEEN, _OUTWEIGHS * self._config.prior_weight)
        self._conditional: tuple[float, ...] = ()
        self._expected: list[float] = []  # accepted by a row like all, by the number of positions reached
        self._untaken: list[list[tuple[int, int, int]]] = []  # batches: kind, reached, accepted
        self._is_stale = True
        self._refresh()

    @property
    def conditional(self) -> tuple[float, ...]:
        """a_1, a_2, ...: the chance that a draft is accepted if all before it were; over all rows."""
        self._refresh()
        return self._conditional

    @property
    def num_seen(self) -> float:
        """Rounds that count, discounted."""
        self._refresh()
        return self._all.reached[0] if self._max_depth else 0.0

    @property
    def is_known(self) -> bool:
        """Whether what was seen outweighs the prior by far."""
        return self.num_seen >= self._enough

    def doubt(self) -> None:
        """Something contradicts the estimates: they now rest on half of what would make them known."""
        self._refresh()
        self._all.shrink(self._enough / 2)
        self._is_stale = True

    def deviation(self, position: int) -> float:
        """Standard deviation of a_position (from 1), as the counts have it: the prior is no evidence."""
        mean = self.conditional[position - 1]
        return math.sqrt(mean * (1 - mean) / (self._all.reached[position - 1] + 1))

    def survivals(self, kind: int) -> tuple[float, ...]:
        """S_1, S_2, ...: the chance that a row of this kind accepts at least so many drafts."""
        self._refresh()
        known = self._survivals.get(kind)
        if known is None:
            known = self._survivals[kind] = self._survivals_of(kind)
        return known

    def optimistic(self) -> tuple[float, ...]:
        """Survivals over all rows, every a_i two standard deviations higher than estimated, or than seen."""
        survivals, product = [], 1.0
        for i, mean in enumerate(self.conditional):
            reached = self._all.reached[i]
            seen = self._all.accepted[i] / reached if reached else 0.0
            product *= min(1.0, max(mean, seen) + 2 * self.deviation(i + 1))
            survivals.append(product)
        return tuple(survivals)

    def add(self, rounds: Sequence[tuple[RowEvidence, int, int]]) -> None:
        """Take in a batch of rounds: the row, the positions it reached, the drafts it accepted.

        Rounds that did not start where rounds start (the first after plain ones) are to be left out. A row
        with a depth of its own may go deeper than `max_depth`: what it says beyond is not kept.

        Rows know at once what they have shown, compared with what was known when an estimate was last asked
        for. The counts follow when one is asked for: several batches at once cost little.
        """
        if not rounds:
            return
        config, deepest, expected = self._config, self._max_depth, self._expected
        batch = []
        for row, num_reached, num_accepted in rounds:
            reached, accepted = min(num_reached, deepest), min(num_accepted, deepest)
            batch.append((row.kind, reached, accepted))
            row.add(reached, accepted, expected[reached], config)
        self._untaken.append(batch)
        self._is_stale = True
        if len(self._untaken) >= _MANY:
            self._refresh()

    def _count(self, batch: Sequence[tuple[int, int, int]]) -> None:
        config, alike = self._config, Counter(batch)
        self._all.add(((r, a, num) for (_, r, a), num in alike.items()), config, config.max_rounds)
        for kind in {kind for kind, _, _ in alike} - {COMMON_KIND}:
            own = ((r, a, num) for (k, r, a), num in alike.items() if k == kind)
            self._kinds[kind].add(own, config, config.max_kind_rounds)

    def _refresh(self) -> None:
        """Everything that follows from the counts, if they have changed."""
        if not self._is_stale:
            return
        self._is_stale = False
        for batch in self._untaken:
            self._count(batch)
        self._untaken.clear()
        counts, weight = self._all, self._config.prior_weight
        means: list[float] = []
        for i in range(self._max_depth):
            if i == 0:
                prior = self._config.prior
            elif i == 1:
                prior = means[0]
            else:
                prior = min(max(means[-1] + (means[-1] - means[-2]) / 2, _LOW), _HIGH)
            means.append((counts.accepted[i] + weight * prior) / (counts.reached[i] + weight))
        self._conditional = tuple(means)
        self._expected = [0.0]
        for mean in means:
            self._expected.append(self._expected[-1] + mean)
        self._survivals.clear()

    def _survivals_of(self, kind: int) -> tuple[float, ...]:
        counts, kappa, exponent = self._kinds[kind], self._config.kappa, _EXPONENTS[kind]
        survivals, product = [], 1.0
        for i, mean in enumerate(self._conditional):
            prior = mean**exponent
            product *= (counts.accepted[i] + kappa * prior) / (counts.reached[i] + kappa)
            survivals.append(product)
        return tuple(survivals)


class ShadowChains:
    """Which shadow drafts count: those that real rounds would have made, except the first of a chain.

    Real rounds start just after a rejection, where acceptance is lower than elsewhere. So shadow results
    are chained: a virtual round that starts at s and matches m drafts ends at s + m + 1, and only a result
    that starts there is the next one. The first of a chain starts anywhere, and does not count.
    """

    def __init__(self) -> None:
        self._next_start: dict[Hashable, int] = {}

    def follow(self, result: ShadowResult) -> bool:
        """Whether this result counts. Give those of a row in the order of their starts."""
        expected = self._next_start.get(result.key)
        if expected is not None and result.start < expected:
            return False  # inside a virtual round
        if len(self._next_start) >= _MAX_CHAINS:
            self._next_start.clear()
        self._next_start[result.key] = result.start + result.matched + 1
        return result.start == expected

    def end(self, key: Hashable) -> None:
        """The row's chain is over; another one begins with its next result."""
        self._next_start.pop(key, None)
