"""`paceline sweep`: which depth pays at which load, on this machine or on servers."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import logs
from paceline.cli_flags import Parser, add_flags, help_of
from paceline.cli_settings import load
from paceline.config import EngineConfig, Settings
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.bench.arms import Arm
    from paceline.bench.run import Options

T = TypeVar("T", int, float)

EXAMPLES = """\
examples:
  paceline sweep --quick
  paceline sweep --concurrency 1,2,4,8,16 --temperature 0,0.8 --out ./report
  paceline sweep --profile step
  paceline sweep --url plain=http://10.0.0.1:8000 --url auto=http://10.0.0.2:8000
"""
CPU_LOADS, GPU_LOADS, QUICK_LOADS = "1,2,5,10,30", "1,2,5,10,30,64,128,256", "1,4,16"
QUICK_MINUTES = 3.6
WARMUP_STEPS, QUICK_WARMUP_STEPS = 150, 75
MAX_CONCURRENCY = 4096


def add_sweep_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `sweep` to the command line."""
    sweep = commands.add_parser(
        "sweep",
        help="measure where speculation pays",
        description="Measure arms (ways to serve) at several loads, with the same prompts in turns, and say\n"
        "where speculation stops paying and whether choosing the depth beats every fixed one.",
        epilog=EXAMPLES,
    )
    sweep.set_defaults(run=_sweep, parser=sweep)
    model = EngineConfig.__dataclass_fields__["model"]
    sweep.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=help_of(model))
    sweep.add_argument("--config", metavar="FILE", help="a YAML file of engine settings")
    sweep.add_argument("--quick", action="store_true", help="few arms and loads: an answer in four minutes")
    sweep.add_argument(
        "--profile", choices=("step",), help="instead: the load steps 1, 16, 1, and arms over time"
    )
    group = sweep.add_argument_group("what is measured")
    _add_load_flags(group)
    _add_work_flags(group)
    add_flags(
        sweep,
        EngineConfig,
        but={"model", "depth", "trace", "trace_max_bytes"},  # depths are arms
        defaults={
            "prefix_caching": "False, as all arms get the same prompts",
            "max_num_seqs": "at least as many as --concurrency needs",
            "max_num_batched_tokens": "at least as many as --concurrency needs",
        },
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    """Which arms, at which loads, and for how long."""
    group.add_argument(
        "--arms",
        metavar="LIST",
        help="with commas: plain, depths, auto, policies (default: plain,0,1,2,3,4,auto; none with --url)",
    )
    group.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="a server with OpenAI's API as an arm; may be repeated",
    )
    group.add_argument(
        "--concurrency",
        metavar="LIST",
        help=f"requests in flight (default: {CPU_LOADS}; on a GPU {GPU_LOADS}; quick {QUICK_LOADS})",
    )
    group.add_argument("--temperature", metavar="LIST", default="0", help="0 is greedy")
    group.add_argument("--context", metavar="LIST", help="tokens of each prompt (default: as they are)")
    group.add_argument("--rounds", type=int, metavar="N", help="in each of the two passes (default: 5)")
    group.add_argument(
        "--minutes",
        type=float,
        metavar="X",
        help="fewer rounds, to end in about this time; two of each pass are the least",
    )


def _add_work_flags(group: argparse._ArgumentGroup) -> None:
    """What every arm is asked to do in a round, and where the report goes."""
    group.add_argument(
        "--warmup-steps",
        type=int,
        metavar="N",
        help="of auto and policies at each load before they count, at least (default: "
        f"{WARMUP_STEPS}; quick {QUICK_WARMUP_STEPS})",
    )
    group.add_argument("--answer-len", type=int, metavar="N", help="tokens of each answer (default: 64)")
    group.add_argument(
        "--natural-stop", action="store_true", help="the model may end an answer before --answer-len"
    )
    group.add_argument(
        "--warm-prompts",
        action="store_true",
        help="prompts come from the prefix cache: what is measured is decoding",
    )
    group.add_argument(
        "--turn-seconds",
        type=float,
        metavar="X",
        help="arms take turns of so long within a round, on engines of their own (default: whole rounds)",
    )
    group.add_argument(
        "--min-tokens", type=int, metavar="N", help="answer tokens of a round, at least (default: 256)"
    )
    group.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with prompt or turns, and maybe temperature"
    )
    group.add_argument("--max-prompt-chars", type=int, metavar="N", help="longer prompts are left out")
    group.add_argument(
        "--step-seconds", type=float, default=20.0, metavar="X", help="of each load, with --profile"
    )
    group.add_argument(
        "--out", type=Path, default=Path("paceline-sweep"), metavar="DIR", help="where the report goes"
    )


def _sweep(args: argparse.Namespace) -> None:
    from paceline.bench.run import profile, sweep

    logs.configure("warning")
    settings = load(args, os.environ)
    arms = _arms(args)
    _check_policies(arms, settings.engine.max_depth)
    options = _options(args, settings, arms)
    _make_folder(options.out)
    run = sweep if args.profile is None else profile
    outcome = run(arms, options, lambda line: print(line, file=sys.stderr, flush=True))
    print(outcome.text, end="")
    for line in outcome.written:
        print(line)
    if outcome.interrupted_by == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    if outcome.interrupted_by is not None:
        raise KeyboardInterrupt
    if outcome.is_empty:
        raise PacelineError("every arm failed")
    if outcome.failed:
        raise PacelineError(f"{', '.join(outcome.failed)} failed; the report has the rest")


def _arms(args: argparse.Namespace) -> list[Arm]:
    from paceline.bench.arms import parse_arms

    if args.profile is not None and args.url:
        raise ConfigError("--profile looks into engines of this process: it does not go with --url")
    words = args.arms
    if words is None:
        words = "plain,2,auto" if args.profile else "plain,1,3,auto" if args.quick else "plain,0,1,2,3,4,auto"
        words = "" if args.url else words
    return parse_arms(words, args.url)


def _check_policies(arms: Sequence[Arm], max_depth: int) -> None:
    """Raises ConfigError where an arm's policy is none, before anything is measured."""
    from paceline.engine.policies import make_policy

    for word in [value for arm in arms for name, value in arm.launch if name == "policy"]:
        try:
            make_policy("auto", word, max_depth, None)
        except ConfigError as error:
            raise ConfigError(f"--arms: {error}") from None


def _options(args: argparse.Namespace, settings: Settings, arms: Sequence[Arm]) -> Options:
    """The flags, checked.

    Raises:
        ConfigError: names the flag and its limit.
    """
    from paceline.bench.run import Options

    default = QUICK_LOADS if args.quick else GPU_LOADS if settings.engine.device == "cuda" else CPU_LOADS
    if args.profile:
        default = "1,16,1"
    loads = _list(
        "--concurrency", default if args.concurrency is None else args.concurrency, int, 1, MAX_CONCURRENCY
    )
    contexts = None if args.context is None else _sorted("--context", args.context, int, 16, 2**20)
    quick, longest = args.quick, args.max_prompt_chars
    if longest is not None:
        _at_least("--max-prompt-chars", longest, 1)
    answer_len = _pick("--answer-len", args.answer_len, 32 if quick else 64, 4)
    len_per_row = None if contexts is None else max(contexts) + answer_len + 64
    options = Options(
        engine=_engine(settings, max(loads), len_per_row, arms, args.warm_prompts),
        loads=tuple(loads if args.profile else _in_order("--concurrency", loads)),
        temperatures=tuple(_sorted("--temperature", args.temperature, float, 0.0, 100.0)),
        contexts=(None,) if contexts is None else tuple(contexts),
        num_rounds=_pick("--rounds", args.rounds, 5, 1),
        warmup_steps=_pick(
            "--warmup-steps", args.warmup_steps, QUICK_WARMUP_STEPS if quick else WARMUP_STEPS, 0
        ),
        max_seconds=_seconds(args.minutes, QUICK_MINUTES if quick else None),
        answer_len=answer_len,
        natural_stop=args.natural_stop,
        warm_prompts=args.warm_prompts,
        turn_seconds=None
        if args.turn_seconds is None
        else _at_least("--turn-seconds", args.turn_seconds, 0.05),
        min_tokens=_pick("--min-tokens", args.min_tokens, 128 if quick else 256, 1),
        prompts=args.prompts,
        max_prompt_chars=300 if quick and longest is None else longest,
        step_seconds=_at_least("--step-seconds", args.step_seconds, 1.0),
        out=args.out,
        command=_command(),
        api_key=os.environ.get("OPENAI_API_KEY"),
    )
    if args.warm_prompts and any(arm.url for arm in arms):
        raise ConfigError("--warm-prompts is for engines of this process: it does not go with --url")
    if args.warm_prompts and args.profile:
        raise ConfigError("--warm-prompts does not go with --profile")
    if args.warm_prompts and not options.engine.prefix_caching:
        raise ConfigError("--warm-prompts needs the prefix cache: it does not go with --no-prefix-caching")
    if args.context is not None and all(arm.url for arm in arms) and "model" not in settings.origins:
        raise ConfigError("--context needs MODEL, whose tokenizer counts the tokens")
    return options


def _engine(
    settings: Settings, most: int, len_per_row: int | None, arms: Sequence[Arm], warm_prompts: bool
) -> EngineConfig:
    """Settings under which every arm does the work that it is given.

    Args:
        most: requests in flight.
        len_per_row: tokens of each, with room to spare; None: prompts are as they are, most of them short.
        warm_prompts: every arm finds all prompts in the cache.
    """
    config, given = settings.engine, settings.origins
    if "max_num_seqs" in given and config.max_num_seqs < most and not all(arm.url for arm in arms):
        raise ConfigError(
            f"--concurrency: {most} requests need --max-num-seqs of as many, got {config.max_num_seqs}"
        )
    deepest = max((arm.depth or 0 for arm in arms), default=0)
    changes: dict[str, Any] = {
        "max_num_seqs": max(config.max_num_seqs, most),
        # Every row's drafts fit, or the scheduler would trim them and the arm would not be itself.
        "max_num_batched_tokens": max(config.max_num_batched_tokens, 2 * most * (1 + deepest)),
        # The same prompts come once for each arm: a hit would favour those that come later, unless all hit.
        "prefix_caching": warm_prompts,
    }
    if len_per_row is not None or config.device == "cuda":  # where the first engine would take all there is
        changes["kv_cache_tokens"] = most * (len_per_row or 1024) * (3 if warm_prompts else 1)
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if k not in given})


def _list(flag: str, text: str, kind: Callable[[str], T], low: T, high: T) -> list[T]:
    """Numbers with commas between them."""
    values = []
    for word in text.split(","):
        try:
            value = kind(word)
        except ValueError:
            raise ConfigError(f"{flag} must be numbers with commas between them, got {text!r}") from None
        if not low <= value <= high:
            raise ConfigError(f"{flag} must be in [{low}, {high}], got {word.strip()}")
        values.append(value)
    return values


def _sorted(flag: str, text: str, kind: Callable[[str], T], low: T, high: T) -> list[T]:
    return _in_order(flag, _list(flag, text, kind, low, high))


def _in_order(flag: str, values: Sequence[T]) -> list[T]:
    """Columns of a sweep, which has each once."""
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{flag}: {value:g} is there twice")
    return sorted(values)


def _pick(flag: str, given: int | None, default: int, low: int) -> int:
    return default if given is None else _at_least(flag, given, low)


def _at_least(flag: str, value: T, low: T) -> T:
    if not low <= value < float("inf"):
        raise ConfigError(f"{flag} must be at least {low}, got {value}")
    return value


def _seconds(minutes: float | None, default: float | None) -> float | None:
    wanted = default if minutes is None else _at_least("--minutes", minutes, 0.1)
    return None if wanted is None else 60 * wanted


def _command() -> str:
    """What was typed, without the folders that paths begin with."""
    words = [Path(word).name if word.startswith(os.sep) else word for word in sys.argv[1:]]
    return " ".join(["paceline", *words])


def _make_folder(folder: Path) -> None:
    """Now, and not after an hour of measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--out: cannot write to {folder}")
