"""What numbers from outside may be: cost tables, traces, loads. One line that names what is wrong.

The limits lie far above anything real. They keep a damaged file, or a loop that hands over a sum gone wrong,
from becoming an overflow, a division by nothing or a table that fills the memory, later and elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

from paceline.policy.types import Load, PolicyError

MAX_TOKENS = 1 << 40  # of context, over all rows
MAX_STEP_TOKENS = 1 << 20  # of prompts in one step
MAX_DEPTH = 256


def whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number, of any type that is one; a float without a fraction is.

    Raises:
        PolicyError: it is none, or not within the limits.
    """
    try:
        number = operator.index(_number(value))
    except TypeError:
        raise PolicyError(f"{name} must be a whole number, got {value!r}") from None
    if not least <= number <= most:
        raise PolicyError(f"{name} must be {least} to {most}, got {_shown(number)}")
    return number


def real(name: str, value: Any, least: float, most: float) -> float:
    """A number.

    Raises:
        PolicyError: it is none, or not within the limits.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise PolicyError(f"{name} must be a number, got {value!r}")
    if not least <= value <= most:
        raise PolicyError(f"{name} must be {least:g} to {most:g}, got {_shown(value)}")
    return float(value)


def check_depths(depths: Iterable[int]) -> tuple[int, ...]:
    """The depths that a policy may use, in order.

    Raises:
        PolicyError: 0 is missing, or one is no depth.
    """
    ordered = tuple(sorted({whole("a depth", depth, 0, MAX_DEPTH) for depth in depths}))
    if not ordered or ordered[0] != 0:
        raise PolicyError(f"depths must begin at 0, got {ordered}")
    return ordered


def check_load(load: Load, num_rows: int) -> None:
    """Refuse a load that cannot be one of so many rows.

    Raises:
        PolicyError: the message says why.
    """
    if load.num_rows != num_rows:
        raise PolicyError(f"load has {load.num_rows} rows, and {num_rows} are given")
    whole("context_len", load.context_len, 0, MAX_TOKENS)
    whole("num_prompt_tokens", load.num_prompt_tokens, 0, MAX_STEP_TOKENS)


def _number(value: Any) -> SupportsIndex:
    if isinstance(value, bool):
        raise TypeError
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    """Python does not spell out whole numbers of thousands of digits."""
    return repr(value) if isinstance(value, float) or abs(value) < MAX_TOKENS**2 else "one far beyond"
