"""The report of a sweep: one record, as JSON for programs and as tables for people.

docs/sweep.md has the schema. Knows what was measured and what it comes to; draws nothing (`figures`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.arms import Arm
from paceline.bench.stats import Interval, Spread
from paceline.bench.summary import Cell, Crossover, Summary
from paceline.bench.sweep import Failure, Measurement

FORMAT = 1
INTERRUPTED = "interrupted: this is what was measured until then"
VERDICT = "Verdict: against the best other arm of the first pass, as measured in the second"
ENOUGH = 5  # values whose least and greatest hold their median 95 times in 100


@dataclass(frozen=True, slots=True)
class About:
    """Where, when and how it was measured."""

    version: str  # of Paceline
    device: Mapping[str, str]
    model: str
    draft: str  # the drafter's name, none, or that servers have their own
    work: str  # what every arm was asked
    command: str
    date: str
    settings: Mapping[str, Any]  # of the sweep


@dataclass(frozen=True, slots=True)
class Report:
    """A sweep and its outcome."""

    about: About
    arms: Sequence[Arm]
    measurements: Sequence[Measurement]
    failures: Sequence[Failure]
    summary: Summary
    is_complete: bool  # not cut short by Ctrl-C or SIGTERM


def to_json(report: Report) -> str:
    """The whole report. An interval's bound beyond every number is null, or 0 at the low end."""
    document = {
        "format": FORMAT,
        "kind": "sweep",
        **asdict(report.about),
        "is_complete": report.is_complete,
        "arms": [{"name": arm.name, "role": arm.role, "url": arm.url} for arm in report.arms],
        "failures": [asdict(failure) for failure in report.failures],
        "summary": asdict(report.summary),
        "measurements": [asdict(measurement) for measurement in report.measurements],
    }
    return json.dumps(finite(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def show_device(device: Mapping[str, str]) -> str:
    """`AMD EPYC, 2 cores, 25 GB, Linux`."""
    cores = "1 core" if device.get("cores") == "1" else f"{device.get('cores')} cores"
    return ", ".join(cores if name == "cores" else value for name, value in device.items())


def finite(value: Any) -> Any:
    """The same without infinities, which JSON cannot say, and with no more digits than mean anything."""
    if isinstance(value, float):
        if math.isinf(value):
            return None if value > 0 else 0
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value


# Tables: rows of cells, for text and HTML alike.

Table = list[list[str]]


def rate_table(report: Report, temperature: float, context_len: int | None) -> Table:
    """Tokens a second by requests and arm, each with its ratio to the reference."""
    return _table(report, temperature, context_len, show_rate)


def tpot_table(report: Report, temperature: float, context_len: int | None) -> Table:
    """Milliseconds a token of one request."""
    return _table(report, temperature, context_len, lambda cell: show_spread(cell.tpot, 1000))


def groups(report: Report) -> list[tuple[float, int | None]]:
    """The temperatures and contexts that were measured: a table each."""
    return list(dict.fromkeys((c.temperature, c.context_len) for c in report.summary.columns()))


def group_title(temperature: float, context_len: int | None) -> str:
    """In words."""
    context = "" if context_len is None else f", prompts of {context_len} tokens"
    return f"temperature {temperature:g}{context}"


def _table(report: Report, temperature: float, context_len: int | None, show: Any) -> Table:
    summary = report.summary
    names = [arm.name for arm in report.arms if any(cell.arm == arm.name for cell in summary.cells)]
    rows = [["requests", *names]]
    for column in summary.columns():
        if (column.temperature, column.context_len) == (temperature, context_len):
            cells = [summary.cell(column, name) for name in names]
            rows.append([str(column.concurrency), *["" if cell is None else show(cell) for cell in cells]])
    return rows


def show_rate(cell: Cell) -> str:
    """`117.2 (+3 %)`."""
    if cell.to_plain is None:
        return f"{cell.rate.median:.1f}"
    return f"{cell.rate.median:.1f} ({show_gain(cell.to_plain.estimate)})"


def show_gain(ratio: float) -> str:
    """A ratio as a gain or a loss: `+19 %`."""
    return f"{100 * (ratio - 1):+.0f} %".replace("-", "−")


def show_spread(spread: Spread, scale: float = 1.0) -> str:
    """`8.5 (8.4–8.9)`."""
    median, low, high = (scale * value for value in (spread.median, spread.low, spread.high))
    return f"{median:.1f} ({low:.1f}–{high:.1f})"


def show_interval(interval: Interval) -> str:
    """`0.991 (0.984–0.997)`."""
    if math.isinf(interval.high):
        why = "one round" if interval.num == 1 else "a load of one round"
        return f"{interval.estimate:.3f} (no interval: {why})"
    return f"{interval.estimate:.3f} ({interval.low:.3f}–{interval.high:.3f})"


def verdict_table(report: Report) -> Table:
    """Each adaptive arm at each column."""
    rows = [["arm", "requests", "temperature", "context", "best other", "ratio (95 %)", "rounds"]]
    for verdict in report.summary.verdicts:
        column = verdict.column
        rows.append(
            [
                verdict.arm,
                str(column.concurrency),
                f"{column.temperature:g}",
                "" if column.context_len is None else str(column.context_len),
                verdict.best,
                show_interval(verdict.ratio),
                str(verdict.ratio.num),
            ]
        )
    return rows


def verdict_lines(report: Report) -> list[str]:
    """The verdict in sentences."""
    lines = []
    for name, average in report.summary.averages.items():
        mine = [v for v in report.summary.verdicts if v.arm == name]
        worst = min(mine, key=lambda verdict: verdict.ratio.estimate)
        lines.append(
            f"{name} / best of plain and fixed depths: {show_interval(average)} on average, "
            f"{show_interval(worst.ratio)} at worst ({worst.column}, against {worst.best})"
        )
    if min((verdict.ratio.num for verdict in report.summary.verdicts), default=ENOUGH) < ENOUGH:
        lines.append(f"Of fewer than {ENOUGH} rounds an interval holds the truth less often than it says.")
    return lines


def crossover_lines(report: Report) -> list[str]:
    """Where each depth stops paying."""
    lines = []
    for crossover in report.summary.crossovers:
        where = group_title(crossover.temperature, crossover.context_len)
        lines.append(f"{crossover.arm} ({where}): {show_crossover(crossover, report.summary.reference)}")
    return lines


def show_crossover(crossover: Crossover, reference: str | None) -> str:
    """`faster than plain below 4.2 requests (3.1 to 5.0)`."""
    at = crossover.at
    if at.estimate == -math.inf:
        text = f"slower than {reference} at {crossover.lowest} already"
    elif at.estimate == math.inf:
        text = f"faster than {reference} up to {crossover.highest} at least"
    else:
        text = f"faster than {reference} below {at.estimate:.1f} requests"
    bounds = [_bound(value, crossover) for value in (at.low, at.high)]
    return f"{text} ({bounds[0]} to {bounds[1]})"


def _bound(value: float, crossover: Crossover) -> str:
    if math.isinf(value):
        return f"below {crossover.lowest}" if value < 0 else f"beyond {crossover.highest}"
    return f"{value:.1f}"


def failure_lines(failures: Iterable[Failure]) -> list[str]:
    """Which arms failed, where and why."""
    return [
        f"{failure.arm} failed{'' if failure.column is None else f' at {failure.column}'}: {failure.reason}"
        for failure in failures
    ]


def preemption_lines(cells: Iterable[Cell]) -> list[str]:
    """Where requests were interrupted for lack of K/V pages, which makes an arm look slow."""
    return [
        f"{cell.arm} at {cell.column}: {cell.num_preemptions} preemptions (--kv-cache-tokens gives more room)"
        for cell in cells
        if cell.num_preemptions
    ]


def align(table: Table) -> list[str]:
    """A table as lines of text, its columns as wide as need be."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def to_text(report: Report) -> str:
    """The report for a terminal."""
    about = report.about
    parts = [
        f"{about.model}, draft {about.draft}; {show_device(about.device)}; paceline {about.version}\n"
        f"{about.work}"
    ]
    reference = report.summary.reference
    for temperature, context_len in groups(report):
        title = group_title(temperature, context_len)
        against = "" if reference is None else f" (against {reference}: median of the rounds' ratios)"
        for heading, table in (
            (f"tok/s at {title}{against}", rate_table(report, temperature, context_len)),
            (f"ms a token of one request at {title}", tpot_table(report, temperature, context_len)),
        ):
            parts.append("\n".join([heading, *align(table)]))
    if report.summary.crossovers:
        parts.append("\n".join(["Where depths stop paying", *crossover_lines(report)]))
    if report.summary.verdicts:
        parts.append("\n".join([VERDICT, *align(verdict_table(report)), *verdict_lines(report)]))
    notes = [*failure_lines(report.failures), *preemption_lines(report.summary.cells)]
    if not report.is_complete:
        notes.append(INTERRUPTED)
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"
