"""What is counted of decisions: reasons, predictions, gains, shadows and re-entries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.gains import OFF_STEPS, REENTRY_ROUNDS
from paceline.engine.stats import PolicyStats
from paceline.engine.steering import NUM_RECENT, Candidate, Steering
from paceline.policy import CostModel, Decision, Fixed, Governor, Load, Observation, Reason, RowView
from paceline.step import RowResult


class Scripted:
    """A policy that decides what a test wants, and keeps what it is told."""

    def __init__(self) -> None:
        self.depth = 0
        self.reason = Reason.PAYS
        self.shadow: tuple[int, ...] = ()
        self.is_control = False
        self.predicted: tuple[float, float] | None = None  # the step, and the same step plain
        self.told: list[Observation] = []

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        depths = tuple([min(self.depth, row.max_depth) for row in rows])
        seconds, plain = self.predicted or (None, None)
        return Decision(
            load, rows, depths, self.reason, self.shadow, 3 if self.shadow else 0, self.is_control,
            predicted_tokens=None, predicted_seconds=seconds, plain_seconds=plain,
        )  # fmt: skip

    def observe(self, observation: Observation) -> None:
        self.told.append(observation)


class Loop:
    """Steps of rows that accept as many drafts as a test says."""

    def __init__(self, keys: Sequence[str] = ("a",)) -> None:
        self.policy = Scripted()
        self.steering = Steering(self.policy)
        self.keys = list(keys)

    def step(
        self,
        depth: int = 0,
        accepted: int = 0,
        seconds: float | None = 0.01,
        pinned: int | None = None,
        num_prompt_tokens: int = 0,
        missing: Sequence[str] = (),
    ) -> None:
        self.policy.depth = depth
        rows = [Candidate(key, 8, pinned, 100) for key in self.keys]
        chosen = self.steering.decide(rows, num_prompt_tokens)
        results = {}
        for row, (key, deep) in enumerate(chosen.depths.items()):
            words = tuple(range(1 + min(accepted, deep)))
            shadow = (7, 8) if key in chosen.shadow_depths else ()
            results[key] = RowResult(row, deep, words, num_drafted=deep, num_verified=deep, shadow_ids=shadow)
        for key in missing:
            del results[key]
        self.steering.observe(chosen.decision, results, seconds)

    @property
    def stats(self) -> PolicyStats:
        return self.steering.stats()


def test_steps_are_counted_by_reason_and_by_the_deepest_row() -> None:
    loop = Loop(["a", "b"])
    loop.step(depth=2)
    loop.step(depth=2, pinned=5)
    loop.policy.reason = Reason.GUARD
    loop.policy.is_control = True
    loop.step(seconds=0.03)
    stats = loop.stats
    assert stats.steps == {"pays": [0, 0, 1, 0, 0, 1], "guard": [1]}
    assert stats.seconds == pytest.approx({"pays": 0.02, "guard": 0.03})
    assert stats.num_controls == 1


def test_predictions_are_compared_where_the_step_ran_as_decided() -> None:
    loop = Loop()
    loop.policy.predicted = (0.02, 0.01)
    loop.step(depth=2, seconds=0.025)
    loop.step(depth=2, pinned=3)  # deeper than decided
    loop.step(depth=2, seconds=None)
    loop.policy.shadow = (0,)  # its drafting is no part of the prediction
    loop.step()
    loop.policy.predicted, loop.policy.shadow = None, ()
    loop.step(depth=2)
    assert (loop.stats.predicted_seconds, loop.stats.measured_seconds) == (0.02, 0.025)


def test_the_gain_is_the_plain_time_of_the_same_tokens() -> None:
    loop = Loop(["a", "b"])
    loop.policy.predicted = (0.02, 0.01)
    loop.step(depth=2, accepted=2, seconds=0.02)  # 3 tokens each: 0.03 seconds, plainly
    loop.step(depth=2, accepted=2, seconds=0.02, num_prompt_tokens=30)
    loop.step(depth=2, accepted=2, seconds=0.02, pinned=2)
    loop.step(depth=2, accepted=2, seconds=0.02, missing=["b"])
    assert (loop.stats.plain_seconds, loop.stats.decoding_seconds) == pytest.approx((0.03, 0.02))


def test_shadow_drafts_are_counted_as_made() -> None:
    loop = Loop(["a", "b", "c"])
    loop.policy.shadow = (0, 2)
    loop.step()
    loop.policy.shadow = ()
    loop.step()
    assert (loop.stats.num_shadow_steps, loop.stats.num_shadow_drafts) == (1, 4)


class TestReentry:
    def test_the_first_rounds_after_a_while_are_kept_apart(self) -> None:
        loop = Loop()
        for _ in range(20):
            loop.step(depth=3, accepted=3)
        assert loop.stats.num_reentry_rounds == 0
        for _ in range(OFF_STEPS):
            loop.step()
        for _ in range(REENTRY_ROUNDS):
            loop.step(depth=2, accepted=1)
        for _ in range(20):
            loop.step(depth=3, accepted=3)
        stats = loop.stats
        assert (stats.num_reentry_rounds, stats.num_reentry_drafted) == (REENTRY_ROUNDS, 2 * REENTRY_ROUNDS)
        assert (stats.num_reentry_accepted, stats.reentry_accepted_per_pos) == (
            REENTRY_ROUNDS,
            [REENTRY_ROUNDS],
        )

    def test_a_control_is_no_absence(self) -> None:
        loop = Loop()
        for _ in range(5):
            loop.step(depth=2)
            for _ in range(OFF_STEPS - 1):
                loop.step()
        assert loop.stats.num_reentry_rounds == 0

    def test_a_new_row_comes_back_only_if_it_has_waited_itself(self) -> None:
        loop = Loop()
        for _ in range(OFF_STEPS):
            loop.step()
        loop.keys.append("new")
        loop.step(depth=1)
        assert loop.stats.num_reentry_rounds == 1

    def test_rows_that_end_leave_nothing_behind(self) -> None:
        loop = Loop(["a", "b"])
        for _ in range(OFF_STEPS):
            loop.step()
        loop.policy.depth = 1
        chosen = loop.steering.decide([Candidate("a", 8, None, 9), Candidate("b", 8, None, 9)], 0)
        loop.steering.ended("a")
        got = RowResult(1, 1, (1, 2), num_drafted=1, num_verified=1)
        loop.steering.observe(chosen.decision, {"b": got}, 0.1)
        loop.steering.ended("b")
        assert loop.stats.num_reentry_rounds == 1
        assert loop.steering._gains._rows == {}


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.none() | st.integers(0, 5), st.booleans()),
        max_size=60,
    )
)
def test_sums_agree_with_each_other(script: list[tuple[int, int, int | None, bool]]) -> None:
    loop = Loop(["a", "b"])
    loop.policy.predicted = (0.01, 0.01)
    for depth, accepted, pinned, has_time in script:
        loop.step(depth, accepted, 0.01 if has_time else None, pinned)
    stats = loop.stats
    assert sum(map(sum, stats.steps.values())) == len(script)
    timed = 0.01 * sum(has_time for *_, has_time in script)
    assert sum(stats.seconds.values()) == pytest.approx(timed)
    assert stats.measured_seconds <= timed + 1e-9
    assert stats.decoding_seconds <= timed + 1e-9
    assert stats.num_reentry_accepted == sum(stats.reentry_accepted_per_pos)
    assert stats.num_reentry_accepted <= stats.num_reentry_drafted
    assert [step.number for step in stats.recent] == list(range(1, len(script) + 1))[-NUM_RECENT:]


def test_the_last_steps_are_told_with_what_was_thought_of_them() -> None:
    loop = Loop(["a", "b", "c"])
    loop.policy.predicted = (0.02, 0.01)
    loop.step(depth=2, accepted=1, seconds=0.03, num_prompt_tokens=5)
    [step] = loop.stats.recent
    assert (step.number, step.reason, step.rows_by_depth) == (1, "pays", [0, 0, 3])
    assert (step.num_prompt_tokens, step.num_tokens, step.num_shadow) == (5, 6, 0)
    assert (step.predicted_seconds, step.plain_seconds, step.seconds) == (0.02, 0.01, 0.03)


def test_only_a_policy_that_explains_itself_is_asked() -> None:
    stats = Steering(Fixed(2)).stats()
    assert (stats.drift, stats.acceptance, stats.num_guard_trips) == (None, [], 0)
    governor = Governor(CostModel.prior(), (0, 1, 2))
    stats = Steering(governor).stats()
    assert (stats.drift, stats.acceptance) == (governor.drift, list(governor.acceptance()))
    assert len(stats.acceptance) == 2
