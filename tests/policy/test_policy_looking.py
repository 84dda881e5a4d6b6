"""What is paid for looking: warm-up, shadows, controls; and the guard."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from itertools import pairwise

import pytest

from paceline.policy import GuardConfig, PolicyError, ShadowConfig, ShadowResult
from paceline.policy.doubt import LEAST, MOST, insurance
from paceline.policy.guard import Guard
from paceline.policy.shadow import Shadows
from paceline.policy.warmup import (
    FAR_BEHIND,
    NUM_CLOSE,
    NUM_SURE,
    SHARE,
    SPACING,
    SPACING_AGAIN,
    Warmup,
    is_sure,
    reach,
)


def far(depth: int) -> float | None:
    return 1.0


class TestWarmup:
    def test_close_rivals_are_served_again_the_closer_the_sooner(self) -> None:
        gaps: dict[int, float | None] = {0: 0.05, 1: None, 2: 0.0, 3: 0.1, 4: FAR_BEHIND}
        warmup = Warmup(tuple(gaps))
        ran: list[tuple[int, int | None]] = []
        for now in range(1, 2001):
            if warmup.is_due(5, now):
                ran.append((now, warmup.depth(5, now, lambda d: 99, lambda d: True, lambda: None, gaps.get)))
        again = {depth: [now for now, of in ran if of == depth] for depth in gaps}
        assert again[1] == again[4] == []
        assert len(again[2]) == pytest.approx(2000 / SPACING_AGAIN, abs=3)
        for depth in (0, 3):
            share = len(again[depth]) * (gaps[depth] or 0.0) / 2000
            assert SHARE / 2 < share <= SHARE

    def test_every_depth_that_might_pay_is_visited_and_then_none(self) -> None:
        warmup, visits, ran = Warmup((0, 1, 2, 3)), {0: 0, 1: 99, 2: 0, 3: 0}, []
        enough = {0: 3, 1: 99, 2: 99, 3: 0}
        for now in range(1, 300):
            depth = None
            if warmup.is_due(7, now):
                depth = warmup.depth(
                    7, now, visits.__getitem__, lambda d: visits[d] < enough[d], lambda: None, far
                )
            ran.append(depth)
            visits[1 if depth is None else depth] += 1
        assert (visits[0], visits[2], visits[3]) == (3, NUM_CLOSE, 0)
        assert ran[:SPACING] == [None] * SPACING
        assert ran[100:] == [None] * 199
        explored = [now for now, depth in enumerate(ran) if depth is not None]
        assert min(b - a for a, b in pairwise(explored)) == SPACING + 1  # one at a time

    def test_a_depth_that_is_never_timed_is_given_up(self) -> None:
        warmup = Warmup((0, 1))
        ran = [
            warmup.depth(1, now, lambda d: 0, lambda d: True, lambda: None, far)
            for now in range(1, 2000)
            if warmup.is_due(1, now)
        ]
        assert len([depth for depth in ran if depth is not None]) == 40

    def test_doubt_about_acceptance_comes_first_and_drafts_for_a_while(self) -> None:
        warmup, doubts, ran = Warmup((0, 1, 2)), [2] * 12, []
        for now in range(1, 200):
            if warmup.is_due(1, now):
                doubt = lambda: doubts.pop() if doubts else None  # noqa: E731
                ran.append(warmup.depth(1, now, lambda d: 0, lambda d: True, doubt, far))
        assert ran[:48] == [2] * 48
        assert set(ran[48:]) == {0}

    def test_how_much_better_a_depth_may_be_shrinks_with_its_rounds(self) -> None:
        reaches = [reach(num, 3.0, 0.05) for num in range(9)]
        assert reaches[0] == 3.0
        assert reaches == sorted(reaches, reverse=True)
        assert reach(4, 3.0, 0.05) == pytest.approx(1.0513, abs=1e-4)

    def test_a_surprise_is_looked_at_again(self) -> None:
        assert is_sure(1, -0.1, 0.05)
        assert not is_sure(1, -0.2, 0.05)
        assert not is_sure(NUM_SURE - 1, 1.1, 0.05)
        assert is_sure(NUM_SURE, 1.1, 0.05)


class TestInsurance:
    def test_nothing_served_or_nothing_measured_is_the_widest(self) -> None:
        assert insurance({}, 1, True) == MOST
        assert insurance({1: {1: 0.0}}, 1, False) == MOST

    def test_what_one_load_confirms_holds_for_others_and_a_lie_widens_it_again(self) -> None:
        by_load = {1: 0.02}
        assert insurance({1: by_load}, 1, True) == LEAST
        by_load[9] = -1.1
        assert insurance({1: by_load}, 1, True) == MOST
        narrower = []
        for load in range(10, 15):
            by_load[load] = 0.0
            narrower.append(insurance({1: by_load}, 1, True))
        assert narrower == sorted(narrower, reverse=True)
        assert narrower[0] == pytest.approx(3.0, abs=0.01)  # half of 1.1, twice
        assert narrower[-1] == LEAST

    def test_a_depth_that_was_not_served_is_as_its_nearest_and_a_little_more(self) -> None:
        surprises = {1: {1: 0.0}, 4: {1: 0.3}}
        found = [insurance(surprises, depth, True) for depth in range(7)]
        sure, wide = 1.0, math.exp(0.6)
        expected = [1.2 * sure, LEAST, 1.2 * sure, 1.2 * wide, wide, 1.2 * wide, 1.44 * wide]
        assert found == pytest.approx(expected)
        assert insurance({1: {1: 0.0}, 3: {1: 0.3}}, 2, True) == pytest.approx(1.2 * wide)  # the doubtful one


def run_shadows(
    shadows: Shadows, num_rounds: int, matched: int, seconds: float = 0.01
) -> list[tuple[int, ...]]:
    """Plain rounds of eight rows; every draft matches so far."""
    keys: list[Hashable] = list(range(8))
    planned = []
    for now in range(1, num_rounds + 1):
        picked: tuple[int, ...] = ()
        if shadows.is_due(now):
            picked = shadows.plan(now, keys, [0, 2, 3, 5, 7], 4, lambda num: 0.0002 * num)
        planned.append(picked)
        shadows.earn(seconds)
        shadows.take([ShadowResult(i, now, 4, matched) for i in picked], lambda key, depth: (1.0, 0.5))
    return planned


class TestShadows:
    @pytest.mark.parametrize("matched", [0, 1, 4])
    def test_the_share_of_time_is_bounded_at_every_moment(self, matched: int) -> None:
        spent = 0.0
        for now, picked in enumerate(run_shadows(Shadows(), 6000, matched), start=1):
            spent += 0.0002 * len(picked)
            assert spent <= 0.003 * 0.01 * now + 1e-12
        assert spent > 0

    def test_sessions_are_of_rows_that_may_for_some_steps(self) -> None:
        planned = run_shadows(Shadows(), 1000, 1)
        first = next(i for i, picked in enumerate(planned) if picked)
        assert planned[first : first + 10] == [(0, 2, 3, 5)] * 10
        assert planned[first + 10] == ()

    def test_no_news_is_looked_for_less_often_until_something_changes(self) -> None:
        config = ShadowConfig(share=0.1, interval=16, max_interval=64)
        calm, lively = Shadows(config), Shadows(config)
        assert sum(map(bool, run_shadows(calm, 2000, 1))) < sum(map(bool, run_shadows(lively, 2000, 4)))
        calm.wake(2000)
        soon = [now for now in range(2001, 2020) if calm.is_due(now)]
        assert soon

    def test_worse_news_is_looked_for_as_often(self) -> None:
        config = ShadowConfig(share=0.1)
        bad, calm = Shadows(config), Shadows(config)
        assert sum(map(bool, run_shadows(bad, 2000, 0))) > sum(map(bool, run_shadows(calm, 2000, 1)))

    def test_good_news_is_told_once(self) -> None:
        better, same = Shadows(ShadowConfig(share=0.1)), Shadows(ShadowConfig(share=0.1))
        run_shadows(better, 60, 4)
        run_shadows(same, 60, 1)
        assert [better.take_good_news(), better.take_good_news(), same.take_good_news()] == [
            True,
            False,
            False,
        ]

    def test_rows_that_end_leave_the_session(self) -> None:
        shadows = Shadows(ShadowConfig(share=0.1))
        shadows.earn(100.0)
        assert shadows.plan(1, ["a", "b"], [0, 1], 2, lambda num: 0.001) == (0, 1)
        assert shadows.plan(2, ["b"], [0], 2, lambda num: 0.001) == (0,)
        assert shadows.plan(3, ["c"], [0], 2, lambda num: 0.001) == ()

    def test_nobody_to_look_at(self) -> None:
        shadows = Shadows()
        shadows.earn(100.0)
        assert shadows.plan(1, ["a"], [], 2, lambda num: 0.001) == ()
        assert not shadows.is_due(2)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"share": -1.0},
            {"share": 0.2},
            {"num_rows": 0},
            {"num_steps": 1},
            {"interval": 0},
            {"max_interval": 1},
        ],
    )
    def test_settings_are_checked(self, wrong: dict[str, float]) -> None:
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            ShadowConfig(**wrong)  # type: ignore[arg-type]


def serve(guard: Guard, num_rounds: int, gain: float, begin: int = 0, noise: float = 0.05) -> list[str]:
    """Rounds that would draft, each worth `gain` plain ones; controls where the guard wants them."""
    draw, ran = random.Random(5), []
    for now in range(begin + 1, begin + num_rounds + 1):
        if guard.is_tripped(3, now):
            ran.append("tripped")
            guard.observe(3, True, 4, 0.01 * draw.gauss(1, noise), now)
        elif guard.wants_control(3, now):
            ran.append("control")
            guard.spend(now)
            guard.observe(3, True, 4, 0.01 * draw.gauss(1, noise), now)
        else:
            ran.append("draft")
            guard.observe(3, False, 6, 0.015 / gain * draw.gauss(1, noise), now)
    return ran


class TestGuard:
    def test_drafting_that_loses_is_stopped_for_longer_each_time(self) -> None:
        guard = Guard()
        ran = serve(guard, 20_000, 0.7)
        assert guard.num_trips >= 3
        assert ran.count("tripped") > 0.75 * len(ran)

    def test_drafting_that_wins_goes_on(self) -> None:
        guard = Guard()
        ran = serve(guard, 20_000, 1.1)
        assert guard.num_trips == 0
        assert 0.003 < ran.count("control") / len(ran) <= 0.005

    def test_controls_never_exceed_their_share(self) -> None:
        ran = serve(Guard(), 5000, 1.0)
        for num in range(1, len(ran) + 1):
            assert ran[:num].count("control") <= 0.005 * num

    def test_it_recovers_when_drafting_pays_again(self) -> None:
        guard = Guard()
        serve(guard, 2000, 0.6)
        assert guard.num_trips >= 1
        trips = guard.num_trips
        ran = serve(guard, 20_000, 1.3, begin=2000)
        assert guard.num_trips == trips
        assert "tripped" not in ran[-10_000:]
        serve(guard, 3000, 0.6, begin=22_000)  # its back-off begins small again
        ran = serve(guard, 800, 1.3, begin=25_000)
        assert "draft" in ran

    def test_a_stall_is_no_verdict(self) -> None:
        guard = Guard()
        serve(guard, 300, 1.2)
        guard.observe(3, False, 6, 5.0, 301)
        serve(guard, 3000, 1.2, begin=301)
        assert guard.num_trips == 0

    def test_old_rounds_are_not_paired_with_new_ones(self) -> None:
        guard = Guard()
        serve(guard, 50, 0.1)
        for now in range(100, 110):
            assert not guard.observe(3, True, 4, 0.01, now)
        assert not guard.wants_control(3, 500)
        assert not guard.is_tripped(9, 1)

    @pytest.mark.parametrize(
        "wrong", [{"control_share": 0.5}, {"min_spacing": 0}, {"min_controls": 1}, {"backoff": 0}]
    )
    def test_settings_are_checked(self, wrong: dict[str, float]) -> None:
        with pytest.raises(PolicyError, match=next(iter(wrong))):
            GuardConfig(**wrong)  # type: ignore[arg-type]
