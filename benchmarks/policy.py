"""What the governor costs: microseconds for a decision, and for learning from a round.

The rounds are made up (a model as costly as an 8B on one GPU; acceptance of three kinds), the policy is the
real one, on one core. A *decision* is timed as the loop sees it: most reuse an earlier choice, and every
sixteenth, or fewer, chooses anew, and first learns from the rounds that are left to learn from. *Choosing
anew* is the same with `reuse` 1. In *churn*, a request ends and another comes in every step.

    python benchmarks/policy.py [--rounds 1500] [--rows N ...] [--dry]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

from common import Bar, Results, Row
from paceline.policy import CostModel, Curve, Governor, GovernorConfig, Load, Observation, RowView

ROWS = (1, 16, 64, 256)
BAR = 100.0  # microseconds at 256 rows
MS = 1e-3
COSTS = CostModel(
    tokens=Curve(
        [
            (n, t * MS)
            for n, t in ((1, 8.5), (64, 9.5), (128, 10.5), (256, 13), (512, 22), (1024, 42), (2048, 82))
        ],
        stairs=[1, 2, 4, *range(8, 257, 8)],
    ),
    drafts={"": (Curve([(1, 0.4 * MS), (256, 1.2 * MS)]),) * 4},
    context_seconds=2e-9,
)
CHANCES = {"alike": (0.6,), "mixed": (0.9, 0.6, 0.05), "churn": (0.9, 0.6, 0.05), "hopeless": (0.05,)}


def accepted(draw: random.Random, chance: float, depth: int) -> int:
    """Drafts that a row accepts."""
    num = 0
    while num < depth and draw.random() < chance:
        num += 1
    return num


def measure(kind: str, num_rows: int, num_rounds: int, reuse: int) -> Row:
    """Rounds of one kind of load; the first third is not counted."""
    draw, chances = random.Random(1), CHANCES[kind]
    governor = Governor(COSTS, config=GovernorConfig(reuse=reuse))
    keys = list(range(num_rows))
    views = [RowView(key, 4) for key in keys]
    rows = tuple(views)
    decide_times, observe_times = [], []
    for i in range(num_rounds):
        if kind == "churn":
            views[i % num_rows] = RowView(num_rows + i, 4)
            rows = tuple(views)
        load = Load(num_rows, (200 + i) * num_rows)
        begin = time.perf_counter()
        decision = governor.decide(load, rows)
        decided = time.perf_counter()
        num = tuple(
            accepted(draw, chances[view.key % len(chances)], depth)  # type: ignore[operator]
            for view, depth in zip(rows, decision.depths, strict=True)
        )
        seconds = COSTS.step_seconds(load, [("", depth) for depth in decision.depths]) * draw.gauss(1, 0.03)
        observation = Observation(decision, num, seconds)
        observing = time.perf_counter()
        governor.observe(observation)
        observe_times.append(1e6 * (time.perf_counter() - observing))
        decide_times.append(1e6 * (decided - begin))
    skip = num_rounds // 3
    return {
        "kind": kind,
        "rows": num_rows,
        "reuse": reuse,
        "decide_us": summary(decide_times[skip:]),
        "observe_us": summary(observe_times[skip:]),
    }


def summary(times: list[float]) -> dict[str, float]:
    """Mean, median and the 99th percentile."""
    listed = sorted(times)
    return {
        "mean": round(statistics.fmean(listed), 1),
        "p50": round(statistics.median(listed), 1),
        "p99": round(listed[int(0.99 * (len(listed) - 1))], 1),
    }


def part_name(kind: str, num_rows: int, reuse: int) -> str:
    """As the rows of the results are called."""
    return f"{kind}, {num_rows} rows" + (", choosing anew" if reuse == 1 else "")


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--dry", action="store_true", help="write no results")
    args = parser.parse_args()
    results = Results("policy", [])
    gc.disable()  # as in a loop that collects between steps
    parts = []
    for num_rows in args.rows:
        for kind in CHANCES:
            for reuse in (GovernorConfig().reuse, 1):
                parts.append(part_name(kind, num_rows, reuse))
                row = measure(kind, num_rows, args.rounds, reuse)
                results.put(parts[-1], row)
                print(json.dumps(row))
                gc.collect()
    if not args.dry:
        results.write(parts, bars(results), table(results, parts))


def bars(results: Results) -> list[Bar]:
    """Whether a decision at 256 rows takes less than was asked for, whatever the load, learning included."""
    bars = []
    for kind in CHANCES:
        row = results.row(part_name(kind, ROWS[-1], GovernorConfig().reuse))
        mean = None if row is None else round(row["decide_us"]["mean"] + row["observe_us"]["mean"], 1)
        name = f"{kind}: mean microseconds for a decision and learning from its round at {ROWS[-1]} rows"
        bars.append(Bar(name, mean, "<=", BAR))
    return bars


def table(results: Results, parts: list[str]) -> str:
    """For people."""
    lines = [
        "| load | decision, us: mean | p50 | p99 | learning from a round, us: mean | p50 | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in parts:
        row = results.row(part)
        if row is not None:
            cells = [
                row[name][what] for name in ("decide_us", "observe_us") for what in ("mean", "p50", "p99")
            ]
            lines.append(f"| {part} | {' | '.join(map(str, cells))} |")
    lines += ["", *(f"- {bar.name}: {bar.value} {bar.show()}" for bar in bars(results)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
