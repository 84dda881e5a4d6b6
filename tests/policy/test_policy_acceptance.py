"""Estimates of acceptance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policy import Acceptance, AcceptanceConfig, PolicyError, ShadowResult
from paceline.policy import acceptance as module
from paceline.policy.acceptance import COMMON_KIND, NUM_KINDS, RowEvidence, ShadowChains


def rounds(known: Acceptance, row: RowEvidence, accepted: int, depth: int, num: int) -> None:
    for _ in range(num):
        known.add([(row, min(accepted + 1, depth), accepted)])


def test_positions_that_are_not_reached_teach_nothing() -> None:
    known = Acceptance(4)
    rounds(known, RowEvidence(), 0, 4, 200)
    first, *others = known.conditional
    assert first < 0.1
    assert known.conditional[1] == pytest.approx(first)  # the continuation of what is seen
    assert min(others) > 0


def test_it_finds_the_chances_by_position() -> None:
    chances, draw = (0.5, 0.6, 0.7), random.Random(1)
    known, rows = Acceptance(3), [RowEvidence() for _ in range(8)]
    for _ in range(400):
        batch = []
        for row in rows:
            num = 0
            while num < 3 and draw.random() < chances[num]:
                num += 1
            batch.append((row, min(num + 1, 3), num))
        known.add(batch)
    assert known.conditional == pytest.approx(chances, abs=0.1)
    assert known.survivals(COMMON_KIND) == pytest.approx((0.5, 0.3, 0.21), abs=0.1)
    assert known.num_seen <= AcceptanceConfig().max_rounds


def test_unseen_positions_continue_the_slope() -> None:
    known = Acceptance(5, AcceptanceConfig(prior_weight=0.01))
    row = RowEvidence()
    for _ in range(100):
        known.add([(row, 1, 0), (row, 2, 1), (row, 2, 2), (row, 2, 2)])
    a = known.conditional
    assert a[0] == pytest.approx(0.75, abs=0.01)
    assert a[1] == pytest.approx(2 / 3, abs=0.01)
    assert a[2] - a[1] == pytest.approx((a[1] - a[0]) / 2, abs=0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=40), st.data())
def test_one_more_acceptance_never_lowers_the_first_chance(
    history: list[tuple[int, int]], data: st.DataObject
) -> None:
    def run(history: list[tuple[int, int]]) -> float:
        known, row = Acceptance(4), RowEvidence()
        for accepted, depth in history:
            accepted = min(accepted, depth)
            known.add([(row, min(accepted + 1, depth), accepted)])
        return known.conditional[0]

    at = data.draw(st.integers(0, len(history) - 1))
    better = [*history]
    better[at] = (better[at][0] + 1, better[at][1])
    assert run(better) >= run(history) - 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=30))
def test_survival_falls_with_depth_and_stays_a_chance(history: list[tuple[int, int]]) -> None:
    known, row = Acceptance(4), RowEvidence()
    for accepted, depth in history:
        accepted = min(accepted, depth)
        known.add([(row, min(accepted + 1, depth), accepted)])
    for kind in range(NUM_KINDS):
        survivals = (1.0, *known.survivals(kind), 0.0)
        assert sorted(survivals, reverse=True) == list(survivals)
    assert all(hoped >= own for hoped, own in zip(known.optimistic(), known.survivals(3), strict=True))


def test_rows_are_told_apart_and_slowly_forgotten() -> None:
    known, easy, hard = Acceptance(4), RowEvidence(), RowEvidence()
    for _ in range(60):
        known.add([(easy, 4, 4), (hard, 1, 0)])
    assert easy.kind < COMMON_KIND < hard.kind
    assert known.survivals(easy.kind)[0] > 0.9
    assert known.survivals(hard.kind)[0] < 0.1
    for _ in range(800):
        hard.fade(0.99, AcceptanceConfig())
    assert hard.kind == COMMON_KIND
    fresh = RowEvidence()
    fresh.fade(0.5, AcceptanceConfig())
    assert fresh.kind == COMMON_KIND


def test_a_prior_is_no_evidence() -> None:
    known, row = Acceptance(2, AcceptanceConfig(prior=0.2, prior_weight=100)), RowEvidence()
    assert known.optimistic() == (1.0, 1.0)
    rounds(known, row, 1, 1, 100)
    assert known.conditional[0] < 0.6
    assert known.optimistic()[0] == 1.0  # as seen
    assert not known.is_known


def test_what_is_known_can_be_doubted() -> None:
    known, row = Acceptance(2), RowEvidence()
    rounds(known, row, 0, 2, 200)
    assert known.is_known
    before = known.conditional[0]
    known.doubt()
    assert not known.is_known
    assert before < known.conditional[0] < 0.15
    rounds(known, row, 2, 2, 30)
    assert known.conditional[0] > 0.4  # few new rounds outweigh the old ones


def test_nothing_is_learnt_from_nothing() -> None:
    known = Acceptance(3)
    before = known.conditional
    known.add([])
    assert known.conditional == before == (0.5, 0.5, 0.5)
    assert Acceptance(0).num_seen == 0


def test_evidence_on_deep_positions_fades_while_they_are_not_tried() -> None:
    known, row = Acceptance(2), RowEvidence()
    rounds(known, row, 1, 2, 200)  # the second position always fails
    low = known.conditional[1]
    rounds(known, row, 1, 1, 3000)  # depth 1 now, always right
    assert known.conditional[0] > 0.9
    assert known.conditional[1] > low + 0.3


@pytest.mark.parametrize(
    "name", ["prior", "discount", "idle_discount", "row_discount", "kappa", "max_rounds", "max_kind_rounds"]
)
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(PolicyError, match=name):
        AcceptanceConfig(**{name: 0.0})


class TestShadowChains:
    def test_virtual_rounds_are_chained_and_the_first_is_left_out(self) -> None:
        chains = ShadowChains()
        matched = {10: 2, 11: 4, 12: 1, 13: 0, 14: 3, 15: 1, 16: 1, 17: 0, 18: 0}
        counted = [s for s in matched if chains.follow(ShadowResult("a", s, 4, matched[s]))]
        assert counted == [13, 14, 18]  # 10 starts anywhere, and ends at 13; 13 at 14; 14 at 18

    def test_a_gap_or_an_end_breaks_the_chain(self) -> None:
        chains = ShadowChains()
        assert not chains.follow(ShadowResult("a", 0, 4, 0))
        assert not chains.follow(ShadowResult("a", 5, 4, 0))
        assert chains.follow(ShadowResult("a", 6, 4, 0))
        chains.end("a")
        assert not chains.follow(ShadowResult("a", 7, 4, 0))
        assert not chains.follow(ShadowResult("b", 7, 4, 0))

    def test_chaining_removes_the_bias_of_starting_anywhere(self) -> None:
        """Words in runs: easy inside, hard at a run's begin, where rounds start."""
        draw = random.Random(3)
        easy = [draw.random() < 0.7 for _ in range(40_000)]

        def matched(start: int) -> int:
            num = 0
            while num < 4 and start + num < len(easy) and easy[start + num] and not is_first(start + num):
                num += 1
            return num

        def is_first(position: int) -> bool:
            return position > 0 and not easy[position - 1] and position % 3 == 0

        position, real = 0, []
        while position < len(easy):
            real.append(matched(position))
            position += real[-1] + 1
        chains = ShadowChains()
        shadow = [matched(s) for s in range(len(easy)) if chains.follow(ShadowResult(0, s, 4, matched(s)))]
        anywhere = [matched(s) for s in range(len(easy))]
        mean = sum(real) / len(real)
        assert sum(shadow) / len(shadow) == pytest.approx(mean, abs=0.01)
        assert sum(anywhere) / len(anywhere) > mean + 0.05

    def test_forgotten_rows_cost_no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_MAX_CHAINS", 3)
        chains = ShadowChains()
        for key in range(10):
            chains.follow(ShadowResult(key, 0, 4, 0))
        assert chains.follow(ShadowResult(9, 1, 4, 0))
        assert not chains.follow(ShadowResult(0, 1, 4, 0))
