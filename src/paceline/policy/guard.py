"""The guard: whether drafting really beats plain decoding, by the clock and the words, without the model.

While rows draft, now and then a round runs plain as a *control* (at most `control_share` of all rounds). It
is paired with the drafted rounds just before it, at the same load:

    x = ln( (tokens / seconds of the drafted rounds) / (tokens / seconds of the control) )

If `min_controls` or more of the latest x lie below zero by two standard errors, the guard trips: that load
runs plain for `backoff` rounds, twice as many at each further trip, until controls are won by as much. So a
model that is wrong in a way that nothing else notices costs a bounded amount. Loads are told apart by their
bucket of rows.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from paceline.policy.types import PolicyError

_FADE = 0.95  # of the drafted rounds' sums, a round: they span about 20 rounds
_MIN_ROUNDS = 8  # drafted rounds that a pair needs
_GAP = 4  # rounds after which drafted rounds are too old to pair with
_STALL = 4.0  # times the usual: a round longer than this is cut to it
_NOISE = 0.04  # least standard deviation of one x that is believed
_MAX_LEVEL = 7


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """How much looking costs, and what follows from it; in rounds."""

    control_share: float = 0.005
    min_spacing: int = 50  # between controls
    min_controls: int = 3  # that a verdict needs
    backoff: int = 200

    def __post_init__(self) -> None:
        if not 0 <= self.control_share <= 0.1:
            raise PolicyError(f"control_share must be in [0, 0.1], got {self.control_share}")
        for name, low in (("min_spacing", 1), ("min_controls", 2), ("backoff", 1)):
            if getattr(self, name) < low:
                raise PolicyError(f"{name} must be at least {low}, got {getattr(self, name)}")


@dataclass(slots=True)
class _Site:
    """What is known of one bucket of rows."""

    tokens: float = 0.0  # faded sums over drafted rounds
    seconds: float = 0.0
    weight: float = 0.0
    num_rounds: int = 0
    last_round: int = -_GAP
    pairs: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    level: int = 0
    blocked_until: int = 0

    def forget(self) -> None:
        self.tokens = self.seconds = self.weight = 0.0
        self.num_rounds = 0
        self.pairs.clear()


class Guard:
    """Plans controls and judges them. Rounds are counted by the caller."""

    def __init__(self, config: GuardConfig | None = None) -> None:
        self._config = config or GuardConfig()
        self._sites: dict[int, _Site] = {}
        self._next_control = 0
        self._seed = 1
        self.num_controls = 0
        self.num_trips = 0

    def is_tripped(self, rows: int, now: int) -> bool:
        """Whether that bucket of rows has to run plain."""
        site = self._sites.get(rows)
        return site is not None and now < site.blocked_until

    def wants_control(self, rows: int, now: int) -> bool:
        """Whether round `now`, which would draft, should run plain instead. If it does, call `spend`."""
        site = self._sites.get(rows)
        return (
            site is not None
            and site.num_rounds >= _MIN_ROUNDS
            and now - site.last_round <= _GAP
            and now >= self._next_control
            and self.num_controls + 1 <= self._config.control_share * now
        )

    def spend(self, now: int) -> None:
        """Round `now` is a control. The next one comes after an uneven time, so as to hit no rhythm."""
        self.num_controls += 1
        self._seed = (1664525 * self._seed + 1013904223) % 2**32
        self._next_control = now + self._config.min_spacing + (self._seed >> 27)

    def observe(self, rows: int, is_plain: bool, num_tokens: int, seconds: float, now: int) -> bool:
        """A timed round without prompt tokens. Returns whether the guard trips."""
        site = self._sites.setdefault(rows, _Site())
        if not is_plain:
            if site.num_rounds >= _MIN_ROUNDS:
                seconds = min(seconds, _STALL * site.seconds / site.weight)
            site.tokens = site.tokens * _FADE + num_tokens
            site.seconds = site.seconds * _FADE + seconds
            site.weight = site.weight * _FADE + 1
            site.num_rounds += 1
            site.last_round = now
            return False
        if site.num_rounds < _MIN_ROUNDS or now - site.last_round > _GAP:
            return False
        site.pairs.append(math.log(site.tokens / site.seconds * seconds / num_tokens))
        return self._judge(site, now)

    def _judge(self, site: _Site, now: int) -> bool:
        num = len(site.pairs)
        if num < self._config.min_controls:
            return False
        margin = 2 * max(statistics.stdev(site.pairs), _NOISE) / math.sqrt(num)
        mean = statistics.fmean(site.pairs)
        if mean - margin > 0:
            site.level = 0
        if mean + margin >= 0:
            return False
        site.blocked_until = now + self._config.backoff * 2**site.level
        site.level = min(site.level + 1, _MAX_LEVEL)
        site.forget()
        self.num_trips += 1
        return True
