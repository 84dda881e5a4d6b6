"""What served rounds say of the cost tables: one drift for the machine, and a correction for each cell.

    T_served = T_model * exp(drift + c_cell)

A cell is (rows, deepest draft, tokens), rows and tokens in buckets of half an octave. Isolated rounds are
priced too cheap, and a calibration may be plainly wrong; with x = ln(T_served / T_model) - drift - c_cell,

- a cell's first `NUM_FIRST` rounds: c is the median of what they say, each within a factor exp(`FAR`) of what
  the cells around it say: a round in which the machine stood still must not price a cell out;
- later rounds, x clipped to +-`CLIP`: first a mean; then, while a cell is served again and again, nearly
  all of x moves the drift (the machine has become slower or faster, everywhere), and a cell that is seen
  once in a while moves its own c.

What a median differs by within noise is taken for noise: of a difference d to what was expected, the first n
rounds are believed d max(0, 1 - noise^2 / (n d^2)).

A cell that was never served takes the mean of those with its rows and depth. A depth k that was never served
at b rows takes what it is there relative to others from the nearest b' at which it was, the less the further,

    c(b, k) = mean_j c(b, j) + 2 ** (-|b - b'| / 2) (c(b', k) - mean_j c(b', j))

b in buckets, j over the depths served at both (what a calibration gets wrong at a load, it gets wrong at
loads like it); else the mean of its rows, else of all. By how much the first rounds of a depth differ from
that is its *surprise* there, which says how far the tables can be trusted elsewhere (`doubt`). Comparing
depths needs no drift, which is common to all of them.

Steps with prompt tokens say what those take: what is left of a step's time without its decoding rows, over
what was predicted, as a ratio of faded sums by bucket of prompt tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

NUM_FIRST = 5
NUM_KNOWN = 16  # rounds that a cell needs to speak for the machine
CLIP = 0.3
FAR = 1.6  # a factor of 5: more than a calibration can be wrong from one cell to the next
DRIFT_RATE = 0.1
SERVED_RATE = 0.02  # of c, while its cell is served again and again
SEEN_RATE = 0.1  # of c at least, when its cell is seen once in a while
AGAIN = 16  # rounds within which a cell counts as served again
NOISE = 0.05  # of a round's time, at first
_NOISE_RATE = 0.02
_SIGMAS = 1.25  # a standard deviation, in mean deviations
PROMPT_FADE = 0.9  # of sums, a step with prompts in the same bucket
PROMPT_FAR = 4.0  # times what is predicted: more is a stall
_REFRESH = 16  # rounds for which what follows from the corrections of others is good enough


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
    __slots__ = ("around", "correction", "first", "last_round", "num_rounds")

    def __init__(self, around: float) -> None:
        self.around = around  # what was expected of it before its first round
        self.correction = 0.0
        self.num_rounds = 0
        self.last_round = -AGAIN
        self.first: list[float] = []


class _Prompts:
    """Time that prompt tokens took over time predicted: a ratio of sums, in which long prompts weigh more."""

    __slots__ = ("_predicted", "_served")

    def __init__(self) -> None:
        self._predicted = self._served = 0.0

    @property
    def factor(self) -> float:
        return min(max(self._served / self._predicted, 1 / PROMPT_FAR), PROMPT_FAR)

    def add(self, predicted: float, served: float) -> None:
        served = min(max(served, 0.0), PROMPT_FAR * predicted * (self.factor if self._predicted else 1.0))
        self._predicted = PROMPT_FADE * self._predicted + predicted
        self._served = PROMPT_FADE * self._served + served


class ServedCosts:
    """Corrections to a cost model; depends on it only through the times that it predicts."""

    def __init__(self) -> None:
        self._drift = 0.0
        self._noise = NOISE
        self._round = 0
        self._cells: dict[tuple[int, int], dict[int, _Cell]] = {}  # by rows and depth, then by tokens
        self._sites: dict[int, dict[int, _Mean]] = {}  # of cells, by rows, then by depth
        self._means: dict[int, _Mean] = {}  # the same by rows
        self._mean = _Mean()
        self._prompts: dict[int | None, _Prompts] = {}  # by bucket of prompt tokens; None: all
        self._visits: dict[tuple[int, int], int] = {}
        self._expected: dict[tuple[int, int], float] = {}  # before the first round with so many rows
        self._factors: dict[tuple[int, int], tuple[dict[int, float], float]] = {}
        self.surprises: dict[int, dict[int, float]] = {}  # by depth, then rows as first met

    @property
    def drift(self) -> float:
        """How many times slower the machine has become since the cells were learnt."""
        return math.exp(self._drift)

    @property
    def noise(self) -> float:
        """Relative standard deviation of a round's time around what is expected of it."""
        return self._noise

    def num_visits(self, rows: int, depth: int) -> int:
        """Timed rounds with that bucket of rows and that deepest draft."""
        return self._visits.get((rows, depth), 0)

    def num_rounds(self, rows: int, depth: int, tokens: int) -> int:
        """Of them, those with that bucket of tokens."""
        cell = self._cells.get((rows, depth), {}).get(tokens)
        return cell.num_rounds if cell else 0

    def prompt_factor(self, rows: int, prompts: int) -> float:
        """What the predicted time of so many prompt tokens (a bucket) is to be multiplied by.

        Learnt in their bucket, else from all prompts, else that of plain rounds.
        """
        known = self._prompts.get(prompts) or self._prompts.get(None)
        return known.factor if known else self.factors(rows, 0)[1]

    def observe_prompt(self, prompts: int, model_seconds: float, seconds: float) -> None:
        """Prompt tokens that were predicted to take `model_seconds` of a step took about `seconds` of it."""
        for bucket_of in (prompts, None):
            self._prompts.setdefault(bucket_of, _Prompts()).add(model_seconds, seconds)

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
        num_visits = self._visits[rows, depth] = self.num_visits(rows, depth) + 1
        around = self._typical(rows, depth)
        if num_visits == 1 and rows in self._sites:
            self._expected[rows, depth] = around
        cell = self._cells.setdefault((rows, depth), {}).setdefault(tokens, _Cell(around))
        before, was_known = cell.correction, cell.num_rounds > 0
        self._correct(cell, math.log(seconds / model_seconds) - self._drift)
        of_depth = self._sites.setdefault(rows, {}).setdefault(depth, _Mean())
        for mean in (of_depth, self._means.setdefault(rows, _Mean()), self._mean):
            mean.num += not was_known
            mean.total += cell.correction - before
        if num_visits <= NUM_FIRST and (rows, depth) in self._expected:
            surprise = of_depth.value - self._expected[rows, depth]
            self.surprises.setdefault(depth, {})[rows] = surprise
        self._factors.pop((rows, depth), None)
        if cell.num_rounds <= NUM_FIRST or not self._round % _REFRESH:
            self._factors.clear()

    def _correct(self, cell: _Cell, says: float) -> None:
        """Take in what a round says of its cell, and of the machine."""
        is_again = self._round - cell.last_round < AGAIN
        error = min(max(says - cell.correction, -CLIP), CLIP)
        if cell.num_rounds:
            self._noise += _NOISE_RATE * (_SIGMAS * abs(error) - self._noise)
        if cell.num_rounds < NUM_FIRST:
            if not self._mean.num:
                cell.around = says
            cell.first.append(min(max(says, cell.around - FAR), cell.around + FAR))
            differs = statistics.median(cell.first) - cell.around
            of_noise = self._noise**2 / len(cell.first)
            cell.correction = cell.around + differs * max(0.0, 1 - of_noise / max(differs**2, of_noise))
        else:
            rate = max(SERVED_RATE if is_again else SEEN_RATE, 1 / (cell.num_rounds + 1))
            if is_again and cell.num_rounds >= NUM_KNOWN:
                self._drift += DRIFT_RATE * error
            cell.correction += rate * error
        cell.num_rounds += 1
        cell.last_round = self._round

    def _typical(self, rows: int, depth: int) -> float:
        here = self._sites.get(rows, {})
        if depth in here:
            return here[depth].value
        for near in sorted(self._sites, key=lambda site: abs(site - rows)):
            there = self._sites[near]
            shared = [there[j].value for j in there if not here or j in here]
            if depth in there and shared:
                base = (
                    statistics.fmean(here[j].value for j in there if j in here) if here else self._mean.value
                )
                weight = 2 ** (-abs(near - rows) / 2)
                return base + weight * (there[depth].value - statistics.fmean(shared))
        return self._means[rows].value if here else self._mean.value
