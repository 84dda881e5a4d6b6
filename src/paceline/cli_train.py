"""`paceline train eagle3`: a draft head for any target, from conversations that the target makes."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli_flags import Parser
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.train.loop import Report

EXAMPLES = """\
examples:
  paceline train eagle3 --target smollm2-135m-instruct --out ./head --minutes 20 --device cuda
  paceline train eagle3 --target ./my-model --out ./head --prompts my-prompts.jsonl
"""


def add_train_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `train` and its methods to the command line."""
    train = commands.add_parser("train", help="train a draft head", epilog=EXAMPLES)
    train.set_defaults(parser=train)
    methods = train.add_subparsers(metavar="METHOD", required=True)
    eagle3 = methods.add_parser(
        "eagle3",
        help="an EAGLE-3 head",
        description="Train an EAGLE-3 head on conversations that the target makes itself; no data set is\n"
        "needed. The head is left in DIR/head in SpecForge's format. The same command continues a run\n"
        "that was cut short.",
        epilog=EXAMPLES,
    )
    eagle3.set_defaults(run=_train, parser=eagle3)
    eagle3.add_argument("--target", metavar="MODEL", required=True, help="the model to draft for")
    eagle3.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="where everything of the run is kept"
    )
    eagle3.add_argument(
        "--minutes", type=float, metavar="X", default=30.0, help="time in all, making conversations included"
    )
    eagle3.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    eagle3.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help='prompts of your own besides: JSON lines with "prompt" or "turns"',
    )
    eagle3.add_argument(
        "--draft-vocab-size", type=int, metavar="N", default=8192, help="tokens that the head can say"
    )
    eagle3.add_argument(
        "--intermediate-size", type=int, metavar="N", help="of the head's MLP (default: the target's)"
    )
    eagle3.add_argument(
        "--num-rows", type=int, metavar="N", default=1024, help="conversations made at a time"
    )
    eagle3.add_argument(
        "--short-len", type=int, metavar="N", default=512, help="tokens of a short conversation"
    )
    eagle3.add_argument(
        "--long-len", type=int, metavar="N", default=2048, help="tokens of a long conversation"
    )
    eagle3.add_argument("--batch-tokens", type=int, metavar="N", default=32_768, help="tokens in one update")
    eagle3.add_argument("--learning-rate", type=float, metavar="X", default=1e-3, help="of AdamW at its peak")
    eagle3.add_argument(
        "--max-updates",
        type=int,
        metavar="N",
        help="stop after so many updates, if the time is not over before",
    )
    eagle3.add_argument("--seed", type=int, metavar="N", default=0, help="of everything random")


def _train(args: argparse.Namespace) -> None:
    from paceline.train.run import Recipe, train_eagle3

    own = _read_prompts(args.prompts) if args.prompts else []
    recipe = Recipe(
        minutes=args.minutes,
        draft_vocab_size=args.draft_vocab_size,
        intermediate_size=args.intermediate_size,
        num_rows=args.num_rows,
        short_len=args.short_len,
        long_len=args.long_len,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        max_updates=args.max_updates,
        seed=args.seed,
    )
    started = time.monotonic()

    def show(report: Report) -> None:
        left = max(0.0, args.minutes * 60 - (time.monotonic() - started))
        hits = " ".join(f"{a:.3f}" for a in report.accuracy)
        print(
            f"update {report.updates}  {report.tokens / 1e6:.1f} M tokens  loss {report.loss:.3f}  "
            f"top-1 by step {hits}  about {math.ceil(left / 60)} min left",
            flush=True,
        )
        for kind, tally in sorted(report.held_out.items()):
            by_position = " ".join(f"{a:.2f}" for a in tally.conditional)
            print(
                f"    held out: {kind:12} accept_len {tally.accept_len:.2f}  by position {by_position}",
                flush=True,
            )

    train_eagle3(args.target, args.out, recipe, args.device, own, show)
    print(f"the head is in {args.out / 'head'}")


def _read_prompts(path: Path) -> list[str]:
    """The first prompt of each line.

    Raises:
        ConfigError: the file cannot be read, or a line has neither "prompt" nor "turns".
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from None
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            prompt = record["prompt"] if "prompt" in record else record["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError):
            prompt = None
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'--prompts {path}, line {number}: needs JSON with "prompt" or "turns"')
        prompts.append(prompt)
    return prompts
