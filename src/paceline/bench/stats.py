"""The statistics of a sweep: paired ratios, bootstrap intervals, and where speculation stops paying.

Two arms are compared within rounds, in which both did the same work one after the other: what the machine
does slowly (heat, neighbours) cancels in the ratio. The median over rounds is the estimate; its interval
comes from drawing rounds again with replacement (percentile bootstrap, fixed seed, so that a report can be
remade). With five rounds a 95 % interval of the median is about the least and the greatest ratio.

Knows nothing of engines, arms or time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

LEVEL = 0.95
NUM_RESAMPLES = 2000
SEED = 20_261_129

Groups: TypeAlias = Sequence[Sequence[float]]  # ratios by column: a column's own are drawn again


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where the truth may lie, at `LEVEL`. Infinite bounds are honest ones."""

    estimate: float
    low: float
    high: float
    num: int  # values it comes from


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far the single values lie from it."""

    median: float
    low: float
    high: float
    num: int


def spread(values: Iterable[float]) -> Spread:
    """Of one value or more."""
    listed = sorted(values)
    return Spread(statistics.median(listed), listed[0], listed[-1], len(listed))


def paired_ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """`over / under`, round by round.

    Raises:
        ValueError: not equally many, or a value that is not positive.
    """
    if len(over) != len(under):
        raise ValueError(f"{len(over)} values cannot be paired with {len(under)}")
    if any(value <= 0 for value in (*over, *under)):
        raise ValueError("ratios need positive values")
    return [a / b for a, b in zip(over, under, strict=True)]


def quantile(ordered: Sequence[float], q: float) -> float:
    """The `q`-quantile of sorted values, linear between neighbours; an infinite neighbour wins."""
    place = q * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    share = place - math.floor(place)
    if below == above or share == 0:
        return below
    if math.isinf(below) or math.isinf(above):
        return above if share >= 0.5 else below
    return below + share * (above - below)


def bootstrap(
    groups: Groups,
    statistic: Callable[[Groups], float],
    num: int = NUM_RESAMPLES,
    seed: int = SEED,
    level: float = LEVEL,
) -> Interval:
    """The interval of `statistic(groups)`, each group's values drawn again from that group.

    A group of one value says nothing of how far others lie: both bounds are infinite then.

    Raises:
        ValueError: no groups, or an empty one.
    """
    if not groups or not all(groups):
        raise ValueError("nothing to draw from")
    estimate, num_values = statistic(groups), sum(len(g) for g in groups)
    if min(len(g) for g in groups) == 1:
        return Interval(estimate, -math.inf, math.inf, num_values)
    draw = random.Random(seed)
    drawn = sorted(statistic([draw.choices(g, k=len(g)) for g in groups]) for _ in range(num))
    tail = (1 - level) / 2
    return Interval(estimate, quantile(drawn, tail), quantile(drawn, 1 - tail), num_values)


def median_interval(ratios: Sequence[float]) -> Interval:
    """The median of paired ratios."""
    return bootstrap([ratios], lambda groups: statistics.median(groups[0]))


def mean_of_medians(groups: Groups) -> Interval:
    """The mean over columns of each column's median ratio."""
    return bootstrap(groups, lambda drawn: statistics.fmean(statistics.median(g) for g in drawn))


def crossing(loads: Sequence[float], ratios: Sequence[float]) -> float:
    """The load at which a ratio that begins above 1 first falls below it.

    Between two measured loads log ratio is taken as linear in log load.

    Args:
        loads: ascending and positive.
        ratios: at these loads, positive.

    Returns:
        -inf where the first ratio is below 1 (it never pays from there on), +inf where none is.
    """
    logs = [math.log(ratio) for ratio in ratios]
    if logs[0] < 0:
        return -math.inf
    for i in range(1, len(logs)):
        if logs[i] < 0:
            share = logs[i - 1] / (logs[i - 1] - logs[i])
            left, right = math.log(loads[i - 1]), math.log(loads[i])
            return math.exp(left + share * (right - left))
    return math.inf


def crossover(loads: Sequence[float], groups: Groups) -> Interval:
    """Where an arm stops paying, with its interval: `crossing` of each load's median ratio."""
    return bootstrap(groups, lambda drawn: crossing(loads, [statistics.median(g) for g in drawn]))
