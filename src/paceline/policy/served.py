"""What served rounds say of the cost tables: one drift for the machine, and a correction for each cell.

    T_served = T_model * exp(drift + c_cell)

A cell is (rows, deepest draft, tokens), rows and tokens in buckets of half an octave. Isolated rounds are
priced too cheap, and a calibration may be plainly wrong; with x = ln(T_served / T_model) - drift - c_cell,

- a cell's first `NUM_FIRST` rounds: c is the median of what they say, each within a factor exp(`FAR`) of what
  the cells around it say: a round in which the machine stood still must not price a cell out;
- later rounds, x clipped to +-`CLIP`: first a mean; then, while a cell is served again and again, nearly
  all of x moves the drift (the machine has become slower or faster, everywhere), and a cell that is seen
  once in a while moves its own c.

A cell that was never served takes the mean of those with its rows and depth, else with its rows, else of all.
Comparing depths needs no drift, which is common to all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping

NUM_FIRST = 5
NUM_KNOWN = 16  # rounds that a cell needs to speak for the machine
CLIP = 0.3
FAR = 1.6  # a factor of 5: more than a calibration can be wrong from one cell to the next
DRIFT_RATE = 0.1
SERVED_RATE = 0.02  # of c, while its cell is served again and again
SEEN_RATE = 0.1  # of c at least, when its cell is seen once in a while
AGAIN = 16  # rounds within which a cell counts as served again


def bucket(num: int) -> int:
    """Numbers up to 4 have their own bucket, larger ones share one by half octaves."""
    return num if num <= 4 else int(2 * math.log2(num)) + 1


class _Mean:
    """A mean that is kept while its members change."""

    __slots__ = ("num", "total")

    def __init__(self) -> None:
        self.num, self.total = 0, 0.0

    @property
    def value(self) -> float:
        return self.total / self.num if self.num else 0.0


class _Cell:
    __slots__ = ("correction", "first", "last_round", "num_rounds")

    def __init__(self) -> None:
        self.correction = 0.0
        self.num_rounds = 0
        self.last_round = -AGAIN
        self.first: list[float] = []


class ServedCosts:
    """Corrections to a cost model; depends on it only through the times that it predicts."""

    def __init__(self) -> None:
        self._drift = 0.0
        self._round = 0
        self._cells: dict[tuple[int, int], dict[int, _Cell]] = {}  # by rows and depth, then by tokens
        self._means: dict[Hashable, _Mean] = {}
        self._visits: dict[tuple[int, int], int] = {}
        self._factors: dict[tuple[int, int], tuple[dict[int, float], float]] = {}

    @property
    def drift(self) -> float:
        """How many times slower the machine has become since the cells were learnt."""
        return math.exp(self._drift)

    def num_visits(self, rows: int, depth: int) -> int:
        """Timed rounds with that bucket of rows and that deepest draft."""
        return self._visits.get((rows, depth), 0)

    def factors(self, rows: int, depth: int) -> tuple[Mapping[int, float], float]:
        """exp(c) by the bucket of tokens, and for buckets that are not there."""
        known = self._factors.get((rows, depth))
        if known is None:
            cells = self._cells.get((rows, depth), {})
            known = self._factors[rows, depth] = (
                {tokens: math.exp(cell.correction) for tokens, cell in cells.items()},
                math.exp(self._typical(rows, depth)),
            )
        return known

    def factor(self, rows: int, depth: int, tokens: int) -> float:
        """exp(c) of one cell."""
        by_tokens, typical = self.factors(rows, depth)
        return by_tokens.get(tokens, typical)

    def observe(self, rows: int, depth: int, tokens: int, model_seconds: float, seconds: float) -> None:
        """A round that was predicted to take `model_seconds`, without drift and correction."""
        self._round += 1
        self._visits[rows, depth] = self.num_visits(rows, depth) + 1
        cell = self._cells.setdefault((rows, depth), {}).setdefault(tokens, _Cell())
        before, was_known = cell.correction, cell.num_rounds > 0
        says = math.log(seconds / model_seconds) - self._drift
        is_again = self._round - cell.last_round < AGAIN
        if cell.num_rounds < NUM_FIRST:
            if self._means:
                around = self._typical(rows, depth)
                says = min(max(says, around - FAR), around + FAR)
            cell.first.append(says)
            cell.correction = statistics.median(cell.first)
        else:
            error = min(max(says - cell.correction, -CLIP), CLIP)
            rate = max(SERVED_RATE if is_again else SEEN_RATE, 1 / (cell.num_rounds + 1))
            if is_again and cell.num_rounds >= NUM_KNOWN:
                self._drift += DRIFT_RATE * error
            cell.correction += rate * error
        cell.num_rounds += 1
        cell.last_round = self._round
        for group in ((rows, depth), (rows,), ()):
            mean = self._means.setdefault(group, _Mean())
            mean.num += not was_known
            mean.total += cell.correction - before
        self._factors.clear()

    def _typical(self, rows: int, depth: int) -> float:
        for group in ((rows, depth), (rows,), ()):
            mean = self._means.get(group)
            if mean is not None:
                return mean.value
        return 0.0
