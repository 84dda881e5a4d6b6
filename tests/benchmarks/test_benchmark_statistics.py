"""Prompts, turns, ratios and bars: what every benchmark's figures rest on."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import (
    Bar,
    PromptCutter,
    Spread,
    TimedRun,
    common_prefix_len,
    paired_ratios,
    read_prompts,
    take_turns,
)

positive = st.floats(0.01, 100.0)


def test_prompts_are_mixed_the_same_way_every_time() -> None:
    texts = read_prompts()
    assert texts == read_prompts()
    assert sorted(texts) == sorted(read_prompts(seed=1))
    assert texts != read_prompts(seed=1)
    assert all(texts)


@given(text_len=st.integers(1, 60), lengths=st.lists(st.integers(1, 40), max_size=80))
def test_cut_prompts_are_windows_of_the_text_and_none_begins_twice_at_one_place(
    text_len: int, lengths: list[int]
) -> None:
    cutter = PromptCutter(range(text_len))
    begins: set[int] = set()
    for length in lengths:
        if fresh := set(range(text_len - length + 1)) - begins:
            prompt = cutter.cut(length)
            assert prompt == list(range(prompt[0], prompt[0] + length))
            assert prompt[0] in fresh
            begins.add(prompt[0])
        else:
            with pytest.raises(ValueError, match=f"no {length} fresh tokens are left"):
                cutter.cut(length)


def test_windows_follow_one_another_and_start_over_a_token_later() -> None:
    cutter = PromptCutter(range(9))
    assert cutter.batch(2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cutter.batch(2, 4) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_sides_take_turns_and_change_who_begins() -> None:
    calls: list[str] = []

    def side(name: str):
        def run(given: int) -> int:
            calls.append(f"{name}{given}")
            return given * 10

        return run

    rounds = take_turns({"a": side("a"), "b": side("b")}, [1, 2, 3], pause=0)
    assert calls == ["a1", "b1", "b2", "a2", "a3", "b3"]
    assert rounds == [{"a": 10, "b": 10}, {"a": 20, "b": 20}, {"a": 30, "b": 30}]
    assert [list(outcomes) for outcomes in rounds] == [["a", "b"]] * 3


@given(st.lists(st.tuples(positive, positive, positive), min_size=1))
def test_paired_ratios_do_not_see_a_drift_that_hits_both_sides(
    rounds: list[tuple[float, float, float]],
) -> None:
    steady = [{"ours": ours, "theirs": theirs} for ours, theirs, _ in rounds]
    drifting = [{"ours": ours * drift, "theirs": theirs * drift} for ours, theirs, drift in rounds]
    expected, found = (paired_ratios(values, "ours", "theirs") for values in (steady, drifting))
    assert found.median == pytest.approx(expected.median)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found.num == len(rounds)


def test_a_ratio_of_medians_is_not_taken_for_the_median_of_ratios() -> None:
    rounds = [{"a": 1.0, "b": 1.0}, {"a": 10.0, "b": 5.0}, {"a": 20.0, "b": 5.0}]
    assert paired_ratios(rounds, "a", "b").median == 2.0
    assert paired_ratios(rounds, "b", "a") == Spread(0.5, 0.25, 1.0, 3)


@given(st.lists(positive, min_size=1))
def test_a_spread_is_the_median_between_its_ends(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread == Spread(statistics.median(values), min(values), max(values), len(values))
    assert spread.low <= spread.median <= spread.high


def test_a_spread_of_nothing_is_an_error() -> None:
    with pytest.raises(statistics.StatisticsError):
        Spread.of([])


def test_a_spread_shows_its_ends_unless_there_is_one_value() -> None:
    assert Spread.of([1.0, 3.0, 2.0]).show(1) == "2.0 (1.0–3.0)"
    assert Spread.of([1.234]).show() == "1.23"


@pytest.mark.parametrize(
    ("op", "met_by"),
    [(">=", {2.0, 3.0}), (">", {3.0}), ("<=", {1.0, 2.0}), ("<", {1.0}), ("==", {2.0})],
)
def test_a_bar_is_met_as_its_op_says(op, met_by: set[float]) -> None:
    assert {value for value in (1.0, 2.0, 3.0) if Bar("x", value, op, 2.0).is_met} == met_by


def test_a_bar_without_a_value_is_neither_met_nor_missed() -> None:
    bar = Bar("x", None, ">=", 1.4)
    assert bar.is_met is None
    assert [b.show() for b in (bar, Bar("x", 1.4, ">=", 1.4), Bar("x", 1.39, ">=", 1.4))] == [
        "≥ 1.4 (not measured)",
        "≥ 1.4 ✓",
        "≥ 1.4 ✗",
    ]


def test_rates_of_a_run() -> None:
    run = TimedRun(1.0, 2.0, 100, 4.0, 120, 0, ((1, 2),))
    assert (run.decode_rate, run.whole_rate) == (50.0, 30.0)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_answers_agree_up_to_their_common_prefix(left: list[int], right: list[int]) -> None:
    num = common_prefix_len(left, right)
    assert left[:num] == right[:num]
    assert left[num : num + 1] != right[num : num + 1] or num == min(len(left), len(right))
