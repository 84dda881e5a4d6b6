"""`paceline calibrate`: what steps and drafts cost on this machine, and which depth that makes best."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline import logs
from paceline.cli_flags import Parser, add_flags, help_of
from paceline.cli_settings import load
from paceline.config import EngineConfig
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.policy import CostModel
    from paceline.worker.calibrated import Calibrated

EXAMPLES = """\
examples:
  paceline calibrate
  paceline calibrate Qwen/Qwen2.5-0.5B-Instruct --draft ngram --max-num-seqs 16
  paceline calibrate --force --json
"""
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
CONTEXT_LEN = 256  # of each request, where depths are compared
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256, 512)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Flags that change nothing here.
_NOT_ITS_OWN = {"model", "depth", "policy", "calibration", "trace", "trace_max_bytes"}


def add_calibrate_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `calibrate` to the command line."""
    calibrate = commands.add_parser(
        "calibrate",
        help="time a model and its drafter, or show what is known",
        description="Time a model and its drafter, as a server with these flags does at its first start, or\n"
        "show what is known from then.",
        epilog=EXAMPLES,
    )
    calibrate.set_defaults(run=_calibrate, parser=calibrate)
    model = EngineConfig.__dataclass_fields__["model"]
    calibrate.add_argument(
        "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help_of(model)
    )
    calibrate.add_argument("--config", metavar="FILE", help="a YAML file of engine settings")
    calibrate.add_argument("--force", action="store_true", help="measure again, whatever is known")
    calibrate.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(calibrate, EngineConfig, but=_NOT_ITS_OWN)


def _calibrate(args: argparse.Namespace) -> None:
    from paceline.draft.load import NONE, resolve_draft
    from paceline.engine.policies import auto_depths
    from paceline.worker.build import build_worker
    from paceline.worker.calibrated import calibrate

    config = load(args, os.environ).engine
    logs.configure("warning")
    draft = resolve_draft(config.draft, config.model, config.draft_revision)
    if draft == NONE or config.max_depth == 0:
        raise ConfigError(f"nothing can be drafted: draft is {draft}, max_depth {config.max_depth}")
    progress = sys.stderr.isatty()
    worker, info = build_worker(config, progress=progress)
    depths = auto_depths(info.max_depth)
    found = calibrate(worker, info, config, depths[-1], progress=progress, force=args.force)
    rows = [num for num in _ROWS if num <= config.max_num_seqs]
    print(json.dumps(_data(found, rows, depths)) if args.json else _text(found, rows, depths))


def best_depth(costs: CostModel, num_rows: int, acceptance: float, depths: Sequence[int]) -> int:
    """The depth that makes most tokens a second for so many requests if every draft that is reached is right
    with the same probability.
    """
    from paceline.policy import Load

    load = Load(num_rows, num_rows * CONTEXT_LEN)

    def rate(depth: int) -> float:
        tokens = num_rows * sum(acceptance**j for j in range(depth + 1))
        return tokens / costs.step_seconds(load, [("", depth)] * num_rows)

    return max(depths, key=rate)


def _data(found: Calibrated, rows: Sequence[int], depths: Sequence[int]) -> dict[str, Any]:
    return {
        "measured_on": dict(found.measured_on),
        "seconds": found.seconds,
        "spread": found.spread,
        "path": str(found.path),
        "costs": found.costs.to_dict(),
        "best_depth": [
            {"acceptance": a, "num_requests": num, "depth": best_depth(found.costs, num, a, depths)}
            for a in ACCEPTANCES
            for num in rows
        ],
    }


def _text(found: Calibrated, rows: Sequence[int], depths: Sequence[int]) -> str:
    costs, on = found.costs, found.measured_on
    largest = costs.tokens.points[-1][0]
    sizes = [num for num in _TOKENS if num <= largest]
    drafts = [
        [str(num), *(f"{1e3 * costs.draft_seconds([num] * depth):.2f}" for depth in depths[1:])]
        for num in rows
    ]
    best = [[f"{a:.1f}", *(str(best_depth(costs, num, a, depths)) for num in rows)] for a in ACCEPTANCES]
    how = "known from before" if found.seconds is None else f"measured in {found.seconds:.1f} s"
    per_row, per_context, per_query = costs.row_seconds, costs.context_seconds, costs.query_seconds
    spread = "not known" if found.spread is None else f"{100 * found.spread:.0f} %"
    lines = [
        f"{on['model']} on {on['device']}, {how}",
        f"spread of repeated timings of a step: {spread} (standard deviation, the median of all steps)",
        "",
        "Target step in ms, by tokens that go through it",
        *_table([["tokens", *map(str, sizes)], ["ms", *(f"{1e3 * costs.tokens(num):.1f}" for num in sizes)]]),
        "to which are added",
        f"  {1e3 * per_row:.3f} ms for each request",
        f"  {1e6 * per_context:.3f} ms for each thousand tokens of context, over all requests",
        f"  {1e6 * per_query:.3f} ms for each thousand tokens of context and each token that attends to them",
        "",
        "Drafting in ms, a line for each number of requests, a column for each depth",
        *_table([["", *map(str, depths[1:])], *drafts]),
        "",
        "Best depth, a line for each chance that a draft is accepted, a column for each number of requests",
        f"(each with {CONTEXT_LEN} tokens of context)",
        *_table([["", *map(str, rows)], *best]),
        "",
        f"kept in {found.path}",
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
