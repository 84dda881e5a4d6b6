"""The ragged argmax against trying everything."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policy.search import Base, Choice, Group, Prices, best_by_depth, group_depths, increments

Curve = list[float]


def prices(tokens: Curve, drafts: list[Curve], bends: list[int] | None = None, **more: float) -> Prices:
    most = range(len(tokens))
    return Prices(
        tokens=tokens,
        fixed=0.5,
        slope=0.01,
        drafts=[drafts],
        factors={depth: ({}, 1.0) for depth in range(6)},
        buckets=most,
        bends=list(most) if bends is None else bends,
        **more,  # type: ignore[arg-type]
    )


@st.composite
def survivals(draw: st.DrawFn, depth: int) -> list[float]:
    chances = draw(st.lists(st.floats(0.05, 0.99), min_size=depth, max_size=depth))
    return list(itertools.accumulate(chances, lambda a, b: a * b))


@st.composite
def problems(draw: st.DrawFn, is_flat: bool) -> tuple[list[Group], Prices, list[int]]:
    """Up to five rows in up to three groups; a cost curve of steps and slopes."""
    depths = draw(st.sampled_from([[0, 1, 2, 3], [0, 1, 2], [0, 1]]))
    numbers = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    groups = [Group(num, draw(survivals(depths[-1])), draw(st.sampled_from(depths[1:]))) for num in numbers]
    rises = draw(st.lists(st.floats(0, 1), min_size=40, max_size=40))
    tokens = list(itertools.accumulate(rises, initial=2.0))
    flat = draw(st.floats(0, 0.5))
    slope = 0.0 if is_flat else 0.1
    drafts = [[0.0, *(flat + slope * n for n in range(1, 8))] for _ in range(depths[-1])]
    return groups, prices(tokens, drafts), depths


def everything(groups: list[Group], cost: Prices, depths: list[int]) -> float:
    """The best E / T over all ways to give rows declared depths."""
    rows = [group for group in groups for _ in range(group.num_rows)]
    best = 0.0
    for taken in itertools.product(*([d for d in depths if d <= row.max_depth] for row in rows)):
        m = len(rows) + sum(taken)
        expected = len(rows) + sum(sum(row.survivals[:d]) for row, d in zip(rows, taken, strict=True))
        seconds = cost.tokens[m] + cost.fixed + cost.slope * m
        for j in range(max(taken)):
            seconds += cost.drafts[0][j][sum(d > j for d in taken)]
        best = max(best, expected / seconds)
    return best


def found(groups: list[Group], cost: Prices, depths: list[int]) -> list[Choice]:
    num = sum(group.num_rows for group in groups)
    return best_by_depth(increments(groups, depths), Base(num, float(num), [[]]), cost, depths)


@settings(max_examples=150, deadline=None)
@given(problems(is_flat=True))
def test_the_choice_is_the_best_there_is(problem: tuple[list[Group], Prices, list[int]]) -> None:
    best = max(choice.expected / choice.seconds for choice in found(*problem))
    assert best >= everything(*problem) * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(problems(is_flat=True), st.floats(0, 0.1))
def test_what_is_left_out_is_far_behind(
    problem: tuple[list[Group], Prices, list[int]], margin: float
) -> None:
    groups, cost, depths = problem
    num = sum(group.num_rows for group in groups)
    items, base = increments(groups, depths), Base(num, float(num), [[]])
    rates = {c.limit: c.expected / c.seconds for c in best_by_depth(items, base, cost, depths)}
    kept = {choice.limit for choice in best_by_depth(items, base, cost, depths, margin=margin)}
    best = max(rates.values())
    assert {limit for limit, rate in rates.items() if rate >= (1 - margin) * best} <= kept


def test_depths_that_cannot_pay_are_left_out() -> None:
    cost = prices([float(n) for n in range(40)], [[0.0] + [1.0] * 8] * 3)
    items, base = increments([Group(4, [0.5, 0.2, 0.1], 3)], [0, 1, 2, 3]), Base(4, 4.0, [[]])
    assert [c.limit for c in best_by_depth(items, base, cost, [0, 1, 2, 3], margin=0.02)] == [0, 1]


@settings(max_examples=150, deadline=None)
@given(problems(is_flat=False))
def test_and_nearly_the_best_where_every_drafting_row_costs(
    problem: tuple[list[Group], Prices, list[int]],
) -> None:
    best = max(choice.expected / choice.seconds for choice in found(*problem))
    assert best >= everything(*problem) * 0.97


@settings(max_examples=100, deadline=None)
@given(problems(is_flat=True))
def test_a_choice_means_what_it_was_priced_at(problem: tuple[list[Group], Prices, list[int]]) -> None:
    groups, cost, depths = problem
    items = increments(groups, depths)
    for choice in found(groups, cost, depths):
        expected, tokens, deepest = 0.0, 0, 0
        for group, (first, num, other) in zip(groups, group_depths(items, choice, len(groups)), strict=True):
            for depth in [first] * num + [other] * (group.num_rows - num):
                assert depth in depths
                assert depth <= group.max_depth
                expected += 1 + sum(group.survivals[:depth])
                tokens += 1 + depth
                deepest = max(deepest, depth)
        assert (tokens, deepest) == (choice.num_tokens, choice.depth)
        assert abs(expected - choice.expected) < 1e-9


def test_a_staircase_is_filled_to_its_edge() -> None:
    """Ten rows alike; up to 16 tokens cost the same: six rows draft, whichever."""
    tokens = [1.0] * 17 + [3.0] * 50
    cost = prices(tokens, [[0.0] + [0.01] * 20] * 2, bends=[16, 32])
    choices = found([Group(10, [0.5, 0.1], 2)], cost, [0, 1, 2])
    assert [c.num_tokens for c in choices if c.depth == 1] == [16]
    items = increments([Group(10, [0.5, 0.1], 2)], [0, 1, 2])
    assert group_depths(items, choices[1], 1) == [(1, 6, 0)]


def test_where_all_rows_of_a_group_draft_those_that_come_to_it_will() -> None:
    cost = prices([1.0] * 60, [[0.0] + [0.01] * 20] * 2)
    groups = [Group(10, [0.9, 0.1], 2), Group(4, [0.9, 0.1], 1)]
    items = increments(groups, [0, 1])
    [_, choice] = found(groups, cost, [0, 1])
    assert group_depths(items, choice, 2) == [(1, 10, 1), (1, 4, 1)]


def test_many_edges_are_tried_evenly() -> None:
    """A kink at 40 tokens among an edge at every token."""
    tokens = [1 + 0.001 * n + max(0, n - 40) for n in range(200)]
    cost = prices(tokens, [[0.0] + [0.01] * 64])
    choices = found([Group(36, [0.9], 1)], cost, [0, 1])
    assert choices[1].num_tokens < 72


def test_with_a_price_long_prompts_do_not_make_drafts_cheap() -> None:
    """E / T would take every draft in a step that a prompt makes a hundred times longer."""
    tokens = [float(n) for n in range(2000)]
    groups, depths = [Group(4, [0.3], 1)], [0, 1]
    calm = found(groups, prices(tokens, [[0.0] * 8]), depths)
    assert calm[0].expected / calm[0].seconds > calm[1].expected / calm[1].seconds
    long = prices(tokens, [[0.0] * 8], num_prompt_tokens=1000)
    by_ratio = found(groups, long, depths)
    assert by_ratio[1].expected / by_ratio[1].seconds > by_ratio[0].expected / by_ratio[0].seconds
    items, base = increments(groups, depths), Base(4, 4.0, [[]])
    price = calm[0].expected / calm[0].seconds
    plain, drafted = best_by_depth(items, base, long, depths, price)
    assert plain.expected - price * plain.seconds > drafted.expected - price * drafted.seconds


def test_rows_with_their_own_depth_are_paid_for() -> None:
    cost = prices([float(n) for n in range(40)], [[0.0] + [1.0] * 8] * 3)
    base = Base(num_tokens=2 + 3, expected=2.5, rows=[[1, 1, 1]])
    plain, shallow = best_by_depth(
        increments([Group(1, [0.9, 0.5, 0.4], 3)], [0, 1, 2, 3])[:1], base, cost, [0, 1, 2, 3]
    )
    assert (plain.depth, plain.limit, shallow.depth, shallow.limit) == (3, 0, 3, 1)
    assert plain.seconds == 5 + 0.5 + 0.05 + 3
