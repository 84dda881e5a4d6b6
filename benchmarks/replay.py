"""Policies on the recorded traces in `data/traces`: tokens a second, and regret against the best fixed depth.

Nothing is measured here: what drafts would have done was recorded, and a step takes what the trace's cost
model says, so every machine gets the same numbers. Warm-up, shadow drafts and controls are in the
governor's time.

    python benchmarks/replay.py [--dry]
"""

from __future__ import annotations

import argparse
import json

from common import FOLDER, Bar, Results, Row
from paceline.cli_replay import replay_file, to_json

TRACES = {
    "low": "steady, one or two requests",
    "high": "steady, 24 requests",
    "steps": "1, then 16, then 1 request",
}
POLICIES = {
    "governor": "the governor",
    "ema": "SGLang's rule",
    "table:4=3,16=1": "a table by batch size",
    "table:1=2,2=1": "the same, written in hindsight",
    "threshold:8:2": "depth 2 up to 8 requests",
}
BAR = 0.03  # regret of the governor


def measure(name: str) -> Row:
    """All policies on one trace."""
    replayed = replay_file(FOLDER / "data" / "traces" / f"{name}.jsonl", list(POLICIES))
    return {"load": TRACES[name], "requests": len(replayed.trace.requests), **to_json(replayed)}


def main() -> None:
    """Replay, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="write no results")
    args = parser.parse_args()
    results = Results("replay", [], is_fresh=True)
    for name in TRACES:
        row = measure(name)
        results.put(name, row)
        print(json.dumps(row))
    if not args.dry:
        results.write(list(TRACES), bars(results), table(results))


def bars(results: Results) -> list[Bar]:
    """Whether the governor loses little against the best fixed depth in hindsight."""
    found = []
    for name, load in TRACES.items():
        row = results.row(name)
        regret = None if row is None else row["policies"]["governor"]["regret"]
        found.append(Bar(f"{load}: regret of the governor", regret, "<=", BAR))
    return found


def table(results: Results) -> str:
    """For people."""
    rows = {name: results.row(name) for name in TRACES}
    known = {name: row for name, row in rows.items() if row is not None}
    lines = [
        "Tokens a second, and the share lost against the best fixed depth in hindsight (below 0: gained).",
        "",
        f"| | {' | '.join(TRACES[name] for name in known)} |",
        "|---|" + "---|" * len(known),
    ]
    best = [f"**{row['fixed'][str(row['best_depth'])]['tokens_per_second']:.0f}** (depth {row['best_depth']})"
            for row in known.values()]  # fmt: skip
    lines.append(f"| the best fixed depth | {' | '.join(best)} |")
    for spec, words in POLICIES.items():
        shown = [row["policies"][spec] for row in known.values()]
        cells = [f"{of['tokens_per_second']:.0f} ({100 * of['regret']:+.1f} %)" for of in shown]
        lines.append(f"| {words}, `{spec}` | {' | '.join(cells)} |")
    depths = next(iter(known.values()))["fixed"]
    for depth in depths:
        shown = [row["fixed"][depth] for row in known.values()]
        cells = [f"{of['tokens_per_second']:.0f} ({100 * of['regret']:+.1f} %)" for of in shown]
        lines.append(f"| `fixed:{depth}` | {' | '.join(cells)} |")
    lines += ["", *(f"- {bar.name}: {bar.value} {bar.show()}" for bar in bars(results)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
