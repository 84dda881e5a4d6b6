"""`paceline replay`: what other policies would have made of a recorded trace.

Knows the file and the table; what a replay is, `paceline.policy.replay` knows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli_flags import Parser
from paceline.config import is_whole
from paceline.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from paceline.policy import Policy, Replay, Trace

EXAMPLES = """\
examples:
  paceline serve --depth 4 --trace steps.jsonl
  paceline replay steps.jsonl
  paceline replay steps.jsonl --policy governor --policy table:4=3,16=1 --policy fixed:2 --json
"""
DEFAULT_POLICIES = ("governor", "ema")
FIXED = "fixed"


def add_replay_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `replay` to the command line."""
    replay = commands.add_parser(
        "replay",
        help="run other policies over a recorded trace",
        description="Say what policies make of a trace that was recorded with --trace: tokens a second, and\n"
        "what each loses against the best fixed depth in hindsight.",
        epilog=EXAMPLES,
    )
    replay.set_defaults(run=_replay, parser=replay)
    replay.add_argument("file", type=Path, metavar="FILE", help="JSON lines")
    replay.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="SPEC",
        help="governor, ema, table:ROWS=DEPTH,..., threshold:ROWS[:DEPTH] or fixed:DEPTH; may be repeated "
        f"(default: {' and '.join(DEFAULT_POLICIES)}, but for what the trace has no drafts for)",
    )
    replay.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's replay; `error` says why there is none."""

    name: str
    replay: Replay | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace, as it was served (None: it was not), at the fixed depths, and with the policies."""

    trace: Trace
    served: Replay | None
    fixed: Mapping[int, Replay]
    outcomes: Sequence[Outcome]

    @property
    def best_depth(self) -> int:
        """The best fixed depth in hindsight."""
        return max(self.fixed, key=lambda depth: self.fixed[depth].rate)

    def regret(self, replay: Replay) -> float:
        """Share of the best fixed depth's rate that was lost; less than 0 if nothing was."""
        best = self.fixed[self.best_depth].rate
        return 1 - replay.rate / best if best else 0.0


def read_file(path: Path) -> Trace:
    """The trace of a file. A last line that was cut off is left out.

    Raises:
        PacelineError: it cannot be read or is damaged; the message names the file and the place.
    """
    from paceline.policy import PolicyError, read_trace

    try:
        return read_trace(_records(path))
    except OSError as error:
        raise PacelineError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PacelineError(f"{path} is not a trace: it is not text") from None
    except PolicyError as error:
        raise PacelineError(f"{path}: {error}") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # not all that can be wrong with JSON is its syntax
                if number > 1 and not line.endswith("\n"):
                    return  # the process was killed while it wrote
                what = getattr(error, "msg", str(error))
                raise PacelineError(f"{path}: line {number} is not JSON: {what}") from None
            if not isinstance(record, dict):
                raise PacelineError(f"{path}: line {number} is not a JSON object")
            yield record


def replay_file(path: Path, specs: Sequence[str]) -> Replayed:
    """Run policies, as the command line spells them, over a file's trace.

    Raises:
        ConfigError: a policy's words mean nothing.
        PacelineError: the file cannot be used.
    """
    from paceline.policy import PolicyError, fixed_depths, replay_trace

    trace = read_file(path)
    if not trace.steps and not trace.requests:
        raise PacelineError(f"{path}: the trace is empty")
    policies = {spec: parse_policy(spec, trace) for spec in specs}
    outcomes = []
    for name, policy in policies.items():
        try:
            outcomes.append(Outcome(name, replay_trace(trace, policy)))
        except PolicyError as error:
            outcomes.append(Outcome(name, None, str(error)))
    try:
        fixed = fixed_depths(trace)
    except PolicyError as error:
        raise PacelineError(f"{path}: {error}") from None
    return Replayed(trace, _as_served(trace), fixed, outcomes)


def fitting(replayed: Replayed) -> Replayed:
    """Without the policies that the trace does not fit, if it fits one."""
    outcomes = [outcome for outcome in replayed.outcomes if outcome.replay is not None]
    return replace(replayed, outcomes=outcomes or replayed.outcomes)


def parse_policy(spec: str, trace: Trace) -> Policy:
    """A policy, with the trace's costs and depths.

    Raises:
        ConfigError: it is none of the forms.
    """
    from paceline.engine.policies import make_policy

    deepest = trace.depths[-1]
    if trace.steps:  # what was never drafted cannot be replayed
        deepest = max(max(step.depths, default=0) for step in trace.steps)
    kind, _, depth = spec.partition(":")
    if kind != FIXED:
        try:
            return make_policy("auto", spec, deepest, trace.costs)
        except ConfigError as error:
            raise ConfigError(f"{error}; or {FIXED}:DEPTH") from None
    if not is_whole(depth) or int(depth) > deepest:
        raise ConfigError(
            f"policy {spec!r}: fixed: needs a depth of 0 to {deepest}, the deepest of the trace"
        )
    return make_policy(depth, "", deepest, None)


def _as_served(trace: Trace) -> Replay | None:
    """What the server did, if it was one."""
    from paceline.policy import Replay

    if not trace.steps:
        return None
    tokens = sum(len(step.rows) + sum(step.accepted) for step in trace.steps)
    return Replay(tokens, sum(step.seconds for step in trace.steps))


def _replay(args: argparse.Namespace) -> None:
    replayed = replay_file(args.file, args.policy or DEFAULT_POLICIES)
    if not args.policy:
        replayed = fitting(replayed)
    if args.json:
        print(json.dumps(to_json(replayed)))
    else:
        print(to_text(replayed), end="")
        for outcome in replayed.outcomes:
            if outcome.error is not None:
                print(f"{outcome.name}: {outcome.error}", file=sys.stderr)
    failed = [outcome.name for outcome in replayed.outcomes if outcome.replay is None]
    if failed:
        raise PacelineError(
            f"{', '.join(failed)} could not be replayed on this trace; "
            "recorded with --depth N, one has drafts for all depths up to N"
        )


def to_json(replayed: Replayed) -> dict[str, Any]:
    """Plain data."""

    def shown(replay: Replay) -> dict[str, Any]:
        return {
            "tokens": replay.tokens,
            "seconds": round(replay.seconds, 4),
            "tokens_per_second": round(replay.rate, 2),
            "regret": round(replayed.regret(replay), 4),
        }

    def counted(replay: Replay) -> dict[str, Any]:
        return {
            "steps_by_depth": {str(depth): num for depth, num in sorted(replay.rounds_by_depth.items())},
            "steps_by_reason": {reason.value: num for reason, num in replay.rounds_by_reason.items()},
        }

    return {
        "kind": "steps" if replayed.trace.steps else "requests",
        "best_depth": replayed.best_depth,
        "served": None if replayed.served is None else shown(replayed.served),
        "fixed": {str(depth): shown(replay) for depth, replay in replayed.fixed.items()},
        "policies": {
            outcome.name: {"error": outcome.error}
            if outcome.replay is None
            else shown(outcome.replay) | counted(outcome.replay)
            for outcome in replayed.outcomes
        },
    }


def to_text(replayed: Replayed) -> str:
    """A table for people."""
    rows = [] if replayed.served is None else [("as served", replayed.served, "")]
    for depth, replay in replayed.fixed.items():
        rows.append(
            (f"{FIXED}:{depth}", replay, "the best in hindsight" if depth == replayed.best_depth else "")
        )
    for outcome in replayed.outcomes:
        if outcome.replay is not None:
            reasons = outcome.replay.rounds_by_reason.most_common()
            rows.append((outcome.name, outcome.replay, ", ".join(f"{r.value} {num}" for r, num in reasons)))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{'policy':{width}}  tok/s    regret  steps"]
    for name, replay, note in rows:
        lines.append(
            f"{name:{width}}  {replay.rate:<7.1f}  {100 * replayed.regret(replay):>5.1f}%  {note}".rstrip()
        )
    return "\n".join(lines) + "\n"
