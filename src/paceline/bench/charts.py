"""One chart: axes, lines with their spread, a legend. Knows nothing of sweeps, or of how a pen draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.bench.pens import Pen, Point

INK, GREY, GRID = "#1f2933", "#616e7c", "#e4e7eb"
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44  # of the plot within its area, in pixels
LEGEND_LINE = 17

Area: TypeAlias = tuple[float, float, float, float]  # left, top, width, height


@dataclass(frozen=True, slots=True)
class Line:
    """A series, or a stretch of one: lines of one name share an entry of the legend.

    `spread` has the least and greatest y of each point; `notes` what pointing at it says.
    """

    name: str
    colour: str
    points: Sequence[Point]
    spread: Sequence[tuple[float, float]] = ()
    notes: Sequence[str] = ()
    dash: bool = False
    width: float = 2.0
    dots: bool = True
    step: bool = False  # holds its value until the next point


@dataclass(frozen=True, slots=True)
class Axis:
    """A direction of the chart. Begins at zero unless logarithmic or told otherwise."""

    label: str
    ticks: Sequence[float] | None = None  # None: round numbers
    is_log: bool = False
    high: float | None = None  # the least upper end; None: the data's


@dataclass(frozen=True, slots=True)
class Chart:
    """Everything to be drawn in one area."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    legend: bool = True
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: x and what begins there


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    begin: float  # in pixels
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        low, high, v = self.low, self.high, value
        if self.is_log:
            low, high, v = math.log(low), math.log(high), math.log(value)
        return self.begin + (v - low) / (high - low) * (self.end - self.begin)


def draw(pen: Pen, area: Area, chart: Chart) -> None:
    """The chart, filling its area."""
    left, top, width, height = area
    pen.text((left + LEFT, top + 18), chart.title, 14, INK)
    inner = (left + LEFT, top + TOP, width - LEFT - RIGHT, height - TOP - BOTTOM)
    if not any(line.points for line in chart.lines):
        pen.text((left + LEFT, top + TOP + 20), "nothing was measured", 12, GREY)
        return
    x_scale, y_scale = _scales(chart, inner)
    _draw_axes(pen, inner, chart, x_scale, y_scale)
    for line in chart.lines:
        _draw_line(pen, line, x_scale, y_scale)
    if chart.legend:
        _draw_legend(pen, inner, chart, x_scale, y_scale)


def _scales(chart: Chart, inner: Area) -> tuple[_Scale, _Scale]:
    left, top, width, height = inner
    xs = [x for line in chart.lines for x, _ in line.points] + [x for x, _ in chart.marks]
    ys = [y for line in chart.lines for _, y in line.points]
    ys += [high for line in chart.lines for _, high in line.spread]
    x_ends, y_ends = _ends(chart.x, xs), _ends(chart.y, ys)
    return (
        _Scale(*x_ends, left, left + width, chart.x.is_log),
        _Scale(*y_ends, top + height, top, chart.y.is_log),
    )


def _ends(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    high = max([*values, axis.high or 0.0, *(axis.ticks or ())])
    if axis.is_log:
        low = min(values)
        return low / 1.12, high * 1.12
    return 0.0, high * 1.06 if high > 0 else 1.0


def round_ticks(high: float, num: int = 5) -> list[float]:
    """About `num` round numbers from 0 to `high`."""
    step = 10 ** math.floor(math.log10(high / num))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if high / (step * m) <= num)
    return [i * step for i in range(math.floor(high / step * (1 + 1e-9)) + 1)]


def _draw_axes(pen: Pen, inner: Area, chart: Chart, x_scale: _Scale, y_scale: _Scale) -> None:
    left, top, width, height = inner
    for tick in chart.y.ticks or round_ticks(y_scale.high):
        y = y_scale.at(tick)
        pen.line([(left, y), (left + width, y)], GRID)
        pen.text((left - 8, y + 4), f"{tick:g}", 11, GREY, "end")
    for tick in chart.x.ticks or round_ticks(x_scale.high):
        x = x_scale.at(tick)
        pen.line([(x, top + height), (x, top + height + 4)], GREY)
        pen.text((x, top + height + 17), f"{tick:g}", 11, GREY, "middle")
    for place, text in chart.marks:
        x = x_scale.at(place)
        pen.line([(x, top), (x, top + height)], "#b8c2cc", dash=True)
        pen.text((x + 4, top + 10), text, 10, GREY)
    pen.line([(left, top + height), (left + width, top + height)], GREY)
    pen.text((left + width / 2, top + height + 36), chart.x.label, 12, GREY, "middle")
    pen.text((left + width, top - 8), chart.y.label, 11, GREY, "end")


def _draw_line(pen: Pen, line: Line, x_scale: _Scale, y_scale: _Scale) -> None:
    places = [(x_scale.at(x), y_scale.at(y)) for x, y in line.points]
    for (x, _), (low, high) in zip(places, line.spread, strict=False):
        pen.line([(x, y_scale.at(low)), (x, y_scale.at(high))], line.colour, 1.0)
    path = places
    if line.step:
        path = [p for a, b in itertools.pairwise(places) for p in (a, (b[0], a[1]))] + places[-1:]
    if len(path) > 1:
        pen.line(path, line.colour, line.width, line.dash)
    if line.dots:
        notes = [*line.notes, *[""] * len(places)]
        for place, note in zip(places, notes, strict=False):
            pen.dot(place, 3.2, line.colour, note)


def _draw_legend(pen: Pen, inner: Area, chart: Chart, x_scale: _Scale, y_scale: _Scale) -> None:
    """In the corner of the plot that has the fewest points in it, below the names of marks."""
    left, top, width, height = inner
    below = top + (18 if chart.marks else 4)
    lines = list({line.name: line for line in chart.lines if line.points}.values())
    box_width = 34 + 6.6 * max(len(line.name) for line in lines)
    box_height = LEGEND_LINE * len(lines) + 6
    points = [point for line in chart.lines for point in line.points]
    for line in chart.lines:
        points += [(x, y) for (x, _), ends in zip(line.points, line.spread, strict=False) for y in ends]
    places = [(x_scale.at(x), y_scale.at(y)) for x, y in points]

    def crowd(corner: Point) -> int:
        return sum(
            corner[0] - 8 <= x <= corner[0] + box_width + 8
            and corner[1] - 8 <= y <= corner[1] + box_height + 8
            for x, y in places
        )

    corners = [
        (x, y)
        for y in (below, top + height - box_height - 4)
        for x in (left + 8, left + width - box_width - 4)
    ]
    x, y = min(corners, key=crowd)
    pen.box((x, y), (box_width, box_height), "#ffffff")
    for i, line in enumerate(lines):
        middle = y + 12 + i * LEGEND_LINE
        pen.line([(x + 4, middle), (x + 22, middle)], line.colour, line.width, line.dash)
        pen.text((x + 28, middle + 4), line.name, 11, INK)
