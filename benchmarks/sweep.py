"""Whether choosing the depth beats every fixed one: `paceline sweep` against the bars.

    python benchmarks/sweep.py [--temperature 0] [--concurrency 1,2,4,8,16] [further flags of the sweep]
    python benchmarks/sweep.py --mix [flags of the sweep]
    python benchmarks/sweep.py [--mix] --from paceline-sweep/sweep.json

Runs the command as a user would, on the yardstick prompts, arms interleaved, and writes its verdict beside
the bars: the best arm of each load is chosen on the first pass and scored on the second. With --mix the
prompts are those of `data/mix.jsonl`, half of the requests easy to draft and half hopeless, at all times.
Prompts come from the prefix cache in all arms: what is compared is decoding.

A load measured again replaces its row and leaves the others, so a long sweep may be run in pieces, one
temperature or one concurrency at a time. Ctrl-C and SIGTERM keep the loads that have a verdict. What was not
measured, or with fewer pairs than a bar asks for, stays null.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from common import FOLDER, Bar, Results, Row

CONCURRENCY, TEMPERATURES = (1, 2, 4, 8, 16), (0.0, 0.8)
MIX, MIX_CONCURRENCY, MIX_BAR = FOLDER / "data" / "mix.jsonl", (2, 4), 4
MIN_PAIRS = 5  # behind a ratio that is held against a bar
ARMS = {"--arms": "plain,1,2,3,auto", "--answer-len": "96", "--turn-seconds": "0.25"}
FLAGS = {
    **ARMS,
    "--natural-stop": "",
    "--warm-prompts": "",
    "--min-tokens": "512",
    "--concurrency": "1,2,4,8,16",
    "--temperature": "0,0.8",
}
# Answers of fixed lengths, and more of them: where easy ones are fast, a round ends when they have run out.
MIX_FLAGS = {
    **ARMS,
    "--warm-prompts": "",
    "--prompts": str(MIX),
    "--min-tokens": "1536",
    "--concurrency": "2,4",
}


def main() -> None:
    """Measure, or read what was measured, and write results/sweep.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mix", action="store_true", help="easy and hopeless requests instead")
    parser.add_argument("--from", dest="source", type=Path, help="a sweep's JSON instead of a new one")
    args, flags = parser.parse_known_args()
    if any(flag.partition("=")[0] == "--out" for flag in flags):
        parser.error("--out: the report goes to results; `paceline sweep --out DIR`, then --from, keeps it")
    code = 0
    if args.source is not None:
        document = json.loads(args.source.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            code = _sweep([*with_defaults(flags, MIX_FLAGS if args.mix else FLAGS), "--out", folder])
            path = Path(folder) / "sweep.json"
            if not path.is_file():
                raise SystemExit(code or "the sweep left no report")
            document = json.loads(path.read_text())
    results = Results("sweep", ("torch", "numpy", "numba"), command=_command(document["command"]))
    if not merge(results, document, is_mix=args.mix):
        print("no load has a verdict of enough pairs to replace its row: the results stay as they are")
        raise SystemExit(code)
    rows = {part: row for part in _parts() if (row := results.row(part)) is not None}
    results.write(_parts(), _bars(rows), _table(rows))
    raise SystemExit(code)


def with_defaults(flags: Sequence[str], defaults: Mapping[str, str]) -> list[str]:
    """The flags, after those defaults that are not among them."""
    given = {flag.partition("=")[0] for flag in flags}
    kept = [word for flag, value in defaults.items() if flag not in given for word in (flag, value) if word]
    return [*kept, *flags]


def _sweep(flags: Sequence[str]) -> int:
    """Run the command; it is told to end, once, when this program is. Returns its exit code."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    command = [sys.executable, "-m", "paceline", "sweep", *flags]
    with subprocess.Popen(command, start_new_session=True) as process:  # Ctrl-C comes here alone
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            return process.wait()


def merge(results: Results, document: dict[str, Any], is_mix: bool) -> int:
    """Put every load of a sweep that has a verdict in its row; returns how many rows are new.

    A row of fewer pairs than a bar asks for, as an interrupted sweep leaves, replaces none that has them.
    """
    loads = [_part(t, c) for t in TEMPERATURES for c in CONCURRENCY]
    if is_mix:
        loads = [_mix_part(c) for c in MIX_CONCURRENCY]
    num_new = 0
    for column in _columns(document["summary"]):
        part = (
            _mix_part(column["concurrency"])
            if is_mix
            else _part(column["temperature"], column["concurrency"])
        )
        row, earlier = _row(document, column), results.row(part)
        if part not in loads or column["context_len"] is not None or row is None:
            continue
        if earlier is None or _num_pairs(row) >= min(MIN_PAIRS, _num_pairs(earlier)):
            results.put(part, row)
            num_new += 1
    return num_new


def _columns(summary: dict[str, Any]) -> list[dict[str, Any]]:
    columns: list[dict[str, Any]] = []
    for cell in summary["cells"]:
        if cell["column"] not in columns:
            columns.append(cell["column"])
    return columns


def _num_pairs(row: Row) -> int:
    return int(row["auto_to_best"]["num"])


def _command(words: str) -> str:
    """Without the folder of the report; the mix by its place in the repository."""
    kept = [str(MIX.relative_to(FOLDER.parent)) if word == MIX.name else word for word in shlex.split(words)]
    if "--out" in kept:
        at = kept.index("--out")
        del kept[at : at + 2]
    return shlex.join(kept)


def _part(temperature: float, concurrency: int) -> str:
    return f"{concurrency} at {temperature:g}"


def _mix_part(concurrency: int) -> str:
    return f"{concurrency}, easy and hopeless"


def _parts() -> list[str]:
    steady = [_part(t, c) for t in TEMPERATURES for c in CONCURRENCY]
    return steady + [_mix_part(c) for c in MIX_CONCURRENCY]


def _row(document: dict[str, Any], column: dict[str, Any]) -> Row | None:
    """A load's row; None without a verdict."""
    summary = document["summary"]
    cells = {cell["arm"]: cell for cell in summary["cells"] if cell["column"] == column}
    mine = [v for v in summary["verdicts"] if v["column"] == column and v["arm"] == "auto"]
    if not mine:
        return None
    [verdict] = mine
    return {
        "work": document["work"],
        "best": verdict["best"],
        "auto_to_best": verdict["ratio"],
        "auto_to_plain": cells["auto"]["to_plain"],
        "mean_depth": cells["auto"]["mean_depth"],
        "tokens_per_second": {arm: cell["rate"]["median"] for arm, cell in cells.items()},
    }


def _bars(rows: dict[str, Row]) -> list[Bar]:
    def ratio(part: str, over: str = "auto_to_best") -> float | None:
        found = rows.get(part, {}).get(over)
        return found["estimate"] if found is not None and found["num"] >= MIN_PAIRS else None

    steady = {part: ratio(part) for t in TEMPERATURES for c in CONCURRENCY for part in [_part(t, c)]}
    bars = [Bar(f"auto / best other, requests {part}", of, ">=", 0.98) for part, of in steady.items()]
    known = [of for of in steady.values() if of is not None]
    mean = statistics.fmean(known) if len(known) == len(steady) else None
    return [
        *bars,
        Bar("auto / best other, mean over all loads", mean, ">=", 0.99),
        Bar(f"auto / best other, requests {_mix_part(MIX_BAR)}", ratio(_mix_part(MIX_BAR)), ">=", 1.03),
        Bar("auto / plain, 1 request, greedy", ratio(_part(0.0, 1), "auto_to_plain"), ">=", 1.15),
    ]


def _table(rows: dict[str, Row]) -> str:
    lines = [
        "",
        "| requests | tokens/s by arm | best other, first pass | auto over it (95 %) | over plain |",
        "|---|---|---|---|---|",
    ]
    for part, row in rows.items():
        rates = ", ".join(f"{arm} {rate:.0f}" for arm, rate in row["tokens_per_second"].items())
        best, plain = row["auto_to_best"], row["auto_to_plain"]
        interval = "one pair"
        if best["num"] > 1:
            interval = f"{best['low']:.3f}–{best['high']:.3f}; {best['num']} pairs"
        gain = "" if plain is None else f"{plain['estimate']:.3f}"
        lines.append(f"| {part} | {rates} | {row['best']} | {best['estimate']:.3f} ({interval}) | {gain} |")
    lines.append("")
    lines += [
        f"- {bar.name}: {'not measured' if bar.value is None else f'{bar.value:.3f}'} ({bar.show()})"
        for bar in _bars(rows)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
