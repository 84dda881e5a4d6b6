"""Speculation in numbers: off is free, back on is warm, where it pays and where it stops paying.

    python benchmarks/speculation.py                     # everything; about 12 minutes on two cores
    python benchmarks/speculation.py --part pays warm    # these parts; the others' rows stay
    python benchmarks/speculation.py --quick             # does it run? short, and nothing is written

The default model with its shipped head, on the CPU, prompts of the yardstick (data/prompts.jsonl). Nothing
else should run meanwhile, but for the parts warm and acceptance, which time nothing. Writes
`results/speculation.json` and the tables beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import speculation_report
from common import Results, Row
from speculation_accept import measure_acceptance
from speculation_off import measure_shares, measure_steps
from speculation_report import OFF_LOADS, ORDER, TEMPERATURES
from speculation_runs import Bench
from speculation_speed import measure_crossover, measure_pays
from speculation_warm import Warmth

NAME = "speculation"
PACKAGES = ("torch", "numpy", "numba")
PARTS = ("off", "warm", "pays", "crossover", "acceptance")


def measurements(
    part: str, bench: Bench, args: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Row]]]:
    """The rows of a part, each with what makes it."""
    if part == "off":
        yield "off-shares", partial(measure_shares, bench)
        for load in OFF_LOADS:
            yield f"off-{load}", partial(measure_steps, bench, load)
    elif part == "warm":
        warmth = Warmth(bench)
        for num in warmth.num_steps:
            yield f"warm-{num}", partial(warmth.measure, num, is_settled=True)
            yield f"unsettled-{num}", partial(warmth.measure, num, is_settled=False)
    elif part == "pays":
        for name, temperature in TEMPERATURES.items():
            yield (
                f"pays-{name}",
                partial(measure_pays, bench, temperature, 1 if bench.quick else args.prompts),
            )
    elif part == "crossover":
        for name, temperature in TEMPERATURES.items():
            yield (
                f"crossover-{name}",
                partial(measure_crossover, bench, temperature, 1 if bench.quick else args.rounds),
            )
    else:
        yield "acceptance", partial(measure_acceptance, bench, 1 if bench.quick else 5)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="these parts (default: all)")
    parser.add_argument(
        "--prompts", type=int, default=12, metavar="N", help="pays: prompts of each category (default: 12)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="crossover: rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a few short runs; writes nothing")
    args = parser.parse_args(argv)
    if not 1 <= args.prompts <= 80:
        parser.error(f"--prompts must be in [1, 80], got {args.prompts}")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, print the tables, and write them unless `--quick`."""
    args = parse(argv)
    bench = Bench(args.quick)
    results = Results(NAME, PACKAGES, is_fresh=args.quick)
    for part in args.part:
        began = time.perf_counter()
        for name, measure in measurements(part, bench, args):
            print(f"{name} …", file=sys.stderr, flush=True)
            results.put(name, measure())
            if not args.quick:
                results.write(ORDER, speculation_report.bars(results), speculation_report.text(results))
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(results.heading() + speculation_report.text(results))


if __name__ == "__main__":
    main()
