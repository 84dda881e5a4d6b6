"""Decisions that are good for further steps: the policy is not asked again before something changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.engine.steering import Candidate, Steering
from paceline.policy import Decision, Load, Observation, Reason, RowView
from paceline.step import RowResult


class Lasting:
    """Depth 2 for every row, good for three further steps."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.loads: list[Load] = []
        self.observed: list[Observation] = []
        self._fails_at = fails_at

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        self.loads.append(load)
        return Decision(load, rows, (2,) * len(rows), Reason.PAYS, repeat=3)

    def observe(self, observation: Observation) -> None:
        self.observed.append(observation)
        if len(self.observed) == self._fails_at:
            raise RuntimeError("lost")


ROWS = [Candidate("a", 4, None, 10), Candidate("b", 4, None, 20)]


def later(rows: list[Candidate], **changes: object) -> list[Candidate]:
    return [replace(row, context_len=row.context_len + 3, **changes) for row in rows]


def test_it_is_asked_every_fourth_step() -> None:
    policy, rows = Lasting(), ROWS
    steering = Steering(policy)
    for _ in range(9):
        assert steering.decide(rows, 0).depths == {"a": 2, "b": 2}
        rows = later(rows)
    assert [load.context_len for load in policy.loads] == [30, 54, 78]


@pytest.mark.parametrize(
    ("rows", "num_prompt_tokens"),
    [
        (ROWS[:1], 0),
        ([*ROWS, Candidate("c", 4, None, 1)], 0),
        ([ROWS[0], Candidate("c", 4, None, 20)], 0),
        (later(ROWS, room=1), 0),
        (later(ROWS, pinned=0), 0),
        (ROWS, 5),
    ],
    ids=["left", "came", "exchanged", "room", "own depth", "prompt"],
)
def test_it_is_asked_anew_when_something_changes(rows: list[Candidate], num_prompt_tokens: int) -> None:
    policy = Lasting()
    steering = Steering(policy)
    steering.decide(ROWS, 0)
    chosen = steering.decide(rows, num_prompt_tokens)
    assert policy.loads[1:] == [Load(len(rows), sum(row.context_len for row in rows), num_prompt_tokens)]
    own = [0 if row.pinned == 0 else min(2, row.room) for row in rows]
    assert chosen.depths == dict(zip([row.key for row in rows], own, strict=True))


def test_every_round_is_told() -> None:
    policy = Lasting()
    steering = Steering(policy)
    for _ in range(6):
        decision = steering.decide(ROWS, 0).decision
        results = {
            row.key: RowResult(i, 2, (7, 8), num_drafted=2, num_verified=2) for i, row in enumerate(ROWS)
        }
        steering.observe(decision, results, 0.01)
    assert [observation.accepted for observation in policy.observed] == [(1, 1)] * 6
    assert steering.stats().steps == {"pays": [0, 0, 6]}


def test_a_policy_that_fails_is_not_repeated() -> None:
    steering = Steering(Lasting(fails_at=1))
    decision = steering.decide(ROWS, 0).decision
    steering.observe(decision, {}, 0.01)
    assert steering.decide(ROWS, 0).depths == {"a": 0, "b": 0}
