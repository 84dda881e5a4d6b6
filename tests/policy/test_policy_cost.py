"""Cost tables: fitted, read, written."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policy import CostModel, Curve, DraftSample, Load, PolicyError, TargetSample
from paceline.policy.fit import least_squares_within, rising

TRUE = CostModel(
    tokens=Curve([(4, 0.008), (8, 0.013), (16, 0.025), (64, 0.08), (512, 0.5)], stairs=[4, 8, 12, 16]),
    drafts={"": (Curve([(1, 0.001), (16, 0.004)]), Curve([(1, 0.001), (16, 0.003)]))},
    row_seconds=0.0003,
    context_seconds=2e-7,
    query_seconds=1e-7,
    prompt=Curve([(0, 0.0), (128, 0.01), (256, 0.03)]),
)


def samples() -> tuple[list[TargetSample], list[DraftSample]]:
    """What a worker would measure of `TRUE`: tokens, rows, contexts, prompts."""
    target = []
    for m, b in [
        (4, 4),
        (8, 8),
        (12, 12),
        (16, 16),
        (16, 4),
        (16, 8),
        (64, 16),
        (64, 32),
        (4, 1),
        (4, 2),
        (512, 64),
    ]:
        for context in (100 * b, 400 * b):
            load = Load(b, context)
            target.append(TargetSample(m, b, context, TRUE.target_seconds(m, load)))
    for p in (128, 256):
        target.append(TargetSample(4, 4, 400, TRUE.target_seconds(4, Load(4, 400, p)), p))
    drafts = [
        DraftSample(b, k, TRUE.draft_seconds([b] * k)) for b in (1, 4, 16) for k in (1, 2) for _ in range(3)
    ]
    return target, drafts


def test_a_fit_gives_back_what_was_measured() -> None:
    model = CostModel.fit(*samples(), token_stairs=[4, 8, 12, 16])
    assert model.row_seconds == pytest.approx(TRUE.row_seconds, rel=1e-3)
    assert model.context_seconds == pytest.approx(TRUE.context_seconds, rel=1e-3)
    assert model.query_seconds == pytest.approx(TRUE.query_seconds, rel=1e-3)
    for load, depth in [(Load(3, 500), 0), (Load(5, 900), 1), (Load(10, 9000), 2), (Load(4, 400, 256), 1)]:
        depths = [("", depth)] * load.num_rows
        assert model.step_seconds(load, depths) == pytest.approx(TRUE.step_seconds(load, depths), rel=1e-3)
    assert model.is_measured


def test_long_contexts_do_not_bend_the_curve_of_tokens() -> None:
    """Attention that costs more than in proportion is no business of the tokens'."""
    target = [TargetSample(m, m, 64 * m, 0.004 + 0.001 * m) for m in (1, 4, 16)]
    for m, more in ((1, 1e-3), (4, 9e-3)):
        target.append(TargetSample(m, m, 2048 * m, 0.004 + 0.001 * m + more))
    model = CostModel.fit(target, [DraftSample(1, 1, 0.001)])
    for m in (1, 4, 16):
        assert model.target_seconds(m, Load(m, 64 * m)) == pytest.approx(0.004 + 0.001 * m)


def test_what_prompts_add() -> None:
    load = Load(4, 400, 256)
    alone = TRUE.target_seconds(4, load._replace(num_prompt_tokens=0))
    assert TRUE.prompt_seconds(4, 256) == pytest.approx(TRUE.target_seconds(4, load) - alone)


def test_ragged_drafts_are_paid_by_the_rows_that_draft() -> None:
    load = Load(3, 0)
    rows = [("", 2), ("", 1), ("", 0)]
    expected = TRUE.target_seconds(6, load) + TRUE.position("", 0)(2) + TRUE.position("", 1)(1)
    assert TRUE.step_seconds(load, rows) == pytest.approx(expected)
    assert TRUE.step_seconds(Load(0, 0, 128), ()) == pytest.approx(TRUE.tokens(128) + 0.01)


def test_drafters_have_their_own_costs() -> None:
    drafts = [DraftSample(1, 1, 0.001, "ngram"), DraftSample(1, 2, 0.003, "eagle3")]
    model = CostModel.fit([TargetSample(1, 1, 10, 0.01)], drafts)
    assert model.draft_seconds([1], "ngram") == pytest.approx(0.001)
    assert model.draft_seconds([1, 1, 1], "eagle3") == pytest.approx(0.0045)
    assert model.draft_seconds([1], "unheard of") == model.draft_seconds([1], "ngram")
    assert (model.row_seconds, model.context_seconds, model.query_seconds) == (0, 0, 0)


@pytest.mark.parametrize(
    ("target", "drafts"), [([], [DraftSample(1, 1, 0.1)]), ([TargetSample(1, 1, 1, 0.1)], [])]
)
def test_a_fit_needs_samples(target: list[TargetSample], drafts: list[DraftSample]) -> None:
    with pytest.raises(PolicyError, match="needs"):
        CostModel.fit(target, drafts)


def test_the_prior_has_a_shape() -> None:
    model = CostModel.prior(["eagle3", "ngram"])
    assert not model.is_measured
    times = [model.step_seconds(Load(b, 0), [("eagle3", 1)] * b) for b in (1, 4, 16, 64)]
    assert times == sorted(times)


class TestCurve:
    def test_stairs_then_lines_then_the_last_slope(self) -> None:
        curve = Curve([(4, 1.0), (8, 2.0), (16, 4.0)], stairs=[4, 8])
        assert [curve(n) for n in (0, 1, 4, 5, 8)] == [1, 1, 1, 2, 2]
        assert [curve(n) for n in (12, 16, 20)] == [3, 4, 5]
        assert curve.edges == (4, 8, 16)
        assert Curve([(4, 1.0), (8, 2.0)]).edges == (4, 8)
        assert Curve([(4, 1.0)])(100) == 1.0

    @given(st.integers(1, 300))
    def test_dense_values_are_the_same(self, num: int) -> None:
        curve = Curve([(2, 1.0), (9, 2.0)], stairs=[2, 4])
        assert curve.dense(num)[:num] == [curve(n) for n in range(num)]
        assert len(curve.dense(2 * num)) >= 2 * num

    @pytest.mark.parametrize("points", [[], [(2, 1.0), (2, 2.0)], [(1, float("nan"))]])
    def test_nonsense_is_refused(self, points: list[tuple[int, float]]) -> None:
        with pytest.raises(PolicyError):
            Curve(points)

    def test_equal_curves_are_equal(self) -> None:
        one, other = Curve([(1, 1.0)], [1]), Curve([(1, 1.0)], [1])
        assert (one == other, hash(one) == hash(other), one == Curve([(1, 1.0)]), one == 1) == (
            True,
            True,
            False,
            False,
        )


class TestWritten:
    def test_it_is_read_as_it_was(self) -> None:
        assert CostModel.from_dict(json.loads(json.dumps(TRUE.to_dict()))) == TRUE

    @pytest.mark.parametrize("name", ["tokens", "drafts", "row_seconds", "prompt", "is_measured"])
    def test_a_missing_field_is_named(self, name: str) -> None:
        data = TRUE.to_dict()
        del data[name]
        with pytest.raises(PolicyError, match=f"{name} is missing"):
            CostModel.from_dict(data)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tokens", [1, 2]),
            ("tokens", {"points": [[1]], "stairs": []}),
            ("tokens", {"points": [[2, 1], [1, 1]], "stairs": []}),
            ("drafts", 3),
            ("row_seconds", "much"),
            ("context_seconds", -1),
            ("query_seconds", float("nan")),
        ],
    )
    def test_a_wrong_field_is_named(self, name: str, value: Any) -> None:
        with pytest.raises(PolicyError, match=name):
            CostModel.from_dict(TRUE.to_dict() | {name: value})

    @pytest.mark.parametrize("data", [None, [], {}, {"schema": 2}])
    def test_other_schemas_are_refused(self, data: Any) -> None:
        with pytest.raises(PolicyError, match="schema"):
            CostModel.from_dict(data)

    @pytest.mark.parametrize("drafts", [{}, {"": ()}])
    def test_a_model_without_draft_costs_is_refused(self, drafts: Any) -> None:
        with pytest.raises(PolicyError, match="drafts"):
            CostModel(tokens=TRUE.tokens, drafts=drafts)


@given(st.lists(st.floats(-5, 5), max_size=12))
def test_isotonic_regression_rises_and_keeps_the_mean(values: list[float]) -> None:
    fitted = [value for _, value in rising(list(enumerate(values)))]
    assert fitted == sorted(fitted)
    assert sum(fitted) == pytest.approx(sum(values), abs=1e-9)
    assert [value for _, value in rising(list(enumerate(fitted)))] == pytest.approx(fitted)


@settings(max_examples=60)
@given(st.tuples(*[st.floats(0.1, 5)] * 3), st.integers(0, 10**6))
def test_least_squares_finds_coefficients_whatever_the_groups_are(
    truth: tuple[float, ...], seed: int
) -> None:
    draw, samples = random.Random(seed), []
    for group in range(6):
        for _ in range(5):
            features = (draw.uniform(1, 9), draw.uniform(1, 900), draw.uniform(1, 5000))
            value = 100 * group + sum(x * f for x, f in zip(truth, features, strict=True))
            samples.append((group, features, value))
    assert least_squares_within(samples) == pytest.approx(truth, rel=1e-3)


def test_no_coefficient_is_below_zero() -> None:
    samples = [(0, (float(n), float(n * n), 0.0), 5.0 * n - 0.1 * n * n) for n in range(5)]
    r, c, q = least_squares_within(samples)
    assert r > 0
    assert (c, q) == (0, 0)
    assert least_squares_within([]) == (0, 0, 0)
