"""A policy may fail, and a request may go deeper than a policy thinks: the engine goes on."""

from __future__ import annotations

import logging

import pytest

from paceline.config import EngineConfig
from paceline.engine.policies import make_policy
from paceline.engine.steering import Candidate, Steering
from paceline.errors import ConfigError
from paceline.policy import Decision, Load, Observation, Reason, RowView
from paceline.step import RowResult


def run(steering: Steering, depth: int, num_steps: int = 4) -> list[int]:
    """Rounds of one row with its own depth, in which every draft is right; the depths that it got."""
    found: list[int] = []
    for i in range(num_steps):
        chosen = steering.decide([Candidate("a", 16, depth, 20 + i)], 0)
        found.append(chosen.depths["a"])
        tokens = tuple(range(1 + depth))
        got = RowResult(0, depth, tokens, num_drafted=depth, num_verified=depth)
        steering.observe(chosen.decision, {"a": got}, 0.01)
    return found


@pytest.mark.parametrize("depth", [1, 6, 7, 8, 16])
def test_a_request_deeper_than_the_governor_goes(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    steering = Steering(make_policy("auto", "governor", 16, None))
    assert run(steering, depth) == [depth] * 4
    assert not caplog.records
    assert steering.stats().acceptance is not None


class Failing:
    def __init__(self, when: str) -> None:
        self.when = when

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        if self.when == "decide":
            raise ZeroDivisionError("no rate")
        return Decision(load, rows, (0,) * len(rows), Reason.PAYS)

    def observe(self, observation: Observation) -> None:
        raise IndexError("out of range")


@pytest.mark.parametrize("when", ["decide", "observe"])
def test_a_policy_that_fails_is_given_up_once(when: str, caplog: pytest.LogCaptureFixture) -> None:
    steering = Steering(Failing(when))
    with caplog.at_level(logging.ERROR):
        assert run(steering, 3) == [3] * 4, "a request's own depth still holds"
    assert len(caplog.records) == 1
    error = {"decide": "ZeroDivisionError: no rate", "observe": "IndexError: out of range"}[when]
    assert steering.stats().error == error
    assert steering.decide([Candidate("b", 8, None, 5)], 0).depths == {"b": 0}


@pytest.mark.parametrize(
    "words",
    ["table:1=9", "table:", "table:4", "table:4=3,4=2", "threshold:4:9", "threshold:", "threshold:-5"],
)
def test_words_that_make_no_policy(words: str) -> None:
    with pytest.raises(ConfigError, match="policy"):
        make_policy("auto", words, 8, None)
    assert EngineConfig(policy="table:4=3").policy == "table:4=3"
