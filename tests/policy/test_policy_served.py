"""Corrections from served rounds."""

from __future__ import annotations

import math
import random

import pytest

from paceline.policy.served import ServedCosts, bucket

CELL = (4, 1, 7)


def take_turns(served: ServedCosts, num: int, plain_seconds: float = 0.01) -> None:
    """`CELL` and plain rounds, one after the other, as predicted or as plain ones are said to take."""
    for _ in range(num):
        served.observe(*CELL, 0.01, 0.01)
        served.observe(4, 0, 4, 0.01, plain_seconds)


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
    assert served.factor(*CELL) == pytest.approx(3, rel=0.01)
    assert served.drift < 1.1  # and a few rounds more bring that down
    for _ in range(8):
        served.observe(*CELL, 0.01, 0.03)
    assert served.factor(*CELL) * served.drift == pytest.approx(3, rel=0.02)
    assert served.num_visits(4, 1) == 64


def test_a_slower_machine_is_slower_everywhere() -> None:
    served = ServedCosts()
    take_turns(served, 100)
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
    assert served.factor(4, 1, 8) == pytest.approx(2, rel=0.06)  # as far as noise cannot tell
    assert served.factor(4, 0, 4) == pytest.approx(4, rel=0.01)  # the geometric mean
    assert served.num_visits(4, 3) == 0


def test_what_a_table_gets_wrong_at_a_load_is_expected_at_loads_like_it() -> None:
    served = ServedCosts()
    for _ in range(5):
        served.observe(8, 0, 8, 0.01, 0.01)
        served.observe(8, 1, 10, 0.01, 0.02)
    served.observe(9, 0, 9, 0.01, 0.01)
    near, far = served.factor(9, 1, 11), served.factor(20, 1, 22)
    assert near == pytest.approx(2 ** (2**-0.5), rel=0.05)
    served.observe(20, 0, 20, 0.01, 0.01)
    far = served.factor(20, 1, 22)
    assert 1.0 < far < 1.05
    assert served.factor(9, 3, 12) == pytest.approx(served.factor(9, 0, 9), rel=0.02)  # nothing says better


def test_surprises_are_against_what_was_expected_of_a_load() -> None:
    served = ServedCosts()
    served.observe(1, 2, 3, 0.01, 0.03)
    assert served.surprises == {}  # nothing to compare it with: the machine may be slow
    served.observe(1, 0, 1, 0.01, 0.03)
    assert served.surprises == {0: {1: pytest.approx(0.0, abs=1e-6)}}
    served.observe(1, 1, 2, 0.01, 0.09)
    assert served.surprises[1][1] == pytest.approx(math.log(3), abs=0.06)
    for _ in range(2):
        served.observe(1, 1, 2, 0.01, 0.03)
    assert served.surprises[1][1] == pytest.approx(0.0, abs=0.01)  # it was a stall: the median says so
    assert (served.num_visits(1, 1), served.num_rounds(1, 1, 2), served.num_rounds(1, 1, 3)) == (3, 3, 0)


def test_a_difference_within_noise_is_taken_for_noise() -> None:
    served = ServedCosts()
    served.observe(1, 0, 1, 0.01, 0.01)
    served.observe(1, 1, 2, 0.01, 0.0102)
    served.observe(1, 2, 3, 0.01, 0.0101)
    served.observe(1, 3, 4, 0.01, 0.013)
    same = {served.factor(1, depth, depth + 1) for depth in range(3)}
    assert max(same) == pytest.approx(min(same))
    assert served.factor(1, 3, 4) / max(same) == pytest.approx(1.3, abs=0.11)


def test_rounds_of_one_cell_in_a_row_tell_the_machine_not_the_cell() -> None:
    """The machine becomes slower while one cell runs: cells compare as before."""
    served = ServedCosts()
    take_turns(served, 30)
    for _ in range(200):
        served.observe(*CELL, 0.01, 0.016)
    assert served.drift == pytest.approx(1.6, rel=0.02)
    assert served.factor(4, 0, 4) / served.factor(*CELL) == pytest.approx(1.0, abs=0.02)


def test_what_was_learnt_long_ago_gives_way() -> None:
    def seen(num_between: int) -> float:
        served = ServedCosts()
        take_turns(served, 40, plain_seconds=0.012)
        for _ in range(num_between):
            served.observe(*CELL, 0.01, 0.01)
        for _ in range(3):
            served.observe(4, 0, 4, 0.01, 0.01)
            served.observe(*CELL, 0.01, 0.01)
        return served.factor(4, 0, 4)

    assert seen(3000) < seen(5)


def test_prompts_have_a_correction_of_their_own() -> None:
    served = ServedCosts()
    assert served.prompt_factor(4, 9) == 1.0
    served.observe(4, 0, 4, 0.01, 0.02)
    assert served.prompt_factor(4, 9) == pytest.approx(2.0)  # as plain rounds
    for _ in range(30):
        served.observe_prompt(9, 0.1, 0.07)
    assert served.prompt_factor(4, 9) == pytest.approx(0.7, rel=0.01)
    assert served.prompt_factor(4, 12) == pytest.approx(0.7, rel=0.01)  # as others
    served.observe_prompt(12, 0.4, 0.4)
    assert served.prompt_factor(4, 12) == pytest.approx(1.0)
    assert served.prompt_factor(4, 9) == pytest.approx(0.7, rel=0.01)
    served.observe_prompt(9, 0.1, 100.0)
    assert served.prompt_factor(4, 9) < 1.0  # the machine stood still
    for _ in range(30):
        served.observe_prompt(9, 0.1, -0.1)
    assert served.prompt_factor(4, 9) == 0.25


def test_noise_is_learnt() -> None:
    served, draw = ServedCosts(), random.Random(2)
    for _ in range(600):
        served.observe(*CELL, 0.01, 0.01 * math.exp(draw.gauss(0, 0.12)))
    assert served.noise == pytest.approx(0.12, rel=0.25)
