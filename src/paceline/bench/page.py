"""A report as files: one HTML page that needs nothing else, and the pictures as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.bench import report as reports
from paceline.bench.charts import Chart, draw
from paceline.bench.figures import sweep_charts
from paceline.bench.pens import PngPen, SvgPen
from paceline.bench.report import About, Report, Table

WIDTH, HEIGHT = 560, 360  # of a chart

_STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; color: #1f2933;
  background: #f5f7fa; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p.about { color: #616e7c; margin: .2rem 0 1rem } ul { padding-left: 1.2rem }
figure { margin: 0; background: #fff; border-radius: 8px; padding: 8px; box-shadow: 0 1px 3px #0002 }
figure svg { width: 100%; height: auto; display: block }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 16px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; background: #fff; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #e4e7eb; white-space: nowrap }
th { font-weight: 600 } code { background: #e4e7eb; padding: 0 .3em; border-radius: 3px }
.failed { color: #b42318 }
"""


def to_html(report: Report) -> str:
    """The page of a sweep."""
    parts = []
    lines = reports.verdict_lines(report)
    if lines:
        parts += [
            f"<h2>{escape(reports.VERDICT)}</h2>",
            _list(lines),
            _html_table(reports.verdict_table(report)),
        ]
    if report.summary.crossovers:
        parts += ["<h2>Where depths stop paying</h2>", _list(reports.crossover_lines(report))]
    events = [*reports.failure_lines(report.failures), *reports.preemption_lines(report.summary.cells)]
    parts += notes(events, report.is_complete)
    for temperature, context_len in reports.groups(report):
        title = reports.group_title(temperature, context_len)
        charts = sweep_charts(report, temperature, context_len)
        parts += [f"<h2>{escape(title[0].upper() + title[1:])}</h2>", figures(charts)]
        against = report.summary.reference
        heading = "tok/s" if against is None else f"tok/s, and against {against}"
        parts += [
            f"<h2>{escape(heading)}</h2>",
            _html_table(reports.rate_table(report, temperature, context_len)),
        ]
        parts += [
            "<h2>Milliseconds a token of one request: median over rounds (least–greatest)</h2>",
            _html_table(reports.tpot_table(report, temperature, context_len)),
        ]
    return document(report.about, "Paceline sweep", parts)


def notes(lines: Sequence[str], is_complete: bool) -> list[str]:
    """What did not go as planned; nothing if all did."""
    listed = [*lines, *([] if is_complete else [reports.INTERRUPTED])]
    return ["<h2>Not as planned</h2>", _list(listed, "failed")] if listed else []


def document(about: About, title: str, parts: Sequence[str]) -> str:
    """A whole page around these parts."""
    facts = reports.show_device(about.device)
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in about.settings.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}: {escape(about.model)}</h1>"
        f'<p class="about">draft {escape(about.draft)} · {escape(about.work)} · {escape(facts)} · paceline '
        f"{escape(about.version)} · {escape(about.date)}<br><code>{escape(about.command)}</code><br>"
        f"{escape(settings)}</p>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def figures(charts: Sequence[Chart]) -> str:
    """Charts side by side."""
    drawn = []
    for chart in charts:
        pen = SvgPen(WIDTH, HEIGHT)
        draw(pen, (0, 0, WIDTH, HEIGHT), chart)
        drawn.append(f"<figure>{pen.to_svg()}</figure>")
    return f'<div class="figures">{"".join(drawn)}</div>'


def to_png(report: Report) -> bytes:
    """The first two pictures of the first temperature and context, beside each other.

    Raises:
        PacelineError: Pillow is not installed.
    """
    [group, *_] = reports.groups(report)
    return row_png(sweep_charts(report, *group)[:2])


def row_png(charts: Sequence[Chart]) -> bytes:
    """Charts beside each other, as PNG.

    Raises:
        PacelineError: Pillow is not installed.
    """
    pen = PngPen(WIDTH * len(charts), HEIGHT)
    for i, chart in enumerate(charts):
        draw(pen, (i * WIDTH, 0, WIDTH, HEIGHT), chart)
    return pen.to_png()


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table[1:]
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _list(lines: Sequence[str], name: str = "") -> str:
    attribute = f' class="{name}"' if name else ""
    return f"<ul{attribute}>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
