"""What the measurements come to: cells, crossovers, and the verdict on arms that choose for themselves.

    verdict of a column = adaptive / best, the median of paired ratios over the rounds of pass 2,
    best = the plain or fixed arm with the greatest median rate in pass 1

so that the best arm's luck, by which it was chosen, does not count for it. Ratios to plain and crossovers use
both passes. Knows nothing of how things were measured, or of how they are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.bench.arms import Arm
from paceline.bench.stats import (
    Interval,
    Spread,
    crossover,
    mean_of_medians,
    median_interval,
    paired_ratios,
    spread,
)
from paceline.bench.sweep import Measurement
from paceline.bench.window import Speculation
from paceline.bench.workload import Column


@dataclass(frozen=True, slots=True)
class Cell:
    """One arm at one column, over all rounds."""

    column: Column
    arm: str
    rate: Spread  # tokens a second
    tpot: Spread  # seconds a token of one request
    ttft: Spread  # seconds
    to_plain: Interval | None  # paired ratio of rates; None: nothing to compare with
    accept_len: float | None  # tokens a drafted round, bonus included
    acceptance_per_pos: list[float]  # of rounds that drafted this far
    mean_depth: float | None  # over rows and steps
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """An adaptive arm against the best that does not adapt."""

    column: Column
    arm: str
    best: str
    ratio: Interval


@dataclass(frozen=True, slots=True)
class Crossover:
    """The number of requests at which an arm stops being faster than the reference."""

    arm: str
    temperature: float
    context_len: int | None
    lowest: int  # concurrency measured
    highest: int
    at: Interval  # -inf: it does not pay even at the lowest; inf: it still does at the highest


@dataclass(frozen=True, slots=True)
class Summary:
    """All of it."""

    reference: str | None  # what ratios and crossovers are to: plain, else depth 0
    cells: list[Cell]
    verdicts: list[Verdict]
    averages: dict[str, Interval]  # by adaptive arm: the mean of its columns' ratios
    crossovers: list[Crossover]

    def cell(self, column: Column, arm: str) -> Cell | None:
        """The cell, if it was measured."""
        return next((cell for cell in self.cells if (cell.column, cell.arm) == (column, arm)), None)

    def columns(self) -> list[Column]:
        """Those with measurements, in order."""
        return sorted({cell.column for cell in self.cells})


class _Table:
    """Measurements by column and arm."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._found: dict[tuple[Column, str], dict[tuple[int, int], Measurement]] = {}
        for m in measurements:
            self._found.setdefault((m.column, m.arm), {})[m.pass_id, m.round_id] = m

    @property
    def columns(self) -> list[Column]:
        return sorted({column for column, _ in self._found})

    def of(self, column: Column, arm: str) -> list[Measurement]:
        return list(self._found.get((column, arm), {}).values())

    def rates(self, column: Column, arm: str, pass_id: int) -> list[float]:
        return [m.sample.rate for m in self.of(column, arm) if m.pass_id == pass_id]

    def ratios(self, column: Column, over: str, under: str, pass_id: int | None = None) -> list[float]:
        """Over the rounds that both have, of one pass or of both."""
        left, right = self._found.get((column, over), {}), self._found.get((column, under), {})
        both = [key for key in left if key in right and pass_id in (None, key[0])]
        return paired_ratios([left[k].sample.rate for k in both], [right[k].sample.rate for k in both])


def summarize(arms: Sequence[Arm], measurements: Sequence[Measurement]) -> Summary:
    """Everything that can be said; of an interrupted sweep, less."""
    table = _Table(measurements)
    reference = _reference(arms, table)
    cells = [
        _cell(table, column, arm.name, reference)
        for column in table.columns
        for arm in arms
        if table.of(column, arm.name)
    ]
    verdicts, averages = [], {}
    for arm in arms:
        if arm.role == "adaptive":
            found = [v for column in table.columns if (v := _verdict(table, column, arm.name, arms))]
            verdicts += found
            if found:
                groups = [table.ratios(v.column, arm.name, v.best, 2) for v in found]
                averages[arm.name] = mean_of_medians(groups)
    return Summary(reference, cells, verdicts, averages, list(_crossovers(table, arms, reference)))


def _reference(arms: Sequence[Arm], table: _Table) -> str | None:
    names = {arm.name for arm in arms if any(table.of(column, arm.name) for column in table.columns)}
    return next((name for name in ("plain", "depth 0") if name in names), None)


def _cell(table: _Table, column: Column, arm: str, reference: str | None) -> Cell:
    samples = [m.sample for m in table.of(column, arm)]
    ratios = table.ratios(column, arm, reference) if reference is not None else []
    drafted: Speculation | None = None
    for got in samples:
        if got.speculation is not None:
            drafted = got.speculation if drafted is None else drafted + got.speculation
    return Cell(
        column=column,
        arm=arm,
        rate=spread(s.rate for s in samples),
        tpot=spread(s.tpot for s in samples),
        ttft=spread(s.ttft for s in samples),
        to_plain=median_interval(ratios) if ratios else None,
        accept_len=drafted.accept_len if drafted else None,
        acceptance_per_pos=drafted.acceptance_per_pos if drafted else [],
        mean_depth=drafted.mean_depth if drafted else None,
        num_preemptions=sum(s.num_preemptions for s in samples),
    )


def _verdict(table: _Table, column: Column, arm: str, arms: Sequence[Arm]) -> Verdict | None:
    """None without a best arm of pass 1, or without a round of pass 2 that both did."""
    chosen = {
        other.name: statistics.median(rates)
        for other in arms
        if other.role in ("plain", "fixed") and (rates := table.rates(column, other.name, 1))
    }
    if not chosen:
        return None
    best = max(chosen, key=lambda name: chosen[name])
    ratios = table.ratios(column, arm, best, 2)
    return Verdict(column, arm, best, median_interval(ratios)) if ratios else None


def _crossovers(table: _Table, arms: Sequence[Arm], reference: str | None) -> Iterable[Crossover]:
    """Of each fixed depth that drafts, at each temperature and context with two loads or more."""
    if reference is None:
        return
    for temperature, context_len in dict.fromkeys((c.temperature, c.context_len) for c in table.columns):
        columns = [c for c in table.columns if (c.temperature, c.context_len) == (temperature, context_len)]
        for arm in arms:
            if arm.role != "fixed" or arm.name in ("depth 0", reference):
                continue
            pairs = [(c.concurrency, r) for c in columns if (r := table.ratios(c, arm.name, reference))]
            if len(pairs) < 2:
                continue
            loads, groups = [load for load, _ in pairs], [ratios for _, ratios in pairs]
            yield Crossover(arm.name, temperature, context_len, loads[0], loads[-1], crossover(loads, groups))
