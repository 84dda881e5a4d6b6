"""One log line about the load now and then, while there is any.

Knows the engine's numbers, not where they come from; the clock is the caller's.
"""

from __future__ import annotations

from paceline.engine.stats import SchedulerStats

INTERVAL = 10.0  # seconds between lines


class Activity:
    """Turns the engine's numbers, as they come, into a line every `INTERVAL` seconds of work."""

    def __init__(self) -> None:
        self._since: float | None = None  # when the current line's interval began; None while idle
        self._tokens_then = 0

    def line(self, stats: SchedulerStats, now: float) -> str | None:
        """The line that is due, if one is. `now` is in seconds, of any monotonic clock."""
        if stats.num_running + stats.num_waiting == 0:
            self._since = None
            return None
        if (
            self._since is None or stats.num_generated_tokens < self._tokens_then
        ):  # a new engine counts from 0
            self._since, self._tokens_then = now, stats.num_generated_tokens
            return None
        elapsed = now - self._since
        if elapsed < INTERVAL:
            return None
        rate = (stats.num_generated_tokens - self._tokens_then) / elapsed
        self._since, self._tokens_then = now, stats.num_generated_tokens
        used = stats.num_pages_used / stats.num_pages
        return (
            f"{stats.num_running} running, {stats.num_waiting} waiting, {rate:.1f} tok/s, K/V {used:.0%} used"
        )
