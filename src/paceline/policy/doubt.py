"""Doubt: by what factor the predicted cost of a depth that was not served at a load may be wrong there.

A calibration that was right wherever it was tried is probably right elsewhere; one that was wrong may be so
again. With x_1, ..., x_n the *surprises* of a depth (logarithms of served over expected seconds in its first
rounds at one load after another, see `served`),

    worst = max_i |x_i| / 2 ** (n - i)        doubt = 2 worst + ln(1.2) |k - j|

where j is the depth with surprises that is nearest to k, most often k itself. The *insurance* is exp(doubt),
at least `LEAST` and at most `MOST`, which also holds while nothing was served, or where costs are a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LEAST = 1.1
MOST = 3.0
_PER_DEPTH = 1.2


def insurance(surprises: Mapping[int, Mapping[int, float]], depth: int, is_measured: bool) -> float:
    """How many times cheaper than predicted a depth may be.

    Args:
        surprises: by depth, then by load in the order of their first rounds.
        is_measured: the costs come from a calibration.
    """
    if not is_measured or not surprises:
        return MOST
    nearest = min(surprises, key=lambda other: (abs(other - depth), -_worst(surprises[other])))
    doubt = 2 * _worst(surprises[nearest]) + math.log(_PER_DEPTH) * abs(nearest - depth)
    return min(max(math.exp(doubt), LEAST), MOST)


def _worst(by_load: Mapping[int, float]) -> float:
    worst = 0.0
    for surprise in by_load.values():
        worst = max(worst / 2, abs(surprise))
    return worst
