"""Looking while off: when, and for which rows, to draft in the shadow of plain rounds.

A *session* picks a few rows, those of which least is known, which then draft at each of `num_steps` steps
in a row. What comes back is chained into virtual rounds (`acceptance.ShadowChains`), whenever it comes: one
step late, or as many as there are drafts. Drafting at every step, not only where a virtual round begins,
costs hardly more (rows stay in step with each other) and needs no result before the next decision.

Sessions are paid for in advance from a purse that fills with `share` of the time served, so all of them
together never take a greater share than that. After a session that found nothing new (its drafts were
accepted as expected, within two standard deviations) the next is twice as far away, up to `max_interval`
rounds; one that did better, and `wake` (the load has changed), make it near again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from paceline.policy.acceptance import ShadowChains
from paceline.policy.types import PolicyError, ShadowResult

_PURSE = 4  # sessions it can hold
_LATER = 8  # rounds until it is tried again to begin one
_FAR = 2.0  # standard deviations
_SPARE = 2  # rounds for results to come, beyond one for each draft


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """How much looking costs, as a share of time, and how often it is done, in rounds."""

    share: float = 0.003
    num_rows: int = 4
    num_steps: int = 10
    interval: int = 16
    max_interval: int = 512

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 0.1:
            raise PolicyError(f"share must be in [0, 0.1], got {self.share}")
        for name, low in (("num_rows", 1), ("num_steps", 2), ("interval", 1)):
            if getattr(self, name) < low:
                raise PolicyError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if self.max_interval < self.interval:
            raise PolicyError(f"max_interval must be at least interval ({self.interval})")


class Shadows:
    """Plans sessions, and picks from their results what counts. Rounds are counted by the caller."""

    def __init__(self, config: ShadowConfig | None = None) -> None:
        self._config = config or ShadowConfig()
        self._chains = ShadowChains()
        self._purse = 0.0  # seconds
        self._session: frozenset[Hashable] = frozenset()  # rows
        self._last_at = self._closes_at = 0  # rounds: the last that drafts, the one that judges
        self._interval = self._config.interval
        self._next_at = 0
        self._surplus = self._variance = 0.0
        self._is_far_better = False

    def earn(self, seconds: float) -> None:
        """Time has been served."""
        self._purse += self._config.share * seconds

    def wake(self, now: int) -> None:
        """Something has changed: look again soon."""
        self._interval = self._config.interval
        self._next_at = min(self._next_at, now + self._interval)

    def is_due(self, now: int) -> bool:
        """Whether `plan` has something to do in round `now`."""
        if self._session:
            return now <= self._last_at or now >= self._closes_at
        return now >= self._next_at

    def take_good_news(self) -> bool:
        """Whether a session that is over did far better than expected; says so once."""
        was, self._is_far_better = self._is_far_better, False
        return was

    def stop(self) -> None:
        """End the session under way, if there is one: rows draft in earnest."""
        for key in self._session:
            self._chains.end(key)
        self._session = frozenset()
        self._surplus = self._variance = 0.0

    def plan(
        self,
        now: int,
        keys: Sequence[Hashable],
        order: Sequence[int],
        depth: int,
        seconds_of: Callable[[int], float],
    ) -> tuple[int, ...]:
        """The rows (indices) that draft in the shadow of round `now`, in which it is due.

        Args:
            keys: of all rows.
            order: rows (indices) that may, those to be looked at first in front.
            seconds_of: what a number of rows costs to draft for.
        """
        if not self._session:
            self._begin(now, [keys[i] for i in order[: self._config.num_rows]], depth, seconds_of)
        elif now >= self._closes_at:
            self._judge(now)
        if not self._session or now > self._last_at:
            return ()
        return tuple(sorted(i for i in order if keys[i] in self._session))

    def take(
        self, results: Iterable[ShadowResult], expected: Callable[[Hashable, int], tuple[float, float]]
    ) -> list[ShadowResult]:
        """The results that count, as rounds that started where rounds start.

        Args:
            expected: drafts that a row should accept at a depth: mean and variance.
        """
        counted = [result for result in results if self._chains.follow(result)]
        for result in counted:
            mean, variance = expected(result.key, result.depth)
            self._surplus += result.matched - mean
            self._variance += variance
        return counted

    def _begin(
        self, now: int, keys: Sequence[Hashable], depth: int, seconds_of: Callable[[int], float]
    ) -> None:
        """A new session, if there are rows for it and it can be paid."""
        config = self._config
        price = config.num_steps * seconds_of(len(keys)) if keys else 0.0
        if not keys or price > self._purse:
            self._next_at = now + _LATER
            return
        self._purse = min(self._purse, _PURSE * price) - price
        self._session = frozenset(keys)
        self._last_at = now + config.num_steps - 1
        self._closes_at = self._last_at + depth + _SPARE

    def _judge(self, now: int) -> None:
        """The session is over: what it found says when to look again."""
        deviation = self._variance**0.5
        is_news = abs(self._surplus) > _FAR * deviation
        self._is_far_better = is_news and self._surplus > 0
        if self._is_far_better:
            self._interval = self._config.interval
        elif not is_news:
            self._interval = min(2 * self._interval, self._config.max_interval)
        self._next_at = now + self._interval
        self.stop()
