"""Whether choosing the depth beats every fixed one: `paceline sweep` against the bars.

    python benchmarks/sweep.py [--temperature 0] [--concurrency 1,2,4,8,16] [further flags of the sweep]
    python benchmarks/sweep.py --from paceline-sweep/sweep.json

Runs the command as a user would, on the yardstick prompts, arms interleaved, and writes its verdict beside
the bars: the best arm of each load is chosen on the first pass and scored on the second. What was not
measured stays null.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import Bar, Results, Row

CONCURRENCY, TEMPERATURES = (1, 2, 4, 8, 16), (0.0, 0.8)
FLAGS = ["--arms", "plain,1,2,3,auto", "--answer-len", "96"]


def main() -> None:
    """Measure, or read what was measured, and write results/sweep.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, help="a sweep's JSON instead of a new one")
    args, flags = parser.parse_known_args()
    if args.source is not None:
        document = json.loads(args.source.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "paceline", "sweep", *FLAGS, *flags, "--out", folder]
            subprocess.run(command, check=True)
            document = json.loads((Path(folder) / "sweep.json").read_text())
    results = Results("sweep", ("torch", "numpy", "numba"), command=_command(document["command"]))
    for temperature in TEMPERATURES:
        for concurrency in CONCURRENCY:
            row = _row(document["summary"], temperature, concurrency)
            if row is not None:
                results.put(_part(temperature, concurrency), row)
    rows = {part: row for part in _parts() if (row := results.row(part)) is not None}
    results.write(_parts(), _bars(rows), _table(rows))


def _command(words: str) -> str:
    """Without the folder of the report."""
    kept = shlex.split(words)
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return shlex.join(kept)


def _part(temperature: float, concurrency: int) -> str:
    return f"{concurrency} at {temperature:g}"


def _parts() -> list[str]:
    return [_part(t, c) for t in TEMPERATURES for c in CONCURRENCY]


def _row(summary: dict[str, Any], temperature: float, concurrency: int) -> Row | None:
    def here(entry: dict[str, Any]) -> bool:
        column = entry["column"]
        return bool(
            column["temperature"] == temperature
            and column["concurrency"] == concurrency
            and column["context_len"] is None
        )

    cells = {cell["arm"]: cell for cell in summary["cells"] if here(cell)}
    verdict = next((v for v in summary["verdicts"] if here(v) and v["arm"] == "auto"), None)
    if verdict is None:
        return None
    return {
        "best": verdict["best"],
        "auto_to_best": verdict["ratio"],
        "auto_to_plain": cells["auto"]["to_plain"],
        "mean_depth": cells["auto"]["mean_depth"],
        "tokens_per_second": {arm: cell["rate"]["median"] for arm, cell in cells.items()},
    }


def _bars(rows: dict[str, Row]) -> list[Bar]:
    ratios = {part: row["auto_to_best"]["estimate"] for part, row in rows.items()}
    bars = [Bar(f"auto / best other, requests {part}", ratios.get(part), ">=", 0.98) for part in _parts()]
    complete = len(ratios) == len(_parts())
    bars.append(
        Bar(
            "auto / best other, mean over all loads",
            statistics.fmean(ratios.values()) if complete else None,
            ">=",
            0.99,
        )
    )
    bars.append(Bar("auto / best other, easy and hopeless requests mixed", None, ">=", 1.03))
    one = rows.get(_part(0.0, 1))
    gain = None if one is None else one["auto_to_plain"]["estimate"]
    bars.append(Bar("auto / plain, 1 request, greedy", gain, ">=", 1.15))
    return bars


def _table(rows: dict[str, Row]) -> str:
    lines = [
        "",
        "| requests | tokens/s by arm | best other, first pass | auto over it (95 %) | over plain |",
        "|---|---|---|---|---|",
    ]
    for part, row in rows.items():
        rates = ", ".join(f"{arm} {rate:.0f}" for arm, rate in row["tokens_per_second"].items())
        best, plain = row["auto_to_best"], row["auto_to_plain"]
        interval = f"{best['low']:.3f}–{best['high']:.3f}; {best['num']} pairs"
        lines.append(
            f"| {part} | {rates} | {row['best']} | {best['estimate']:.3f} ({interval}) "
            f"| {plain['estimate']:.3f} |"
        )
    lines.append("")
    lines += [
        f"- {bar.name}: {'not measured' if bar.value is None else f'{bar.value:.3f}'} ({bar.show()})"
        for bar in _bars(rows)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
