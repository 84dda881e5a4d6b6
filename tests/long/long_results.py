"""The last figures of the long tests in benchmarks/results, and the bars they are held to."""

from __future__ import annotations

from typing import Any

from common import Bar, Results, Row

PACKAGES = ("uvicorn", "uvloop", "httptools", "schemathesis")
BARS: tuple[tuple[str, str, str, Any, float], ...] = (  # part, figure, what it is, relation, bar
    ("schemathesis", "num_requests", "requests made by schemathesis", ">=", 2000),
    ("schemathesis", "num_server_errors", "5xx among them", "==", 0),
    ("hard closes", "num_closed", "connections reset in mid-stream, all pages back", ">=", 200),
    ("leaving a stream", "median_tokens_after", "tokens made after a stream's client left, median", "<=", 2),
    ("leaving an answer", "median_tokens_after", "the same, for a whole answer's client", "<=", 2),
    ("engine kills, streams", "num_kills", "engines killed under streams, pages proved after", ">=", 10),
    ("engine kills, streams", "num_unanswered", "streams without an end or an error", "==", 0),
    ("engine kills, whole answers", "num_kills", "engines killed under whole answers, the same", ">=", 10),
    ("engine kills, whole answers", "num_unanswered", "requests without an answer or a 503", "==", 0),
    ("three pages", "num_requests", "requests at once on a pool of three pages, all complete", ">=", 50),
    ("memory", "num_requests", "short requests", ">=", 5000),
    ("memory", "server_bytes_per_request", "growth of the server, bytes a request", "<", 500),
    ("memory", "engine_bytes_per_request", "growth of the engine, bytes a request", "<", 500),
    ("queue and drain", "num_refused", "requests refused by a full queue", ">=", 50),
    ("queue and drain", "exit_code", "exit code after SIGTERM, every answer complete", "==", 0),
)
PARTS = tuple(dict.fromkeys(part for part, *_ in BARS))


def keep(part: str, figures: dict[str, Any]) -> None:
    """Write a part's figures in the place of its earlier ones."""
    results = Results("long", PACKAGES, command="make test-long")
    results.put(part, figures)
    bars = [Bar(what, (results.row(p) or {}).get(figure), op, bar) for p, figure, what, op, bar in BARS]
    rows = [row for p in PARTS if (row := results.row(p)) is not None]
    results.write(PARTS, bars, _bar_table(bars) + "".join(map(_figures, rows)))


def _bar_table(bars: list[Bar]) -> str:
    lines = [
        f"| {bar.name} | {'' if bar.value is None else f'{bar.value:g}'} | {bar.show()} |\n" for bar in bars
    ]
    return "| | measured | asked for |\n|---|---|---|\n" + "".join(lines) + "\n"


def _figures(row: Row) -> str:
    known = ("part", "date", "command")
    figures = ", ".join(f"{name} {value}" for name, value in row.items() if name not in known)
    return f"- {row['part']} ({row['date']}): {figures}\n"
