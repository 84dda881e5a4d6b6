"""What is forgotten so that memory stays small, and that nothing else comes of it."""

from __future__ import annotations

import pytest

import paceline.policy.memory as memory_module
from paceline.policy import CostModel, Decision, GovernorConfig, Load, Observation, Reason, RowView
from paceline.policy.memory import Memory

DEPTHS = (0, 1, 2, 3)


def round_of(rows: tuple[RowView, ...], depths: tuple[int, ...]) -> Observation:
    decision = Decision(Load(len(rows), 100), rows, depths, Reason.PAYS)
    return Observation(decision, depths, 0.01)


def test_a_row_that_is_forgotten_teaches_nothing() -> None:
    memory = Memory(CostModel.prior(), DEPTHS, GovernorConfig())
    known, gone = RowView("known", 3), RowView("gone", 3)
    memory.rows.take((known,))
    for _ in range(2):
        memory.observe_rounds(round_of((gone, known), (2, 0)))
    assert memory.acceptance(0).num_seen == 0
    for _ in range(2):
        memory.observe_rounds(round_of((gone, known), (0, 2)))
    assert memory.acceptance(0).num_seen == 1


def test_prices_of_many_mixes_are_worked_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_MANY", 2)
    memory = Memory(CostModel.prior(), DEPTHS, GovernorConfig())
    rows = (RowView(0, 3), RowView(1, 3))
    memory.rows.take(rows)
    mixes = [(1, 0), (1, 1), (2, 0), (3, 3), (1, 0)]
    for now, depths in enumerate(mixes):
        memory.observe(round_of(rows, depths), now)
    assert len(memory._drafting) <= 2
    assert sum(memory.served.num_visits(2, depth) for depth in DEPTHS) == len(mixes)
