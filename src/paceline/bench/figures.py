"""The pictures of a report: which numbers go on which axis. Knows neither pens nor files."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.bench.arms import Arm, Role
from paceline.bench.charts import Axis, Chart, Line
from paceline.bench.report import Report, show_interval
from paceline.bench.summary import Cell
from paceline.bench.workload import Column

PLAIN, AUTO = "#1f2933", "#d6336c"
# Okabe and Ito's, which remain distinct to the colour-blind.
OTHERS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#d55e00", "#7b5ea7", "#8a8a00", "#999999")


def colours(arms: Sequence[Arm]) -> dict[str, str]:
    """A colour for each arm, the same in all pictures."""
    fixed: dict[Role, str] = {"plain": PLAIN}
    found: dict[str, str] = {}
    for arm in arms:
        if arm.name == "auto":
            found[arm.name] = AUTO
        elif arm.role in fixed and fixed[arm.role] not in found.values():
            found[arm.name] = fixed[arm.role]
        else:
            num = sum(colour in OTHERS for colour in found.values())
            found[arm.name] = OTHERS[num % len(OTHERS)]
    return found


def sweep_charts(report: Report, temperature: float, context_len: int | None) -> list[Chart]:
    """Throughput, alone, against plain's and against one user's; acceptance; depth, where it is known."""
    columns = [
        column
        for column in report.summary.columns()
        if (column.temperature, column.context_len) == (temperature, context_len)
    ]
    charts = [throughput(report, columns)]
    if report.summary.reference is not None:
        charts.append(against_reference(report, columns))
    charts += [pareto(report, columns), acceptance(report, columns[0])]
    depth = depth_over_time(report, columns)
    return [*charts, depth] if any(line.points for line in depth.lines) else charts


def _cells(report: Report, columns: Sequence[Column], arm: str) -> list[Cell]:
    found = [report.summary.cell(column, arm) for column in columns]
    return [cell for cell in found if cell is not None]


def _line(report: Report, arm: Arm, points: Sequence[tuple[float, float]], **more: object) -> Line:
    is_adaptive = arm.role == "adaptive"
    return Line(
        arm.name,
        colours(report.arms)[arm.name],
        points,
        dash=arm.role == "plain",
        width=2.8 if is_adaptive else 1.8,
        **more,  # type: ignore[arg-type]
    )


def throughput(report: Report, columns: Sequence[Column]) -> Chart:
    """Tokens a second against the number of requests."""
    lines = []
    for arm in report.arms:
        cells = _cells(report, columns, arm.name)
        notes = [
            f"{arm.name}, {cell.column}: {cell.rate.median:.1f} tok/s"
            + (f", {show_interval(cell.to_plain)} of {report.summary.reference}" if cell.to_plain else "")
            for cell in cells
        ]
        points = [(float(cell.column.concurrency), cell.rate.median) for cell in cells]
        lines.append(
            _line(report, arm, points, spread=[(c.rate.low, c.rate.high) for c in cells], notes=notes)
        )
    return Chart("Throughput", _loads(columns), Axis("tok/s"), lines)


def _loads(columns: Sequence[Column]) -> Axis:
    ticks = sorted({float(column.concurrency) for column in columns})
    return Axis("requests in flight", ticks, is_log=len(ticks) > 1)


def against_reference(report: Report, columns: Sequence[Column]) -> Chart:
    """Throughput as a multiple of plain's, with its interval: where a line falls below 1, stop drafting."""
    lines = []
    for arm in report.arms:
        cells = _cells(report, columns, arm.name)
        known = [(float(c.column.concurrency), c.to_plain) for c in cells if c.to_plain is not None]
        points = [(load, ratio.estimate) for load, ratio in known]
        spread = [
            (ratio.low, ratio.high) if math.isfinite(ratio.high) else (ratio.estimate,) * 2
            for _, ratio in known
        ]
        notes = [f"{arm.name}, {load:g} in flight: {show_interval(ratio)}" for load, ratio in known]
        lines.append(_line(report, arm, points, spread=spread, notes=notes))
    title = f"Throughput against {report.summary.reference}"
    return Chart(title, _loads(columns), Axis(f"{report.summary.reference} = 1"), lines)


def pareto(report: Report, columns: Sequence[Column]) -> Chart:
    """Tokens a second of one user against those of all: up and to the right is better."""
    lines = []
    for arm in report.arms:
        cells = _cells(report, columns, arm.name)
        points = [(cell.rate.median, 1 / cell.tpot.median) for cell in cells]
        lines.append(_line(report, arm, points, notes=[f"{arm.name}, {cell.column}" for cell in cells]))
    return Chart(
        "Speed for one against throughput", Axis("tok/s, all users"), Axis("tok/s for one user"), lines
    )


def acceptance(report: Report, column: Column) -> Chart:
    """Share of rounds whose draft at each position was accepted."""
    lines = []
    for arm in report.arms:
        for cell in _cells(report, [column], arm.name):
            points = [(float(i), share) for i, share in enumerate(cell.acceptance_per_pos, 1)]
            if points:
                lines.append(_line(report, arm, points))
    most = max((len(line.points) for line in lines), default=1)
    ticks = [float(i) for i in range(1, most + 1)]
    title = f"Acceptance by position, {column.concurrency} in flight"
    return Chart(title, Axis("draft position", ticks), Axis("share of rounds", high=1.0), lines)


def depth_over_time(report: Report, columns: Sequence[Column]) -> Chart:
    """The mean depth that adaptive arms chose in each round, over the time of the sweep."""
    lines = []
    marks: dict[tuple[int, Column], float] = {}
    for arm in report.arms:
        if arm.role != "adaptive":
            continue
        points = []
        for m in report.measurements:
            depth = m.sample.speculation.mean_depth if m.sample.speculation else None
            if m.arm == arm.name and m.column in columns and depth is not None:
                points.append((m.begin, depth))
                marks.setdefault((m.pass_id, m.column), m.begin)
        lines.append(_line(report, arm, points, step=True))
    shown = [(begin, str(column.concurrency)) for (_, column), begin in marks.items()]
    title = "Depth over time (above: requests in flight)"
    return Chart(title, Axis("seconds of the sweep"), Axis("mean depth", high=1.0), lines, marks=shown)
