"""How long a choice is good for."""

from __future__ import annotations

import pytest

from paceline.policy import Load, RowView
from paceline.policy.plans import LONGEST, Plan, Plans, spread
from paceline.policy.rows import RowBook
from paceline.policy.search import Choice

DEPTHS = (0, 1, 2, 3)


def choice(limit: int) -> Choice:
    return Choice(limit, limit, 8, 8.0, 0.01, limit, 0)


def plan(rows: RowBook, limit: int) -> Plan:
    depths = dict.fromkeys(rows.codes(), (limit, 0, limit))
    return Plan(1, depths, choice(limit), choice(0))


def book(num_rows: int, **row: object) -> RowBook:
    rows = RowBook(DEPTHS)
    rows.take(tuple(RowView(i, 3, **row) for i in range(num_rows)))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize(("num_rows", "num_prompt_tokens", "first"), [(8, 0, 15), (8, 5, 60), (2, 0, 60)])
def test_twice_as_long_each_time_that_it_was_used_up_and_comes_out_the_same(
    num_rows: int, num_prompt_tokens: int, first: int
) -> None:
    rows, now, lasts = book(num_rows), 0, []
    plans, load = Plans(rows, reuse=16), Load(num_rows, 100, num_prompt_tokens)
    while not lasts or lasts[-1] < LONGEST:
        kept = plans.keep(load, rows.codes(), plan(rows, 1), now)
        lasts.append(kept.lasts)
        assert kept.until == now + kept.lasts
        assert plans.find(load, rows.codes(), kept.until) is kept
        now = kept.until + 1
        assert plans.find(load, rows.codes(), now) is None
    doubled = [first * 2**i for i in range(len(lasts))]
    assert lasts == [min(num, LONGEST) for num in doubled]


def test_not_longer_when_it_is_chosen_again_before_its_end_and_as_at_first_when_it_changes() -> None:
    rows, load = book(8), Load(8, 100)
    plans = Plans(rows, reuse=16)
    at = [(1, 0), (1, 16), (1, 20), (2, 30), (2, 46)]
    kept = [plans.keep(load, rows.codes(), plan(rows, limit), now).lasts for limit, now in at]
    assert kept == [15, 30, 30, 15, 30]


@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_reuse_of_one_is_never_more(num_rows: int) -> None:
    rows, load = book(num_rows), Load(num_rows, 100)
    plans = Plans(rows, reuse=1)
    assert [plans.keep(load, rows.codes(), plan(rows, 1), now).lasts for now in range(3)] == [0, 0, 0]
    assert plans.find(load, rows.codes(), 3) is None


def test_many_rows_are_told_apart_by_their_number_few_by_their_kinds() -> None:
    rows = book(8)
    plans, kept = Plans(rows, reuse=16), plan(rows, 1)
    plans.keep(Load(8, 100), rows.codes(), kept, 0)
    states = rows.states
    states[0].kind = 5
    assert plans.find(Load(8, 100), rows.codes(), 1) is not None
    assert plans.find(Load(8, 100, 3), rows.codes(), 1) is None
    rows.take(rows.views[:2])
    plans.keep(Load(2, 100), rows.codes(), plan(rows, 1), 0)
    assert plans.find(Load(2, 100), rows.codes()[::-1], 1) is not None
    rows.states[1].kind = 6
    assert plans.find(Load(2, 100), rows.codes(), 1) is None
    plans.clear()
    assert plans.find(Load(8, 100), book(8).codes(), 1) is None


def test_a_kind_it_does_not_know_goes_like_the_nearest_and_another_drafter_does_not() -> None:
    rows = book(8)
    for state, kind in zip(rows.states, (1, 1, 1, 1, 5, 5, 5, 5), strict=True):
        state.kind = kind
    easy, hard = rows.codes()[0], rows.codes()[-1]
    plans = Plans(rows, reuse=16)
    known = plan(rows, 0)._replace(depths={easy: (3, 2, 2), hard: (0, 0, 0)})
    rows.states[1].kind = 2
    rows.states[7].kind = 6
    found = plans.extended(known, rows.codes())
    assert found is not None
    assert spread(found.depths, rows.codes()) == (3, 2, 3, 2, 0, 0, 0, 0)
    rows.take((RowView("other", 3, drafter="ngram"), *rows.views[1:]))
    assert plans.extended(known, rows.codes()) is None


@pytest.mark.parametrize(
    ("known", "depths"),
    [
        ((2, 8, 2), (2, 2, 2, 2, 2, 2, 2, 2)),  # all of them
        ((2, 5, 0), (2, 2, 0, 0, 0, 2, 2, 2)),  # five: three better ones, then two as they were
        ((2, 2, 1), (1, 1, 1, 1, 1, 2, 2, 1)),
        ((0, 0, 0), (0,) * 8),
    ],
)
def test_rows_that_turn_out_better_than_others_draft_before_them(
    known: tuple[int, int, int], depths: tuple[int, ...]
) -> None:
    rows = book(8)
    plans, kept = Plans(rows, reuse=16), plan(rows, 0)
    kept = kept._replace(depths=dict.fromkeys(rows.codes(), known))
    for i, kind in ((4, 6), (5, 1), (6, 1), (7, 2)):
        rows.states[i].kind = kind
    found = plans.extended(kept, rows.codes())
    assert found is not None
    assert spread(found.depths, rows.codes()) == depths


def test_a_better_row_without_room_goes_as_deep_as_it_may() -> None:
    rows = book(3)
    plans, kept = Plans(rows, reuse=16), plan(rows, 3)
    rows.take((RowView(0, 1), *rows.views[1:]))
    rows.states[0].kind = 1
    found = plans.extended(kept, rows.codes())
    assert found is not None
    assert spread(found.depths, rows.codes()) == (1, 3, 3)


def test_of_many_the_older_ones_are_forgotten() -> None:
    rows = book(8)
    plans, kept = Plans(rows, reuse=16), plan(rows, 1)
    for num_rows in range(5, 262):
        plans.keep(Load(num_rows, 100), [8] * num_rows, kept, 0)
    assert plans.find(Load(5, 100), [8] * 5, 1) is None
    assert plans.find(Load(261, 100), [8] * 261, 1) is not None


def test_rows_near_their_end_go_on_with_what_was_best_before_if_that_keeps_to_their_limits() -> None:
    rows, load = book(3), Load(3, 100)
    plans = Plans(rows, reuse=16)
    [code] = set(rows.codes())
    mixed = Plan(1, {code: (2, 1, 1)}, choice(2), choice(0))
    kept = plans.keep(load, rows.codes(), mixed, 0)

    def limited(*max_depths: int) -> Plan | None:
        rows.take(tuple(RowView(i, depth) for i, depth in enumerate(max_depths)))
        return plans.find(load, rows.codes(), 1)

    for max_depths in ((3, 3, 1), (2, 2, 2), (2, 1, 1), (3, 1, 2)):
        near = limited(*max_depths)
        assert near is not None
        assert near.choice == kept.choice
        assert spread(near.depths, rows.codes()) == (2, 1, 1)
    assert limited(1, 3, 3) is None  # the one that was to go deeper may not
    assert limited(2, 2, 0) is None  # a row with a depth of its own is another row
    assert plans.find(load, rows.codes(), kept.until + 1) is None
