"""Counters that outlive what they count. Knows nothing of engines or metrics."""

from __future__ import annotations


class Monotonic:
    """The sum over all lives of an engine of a counter that begins anew with each."""

    def __init__(self) -> None:
        self._before: float = 0
        self._latest: float = 0

    def update(self, value: float) -> float:
        """Take the newest value of the life; returns the sum."""
        if value < self._latest:
            self._before += self._latest
        self._latest = value
        return self._before + self._latest
