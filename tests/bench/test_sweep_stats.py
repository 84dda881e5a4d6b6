"""The statistics against answers known beforehand."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.report import show_interval
from paceline.bench.stats import (
    bootstrap,
    crossing,
    crossover,
    mean_of_medians,
    median_interval,
    paired_ratios,
    quantile,
    spread,
)

RATIOS = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=12)


def test_ratios_are_taken_round_by_round() -> None:
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="1 values cannot be paired with 2"):
        paired_ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        paired_ratios([1.0], [0.0])


def test_drift_cancels_in_pairs() -> None:
    plain = [100.0, 90.0, 50.0, 20.0]
    got = median_interval(paired_ratios([1.3 * rate for rate in plain], plain))
    assert (got.low, got.estimate, got.high) == pytest.approx((1.3, 1.3, 1.3))


def test_quantiles_of_infinite_values() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5
    assert quantile([1.0, math.inf], 0.25) == 1.0
    assert quantile([1.0, math.inf], 0.75) == math.inf
    assert quantile([-math.inf, -math.inf], 0.4) == -math.inf


@given(RATIOS)
def test_an_interval_holds_its_median_and_stays_within_the_values(ratios: list[float]) -> None:
    got = median_interval(ratios)
    assert got.estimate == statistics.median(ratios)
    assert min(ratios) <= got.low <= got.estimate <= got.high <= max(ratios)
    assert got == median_interval(ratios), "the same seed gives the same interval"


@given(st.floats(0.1, 10))
def test_one_value_says_nothing_of_others(ratio: float) -> None:
    got = median_interval([ratio])
    assert (got.estimate, got.low, got.high, got.num) == (ratio, -math.inf, math.inf, 1)
    got = mean_of_medians([[ratio] * 5, [ratio]])
    assert (got.estimate, got.low, got.high) == (pytest.approx(ratio), -math.inf, math.inf)


def test_an_interval_says_why_it_is_none() -> None:
    assert show_interval(median_interval([0.98])) == "0.980 (no interval: one round)"
    assert show_interval(mean_of_medians([[1.0, 1.0], [0.9]])) == "0.950 (no interval: a load of one round)"
    assert show_interval(median_interval([0.98, 0.98])) == "0.980 (0.980–0.980)"


def test_equal_values_leave_no_doubt() -> None:
    got = median_interval([0.98] * 5)
    assert (got.low, got.estimate, got.high, got.num) == (0.98, 0.98, 0.98, 5)


def test_the_interval_of_a_mean_is_the_textbooks() -> None:
    """For the mean of many normal values the bootstrap must agree with ±1.96 sd / sqrt(n)."""
    draw = random.Random(3)
    values = [draw.gauss(1.0, 0.1) for _ in range(200)]
    got = bootstrap([values], lambda groups: statistics.fmean(groups[0]))
    half = 1.96 * statistics.pstdev(values) / math.sqrt(200)
    assert got.high - got.estimate == pytest.approx(half, rel=0.1)
    assert got.estimate - got.low == pytest.approx(half, rel=0.1)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """95 % of the intervals of a median, from 25 values, hold the true one: between 88 and 99 here."""
    draw = random.Random(5)
    num_hits = 0
    for _ in range(200):
        values = [draw.gauss(1.0, 0.05) for _ in range(25)]
        got = bootstrap([values], lambda groups: statistics.median(groups[0]), num=400)
        num_hits += got.low <= 1.0 <= got.high
    assert 176 <= num_hits <= 198


def test_an_average_weighs_columns_equally() -> None:
    got = mean_of_medians([[1.0, 1.0, 1.0], [0.9, 0.9, 5.0]])
    assert got.estimate == pytest.approx(0.95)
    assert got.num == 6


def test_nothing_to_draw_from() -> None:
    for groups in ([], [[1.0], []]):
        with pytest.raises(ValueError, match="nothing to draw from"):
            bootstrap(groups, lambda drawn: 1.0)


def test_crossing_between_two_loads() -> None:
    # Log-linear: halfway in log load, from 1.2 to 1/1.2.
    assert crossing([2, 8], [1.2, 1 / 1.2]) == pytest.approx(4.0)
    assert crossing([1, 2, 4], [1.5, 1.0, 0.5]) == 2.0


def test_crossing_beyond_what_was_measured() -> None:
    assert crossing([1, 2], [0.99, 2.0]) == -math.inf
    assert crossing([1, 2], [1.01, 1.0]) == math.inf


@given(st.lists(st.floats(0.2, 5.0), min_size=2, max_size=6))
def test_a_crossing_lies_where_the_sign_changes(ratios: list[float]) -> None:
    loads = [2.0**i for i in range(len(ratios))]
    at = crossing(loads, ratios)
    if math.isfinite(at):
        first = next(i for i, ratio in enumerate(ratios) if ratio < 1)
        assert loads[first - 1] <= at <= loads[first]


def test_a_crossover_has_an_interval() -> None:
    loads = [2.0, 8.0]
    certain = crossover(loads, [[1.2] * 5, [1 / 1.2] * 5])
    assert (certain.low, certain.high) == pytest.approx((4.0, 4.0))
    doubtful = crossover(loads, [[1.2, 1.1, 1.3, 1.15, 1.25], [0.8, 0.9, 0.85, 0.7, 1.02]])
    assert doubtful.low < doubtful.estimate < doubtful.high
    open_ended = crossover(loads, [[1.2] * 5, [0.9, 1.1, 1.1, 0.9, 0.95]])
    assert open_ended.high == math.inf


def test_spread_is_the_whole_range() -> None:
    got = spread([3.0, 1.0, 2.0])
    assert (got.median, got.low, got.high, got.num) == (2.0, 1.0, 3.0, 3)
