"""From the settings' words to a policy, and to what steers by it."""

from __future__ import annotations

from pathlib import Path

from paceline.config import EngineConfig
from paceline.engine.steering import Steering
from paceline.engine.trace import StepTrace
from paceline.errors import ConfigError
from paceline.policy import (
    AcceptanceEma,
    BatchTable,
    CostModel,
    Fixed,
    Governor,
    Policy,
    PolicyError,
    Threshold,
)
from paceline.policy.rivals import SGLANG_SLOTS

DEEPEST = 6  # that is chosen unasked: what lies deeper pays nowhere, and would have to be measured too
_FORMS = "governor, ema, table:ROWS=DEPTH,... or threshold:ROWS[:DEPTH]"


def auto_depths(max_depth: int) -> tuple[int, ...]:
    """What a policy may choose among where requests may ask for `max_depth`."""
    return tuple(range(min(max_depth, DEEPEST) + 1))


def make_policy(depth: str, policy: str, max_depth: int, costs: CostModel | None) -> Policy:
    """The policy of an engine.

    Args:
        depth: "auto", or a whole number: the same at every step.
        policy: who chooses if it is auto: governor; ema (SGLang's rule); table:4=3,16=1 (depth 3 up to 4
            decoding requests, 1 up to 16, 0 beyond); threshold:8:2 (depth 2 up to 8 of them).
        max_depth: deepest that any row may draft; 0: there is no drafter.
        costs: the governor's, from a calibration; None: it begins with a guess.

    Raises:
        ConfigError: `policy` is none of these.
    """
    if max_depth == 0:
        return Fixed(0)
    if depth != "auto":
        return Fixed(min(int(depth), max_depth))
    kind, _, rest = policy.partition(":")
    try:
        if kind == "governor" and not rest:
            return Governor(costs, auto_depths(max_depth))
        if kind == "ema" and not rest:
            slots = SGLANG_SLOTS.items()
            return AcceptanceEma({rows: [min(depth, max_depth) for depth in of] for rows, of in slots})
        if kind == "table":
            return BatchTable.from_upper_bounds(_table(rest, max_depth))
        if kind == "threshold":
            rows, _, deep = rest.partition(":")
            chosen = _within(int(deep or min(2, max_depth)), max_depth)
            return Threshold(chosen, off_above=int(rows), on_below=int(rows))
    except (ValueError, PolicyError) as error:
        raise ConfigError(f"policy {policy!r} cannot be used ({error}): {_FORMS}") from None
    raise ConfigError(f"policy must be one of {_FORMS}, got {policy!r}")


def _table(words: str, max_depth: int) -> dict[int, int]:
    """Depths by the largest number of rows, from `4=3,16=1`."""
    table: dict[int, int] = {}
    for pair in words.split(","):
        rows, sign, depth = pair.partition("=")
        if not sign or int(rows) in table:
            raise ValueError(f"{pair!r} is not ROWS=DEPTH, or the rows come twice")
        table[int(rows)] = _within(int(depth), max_depth)
    return table


def _within(depth: int, max_depth: int) -> int:
    if depth > max_depth:
        raise ValueError(f"depth {depth} is more than max_depth {max_depth}")
    return depth


def make_steering(config: EngineConfig, max_depth: int, costs: CostModel | None) -> Steering:
    """The steering of an engine, with its policy and, if the settings want one, its trace.

    Raises:
        ConfigError: the policy's words mean nothing, or the trace cannot be written.
    """
    policy = make_policy(config.depth, config.policy, max_depth, costs)
    if config.trace is None:
        return Steering(policy)
    of_steps = costs or CostModel.prior()
    return Steering(policy, StepTrace(Path(config.trace), config.trace_max_bytes, max_depth, of_steps))
