"""Traces: read, replayed, and what a policy lost in hindsight."""

from __future__ import annotations

import random
from typing import Any

import pytest
from policy_simulator import TRUTH

from paceline.policy import (
    Fixed,
    Governor,
    Load,
    PolicyError,
    Reason,
    RowView,
    Threshold,
    fixed_depths,
    read_trace,
    regret,
    replay_trace,
)
from paceline.policy.types import Decision

DEPTHS = [0, 1, 2, 3, 4]


def requests(
    num: int, length: int, chance: float, spacing: float, max_rows: int = 16, **more: Any
) -> list[Any]:
    """A trace of requests, a new one every `spacing` seconds."""
    draw = random.Random(7)

    def matched() -> int:
        num = 0
        while num < DEPTHS[-1] and draw.random() < chance:
            num += 1
        return num

    header = {
        "schema": 1,
        "kind": "requests",
        "depths": DEPTHS,
        "costs": TRUTH.to_dict(),
        "max_rows": max_rows,
    }
    records = [
        {
            "key": i,
            "arrival": spacing * i,
            "prompt_len": 20,
            "matched": [matched() for _ in range(length)],
            **more,
        }
        for i in range(num)
    ]
    return [header, *records]


def steps(depth: int, num_rows: int, num: int = 50) -> list[Any]:
    draw = random.Random(7)
    header = {"schema": 1, "kind": "steps", "depths": DEPTHS, "costs": TRUTH.to_dict()}
    load = Load(num_rows, 1000)
    seconds = 2 * TRUTH.step_seconds(load, [("", depth)] * num_rows)
    records = [
        {
            "context_len": 1000,
            "num_prompt_tokens": 0,
            "seconds": seconds,
            "rows": [[i, depth, draw.randint(0, depth)] for i in range(num_rows)],
        }
        for _ in range(num)
    ]
    return [header, *records]


class TestRequests:
    def test_every_token_is_made_at_any_depth(self) -> None:
        trace = read_trace(requests(6, 50, 0.6, 0.1))
        for depth in DEPTHS:
            assert (
                replay_trace(trace, Fixed(depth)).tokens >= 6 * 50 - 6
            )  # the last rounds of an answer fit in it
            assert replay_trace(trace, Fixed(depth)).tokens == 6 * 50

    def test_a_fixed_depth_takes_the_time_its_rounds_take(self) -> None:
        trace = read_trace(requests(1, 4, 0.0, 0.0))
        result = replay_trace(trace, Fixed(0))
        expected = TRUTH.step_seconds(Load(0, 0, 20), ())
        expected += sum(TRUTH.step_seconds(Load(1, 20 + n), [("", 0)]) for n in range(4))
        assert result.seconds == pytest.approx(expected)
        assert result.rounds_by_depth == {0: 4}

    def test_the_governor_regrets_little_where_one_depth_is_best(self) -> None:
        trace = read_trace(requests(30, 150, 0.7, 0.8))
        outcome = regret(trace, Governor(TRUTH, tuple(DEPTHS)))
        assert outcome.share < 0.05
        assert outcome.best_depth > 0

    def test_and_gains_where_the_load_comes_and_goes(self) -> None:
        """One after another, then all at once: no depth is best in both."""
        calm = requests(12, 200, 0.75, 3.0)
        rush = requests(24, 200, 0.75, 0.0, max_rows=24)[1:]
        for record in rush:
            record.update(key=f"rush {record['key']}", arrival=40.0)
        calm[0]["max_rows"] = 24
        trace = read_trace([*calm, *rush])
        governor = regret(trace, Governor(TRUTH, tuple(DEPTHS)))
        assert governor.share < 0.02
        assert governor.policy.rounds_by_reason[Reason.PAYS] > 0

    def test_shadow_drafts_are_compared_with_what_the_trace_holds(self) -> None:
        governor = Governor(TRUTH, tuple(DEPTHS))
        result = replay_trace(read_trace(requests(24, 700, 0.05, 0.0, max_rows=24)), governor)
        assert result.rounds_by_reason[Reason.PROBE] >= 10
        assert governor.acceptance()[0] == pytest.approx(0.05, abs=0.1)

    def test_requests_wait_while_all_rows_are_taken(self) -> None:
        trace = read_trace(requests(4, 30, 0.5, 0.0, max_rows=1))
        alone = read_trace(requests(1, 30, 0.5, 0.0, max_rows=1))
        assert replay_trace(trace, Fixed(0)).seconds == pytest.approx(
            4 * replay_trace(alone, Fixed(0)).seconds
        )

    def test_pins_are_kept(self) -> None:
        trace = read_trace(requests(2, 30, 0.5, 0.0, pinned=2, drafter="ngram"))
        result = replay_trace(trace, Governor(TRUTH, tuple(DEPTHS)))
        assert set(result.rounds_by_reason) <= {Reason.PINNED, Reason.CAPACITY}

    def test_a_policy_that_ignores_its_rows_is_found_out(self) -> None:
        class Careless(Fixed):
            def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
                return Decision(load, rows, (9,) * len(rows), Reason.PAYS)

        with pytest.raises(PolicyError, match="9 deep"):
            replay_trace(read_trace(requests(1, 5, 0.5, 0.0)), Careless(0))

    def test_an_empty_trace_has_no_rate(self) -> None:
        outcome = regret(read_trace(requests(0, 1, 0.5, 0.0)), Fixed(0))
        assert (outcome.policy.rate, outcome.share) == (0, 0)


class TestSteps:
    def test_recorded_steps_at_the_depth_they_ran(self) -> None:
        trace = read_trace(steps(4, 3))
        result = replay_trace(trace, Fixed(4))
        assert result.seconds == pytest.approx(sum(step.seconds for step in trace.steps))
        assert result.tokens == sum(3 + sum(step.accepted) for step in trace.steps)

    def test_shallower_ones_are_cut_and_scaled(self) -> None:
        trace = read_trace(steps(4, 3))
        result = replay_trace(trace, Fixed(1))
        load = Load(3, 1000)
        assert result.seconds == pytest.approx(50 * 2 * TRUTH.step_seconds(load, [("", 1)] * 3))
        assert result.tokens == sum(3 + sum(min(1, a) for a in step.accepted) for step in trace.steps)
        assert set(regret(trace, Threshold(2, 2, 2)).fixed) == set(DEPTHS)

    def test_deeper_ones_are_refused(self) -> None:
        with pytest.raises(PolicyError, match="step 1: a row drafts 3 deep, the trace holds 2"):
            replay_trace(read_trace(steps(2, 3)), Fixed(3))

    def test_pins_are_read(self) -> None:
        records = steps(4, 1, 1)
        records[1]["rows"][0].append(2)
        assert read_trace(records).steps[0].rows[0].pinned == 2

    def test_rows_without_room_are_not_taken_deeper(self) -> None:
        records = steps(4, 2, 1)
        records[1]["rows"] = [["a", 4, 1], ["b", 1, 1, None, 1]]
        trace = read_trace(records)
        assert [row.max_depth for row in trace.steps[0].rows] == [4, 1]
        assert replay_trace(trace, Fixed(4)).tokens == 4

    def test_fixed_depths_are_those_that_the_trace_holds(self) -> None:
        assert list(fixed_depths(read_trace(steps(2, 3)))) == [0, 1, 2]
        own = steps(1, 1, 1)
        own[1]["rows"] = [["a", 1, 0, 3, 4]]  # its own depth was 3, and what ran was less
        with pytest.raises(PolicyError, match="a row drafts 3 deep, the trace holds 1"):
            fixed_depths(read_trace(own))

    def test_fixed_depths_serve_several_policies(self) -> None:
        trace = read_trace(steps(2, 3))
        fixed = fixed_depths(trace)
        assert regret(trace, Fixed(1), fixed) == regret(trace, Fixed(1))


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


GOOD = requests(1, 3, 0.5, 0.0)
RAN = steps(2, 1, 1)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no header"),
        ([{}], "no header"),
        ([GOOD[0] | {"schema": 9}], "schema must be 1"),
        ([GOOD[0] | {"kind": "dreams"}], "kind"),
        ([GOOD[0] | {"max_rows": 0}], "max_rows"),
        ([_without(GOOD[0], "depths")], "record 1: depths is missing"),
        ([GOOD[0] | {"costs": {}}], "record 1: cost model"),
        ([GOOD[0], _without(GOOD[1], "matched")], "record 2: matched is missing"),
        ([GOOD[0], GOOD[1] | {"matched": []}], "record 2: matched must not be empty"),
        ([GOOD[0], GOOD[1], GOOD[1] | {"matched": [5]}], "record 3: matched must be 0 to 4"),
        ([GOOD[0], GOOD[1] | {"arrival": "soon"}], "record 2"),
        ([RAN[0], RAN[1] | {"rows": [[1, 2, 3]]}], "record 2: accepted must be 0 to 2, got 3"),
        ([RAN[0], RAN[1] | {"seconds": 0}], "record 2: seconds"),
    ],
)
def test_a_wrong_record_is_named(records: list[Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        read_trace(records)
