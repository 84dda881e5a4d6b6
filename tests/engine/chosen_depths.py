"""The simplest policy: what a test says, by the number of rows that decode."""

from __future__ import annotations

from collections.abc import Callable

from paceline.policy import Decision, Load, Observation, RowView
from paceline.policy.rivals import decision


class Chosen:
    """A policy that knows only how many rows decode."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        pins = [row.pinned or 0 for row in rows]
        depth = self._choose(load.num_rows)
        return decision(load, rows, depth, range(max([depth, *pins]) + 1))

    def observe(self, observation: Observation) -> None:
        pass
