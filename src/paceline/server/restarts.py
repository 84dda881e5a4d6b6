"""When to start another engine, and when to give up: three quick deaths in a row.

Knows neither processes nor clocks; how long an engine lived is told.
"""

from __future__ import annotations

MAX_QUICK_DEATHS = 3


class Deaths:
    """Counts the quick deaths in a row.

    Args:
        quick_seconds: an engine that lived shorter than this, counted from when it was ready, or that
            never was, died quickly.
    """

    def __init__(self, quick_seconds: float) -> None:
        self._quick_seconds = quick_seconds
        self._num_quick = 0

    def note(self, lived: float | None) -> bool:
        """Note a death after `lived` seconds (None: it was never ready); returns whether to give up."""
        was_quick = lived is None or lived < self._quick_seconds
        self._num_quick = self._num_quick + 1 if was_quick else 0
        return self._num_quick >= MAX_QUICK_DEATHS
