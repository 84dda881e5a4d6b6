"""What served rounds say of the cost tables: one drift for the machine, and a correction for each cell.

    T_served = T_model * exp(drift + c_cell)

A cell is (rows, deepest draft, tokens), rows and tokens in buckets of half an octave. Isolated rounds are
priced too cheap, and a calibration may be plainly wrong. A round says s = ln(T_served / T_model) - drift, and
a cell keeps a mean of that and the weight w of it in rounds:

- its first `NUM_FIRST` rounds: their median, each within a factor exp(`FAR`) of what the cells around it say:
  a round in which the machine stood still must not price a cell out;
- later rounds, where the round before was of another cell: the gain of a Kalman filter whose state wanders,
  1/w <- 1/w + `AGING` (rounds since it last learnt), then w <- w + 1. What was learnt long ago counts less.
  Until a cell has had `NUM_KNOWN` rounds it also learns from those in a row, which are of one moment: after
  one of these w is `NUM_FIRST` at most;
- rounds of a cell that also ran within the last `AGAIN` rounds move the drift: the machine has become slower
  or faster, everywhere. Where they follow on one of their own cell, they say nothing of how cells compare.

A calibration has timed all cells in turns, served rounds of one come together, in good moments or in bad;
so what they say is shrunk by as much as noise explains: with m_k the mean over the cells of depth k, w_k its
weight, and shrunk(x, y, w) = y + sign(x - y) max(0, |x - y| - `SIGMAS` noise / sqrt(w)),

    d_k = shrunk(m_k, median_j m_j, w_k)         c = shrunk(mean of the cell, d_k, w)

Tokens that were never served take d_k. A depth k that was never served at b rows takes what it is there
relative to others from the nearest b' at which it was, the less the further,

    d(b, k) = mean_j d(b, j) + 2 ** (-|b - b'| / 2) (d(b', k) - mean_j d(b', j))

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
from collections.abc import Iterable, Mapping

NUM_FIRST = 5
NUM_KNOWN = 16  # rounds that a cell needs to speak for the machine
CLIP = 0.3  # of s, around what is known
FAR = 1.6  # a factor of 5: more than a calibration can be wrong from one cell to the next
DRIFT_RATE = 0.25  # speed changes within ten rounds; comparing cells does not see this noise
AGING = 0.0002  # by which a cell's variance grows in a round, as a share of that of a round's time
SIGMAS = 0.5
AGAIN = 16  # rounds within which a cell counts as served again
NOISE = 0.05  # of a round's time, at first
_NOISE_RATE = 0.02
_DEVIATION = 1.25  # a standard one, in mean ones
PROMPT_FADE = 0.9  # of sums, a step with prompts in the same bucket
PROMPT_FAR = 4.0  # times what is predicted: more is a stall
_REFRESH = 16  # rounds for which what follows from other rows is good enough


def bucket(num: int) -> int:
    """Numbers up to 4 have their own bucket, larger ones share one by half octaves."""
    return num if num <= 4 else int(2 * math.log2(num)) + 1


class _Cell:
    __slots__ = ("around", "correction", "first", "last_at", "learnt_at", "mean", "num_rounds", "weight")

    def __init__(self, around: float) -> None:
        self.around = around  # what was expected of it before its first round
        self.correction = around
        self.mean = self.weight = 0.0
        self.num_rounds = 0
        self.last_at = self.learnt_at = -AGAIN
        self.first: list[float] = []


class _Site:
    """All that was served with one bucket of rows."""

    __slots__ = ("cells", "depths", "is_stale")

    def __init__(self) -> None:
        self.cells: dict[int, dict[int, _Cell]] = {}  # by depth, then by tokens
        self.depths: dict[int, float] = {}  # d_k
        self.is_stale = False

    def refresh(self, noise: float) -> None:
        """Shrink means to what they have in common."""
        self.is_stale = False
        pooled = {depth: _pool(cells.values()) for depth, cells in self.cells.items()}
        level = statistics.median(mean for mean, _ in pooled.values())
        for depth, (mean, weight) in pooled.items():
            of_depth = self.depths[depth] = _shrunk(mean, level, weight, noise)
            for cell in self.cells[depth].values():
                cell.correction = _shrunk(cell.mean, of_depth, cell.weight, noise)


def _pool(cells: Iterable[_Cell]) -> tuple[float, float]:
    """Mean and weight of several cells."""
    total = weight = 0.0
    for cell in cells:
        total += cell.weight * cell.mean
        weight += cell.weight
    return total / weight, weight


def _shrunk(mean: float, center: float, weight: float, noise: float) -> float:
    differs = mean - center
    return center + math.copysign(max(0.0, abs(differs) - SIGMAS * noise / math.sqrt(weight)), differs)


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
        self._latest: _Cell | None = None
        self._sites: dict[int, _Site] = {}  # by rows
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
        cell = self._cells(rows, depth).get(tokens)
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
            typical = math.exp(self._typical(rows, depth))
            by_tokens = {
                tokens: math.exp(cell.correction) for tokens, cell in self._cells(rows, depth).items()
            }
            known = self._factors[rows, depth] = by_tokens, typical
        return known

    def factor(self, rows: int, depth: int, tokens: int) -> float:
        """exp(c) of one cell."""
        by_tokens, typical = self.factors(rows, depth)
        return by_tokens.get(tokens, typical)

    def observe(self, rows: int, depth: int, tokens: int, model_seconds: float, seconds: float) -> None:
        """A round that was predicted to take `model_seconds`, without drift and correction."""
        self._round += 1
        num_visits = self._visits[rows, depth] = self.num_visits(rows, depth) + 1
        says = math.log(seconds / model_seconds) - self._drift
        cell = self._cells(rows, depth).get(tokens)
        if cell is None:
            around = self._typical(rows, depth) if self._sites else says
            if num_visits == 1 and rows in self._sites:
                self._expected[rows, depth] = around
            of_depth = self._sites.setdefault(rows, _Site()).cells.setdefault(depth, {})
            cell = of_depth[tokens] = _Cell(around)
        if self._correct(cell, says):
            self._sites[rows].is_stale = True
            if cell.num_rounds <= NUM_FIRST or not self._round % _REFRESH:
                self._factors.clear()
            else:
                for known in self._sites[rows].cells:
                    self._factors.pop((rows, known), None)
        if num_visits <= NUM_FIRST and (rows, depth) in self._expected:
            surprise = self._depths(rows)[depth] - self._expected[rows, depth]
            self.surprises.setdefault(depth, {})[rows] = surprise

    def _cells(self, rows: int, depth: int) -> Mapping[int, _Cell]:
        """By the bucket of tokens."""
        site = self._sites.get(rows)
        return site.cells.get(depth, {}) if site else {}

    def _depths(self, rows: int) -> Mapping[int, float]:
        """d_k by depth."""
        site = self._sites.get(rows)
        if site is None:
            return {}
        if site.is_stale:
            site.refresh(self._noise)
        return site.depths

    def _correct(self, cell: _Cell, says: float) -> bool:
        """Take in what a round says of its cell, or else of the machine. Returns whether it learnt."""
        now = self._round
        error = min(max(says - cell.correction, -CLIP), CLIP)
        if cell.num_rounds:
            self._noise += _NOISE_RATE * (_DEVIATION * abs(error) - self._noise)
        learns = cell.num_rounds < NUM_KNOWN or cell is not self._latest
        if cell.num_rounds < NUM_FIRST:
            cell.first.append(min(max(says, cell.around - FAR), cell.around + FAR))
            cell.mean, cell.weight = statistics.median(cell.first), float(len(cell.first))
        elif learns:
            most = NUM_FIRST if cell is self._latest else math.inf  # rounds in a row are of one moment
            cell.weight = min(1 / (1 / cell.weight + AGING * (now - cell.learnt_at)) + 1, most)
            cell.mean += min(max(says - cell.mean, -CLIP), CLIP) / cell.weight
        if learns:
            cell.learnt_at = now
        if now - cell.last_at < AGAIN and cell.num_rounds >= NUM_KNOWN:
            self._drift += DRIFT_RATE * error
        cell.num_rounds += 1
        cell.last_at, self._latest = now, cell
        return learns

    def _typical(self, rows: int, depth: int) -> float:
        here = self._depths(rows)
        if depth in here:
            return here[depth]
        everywhere = [level for site in self._sites for level in self._depths(site).values()]
        for near in sorted(self._sites, key=lambda site: abs(site - rows)):
            there = self._depths(near)
            shared = [there[j] for j in there if not here or j in here]
            if depth in there and shared:
                base = statistics.fmean([here[j] for j in there if j in here] if here else everywhere)
                weight = 2 ** (-abs(near - rows) / 2)
                return base + weight * (there[depth] - statistics.fmean(shared))
        known = here.values() or everywhere
        return statistics.fmean(known) if known else 0.0
