"""Corrections from served rounds."""

from __future__ import annotations

import random

import pytest

from paceline.policy.served import ServedCosts, bucket

CELL = (4, 1, 7)


def test_buckets_rise_by_half_octaves() -> None:
    buckets = [bucket(n) for n in range(1, 2000)]
    assert buckets[:4] == [1, 2, 3, 4]
    assert buckets == sorted(buckets)
    assert bucket(512) - bucket(256) == 2
    assert len(set(buckets)) < 30


def test_a_lie_is_corrected_at_once_and_an_outlier_is_not_believed() -> None:
    served = ServedCosts()
    served.observe(*CELL, 0.01, 0.03)
    assert served.factor(*CELL) == pytest.approx(3)
    for seconds in (0.03, 0.3, 0.03, 0.03):
        served.observe(*CELL, 0.01, seconds)
    assert served.factor(*CELL) == pytest.approx(3)
    for _ in range(50):
        served.observe(*CELL, 0.01, 0.03)
    served.observe(*CELL, 0.01, 3.0)
    assert served.factor(*CELL) * served.drift == pytest.approx(3, rel=0.05)
    assert served.num_visits(4, 1) == 56


def test_a_slower_machine_is_slower_everywhere() -> None:
    served = ServedCosts()
    for _ in range(100):
        served.observe(*CELL, 0.01, 0.01)
        served.observe(4, 0, 4, 0.008, 0.008)
    for _ in range(100):
        served.observe(*CELL, 0.01, 0.02)
    assert served.drift == pytest.approx(2, rel=0.25)
    assert served.drift * served.factor(*CELL) == pytest.approx(2, rel=0.02)
    assert served.drift * served.factor(4, 0, 4) == pytest.approx(2, rel=0.25)


def test_a_cell_seen_once_in_a_while_moves_its_own_price() -> None:
    served = ServedCosts()
    draw = random.Random(1)
    for i in range(3000):
        served.observe(*CELL, 0.01, 0.01 * draw.gauss(1, 0.05))
        if i % 30 == 0:
            served.observe(4, 0, 4, 0.01, 0.013 * draw.gauss(1, 0.05))
    assert served.drift == pytest.approx(1, abs=0.1)
    assert served.factor(4, 0, 4) / served.factor(*CELL) == pytest.approx(1.3, abs=0.1)


def test_what_was_not_served_is_like_its_neighbours() -> None:
    served = ServedCosts()
    assert served.factor(9, 9, 9) == 1
    served.observe(4, 1, 7, 0.01, 0.02)
    assert served.factor(4, 1, 8) == pytest.approx(2)  # same rows and depth
    assert served.factor(4, 2, 9) == pytest.approx(2)  # same rows
    assert served.factor(1, 0, 1) == pytest.approx(2)  # any
    served.observe(4, 2, 9, 0.01, 0.08)
    assert served.factor(4, 1, 8) == pytest.approx(2)
    assert served.factor(4, 0, 4) == pytest.approx(4)  # the geometric mean
    assert served.num_visits(4, 3) == 0
