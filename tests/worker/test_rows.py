"""RowState against a plain model of rows: lists of tokens, pages and lengths."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.worker.rows import RowState

PAGE, MAX_LEN, NUM_ROWS = 4, 32, 3
PARAMS = SamplingParams(seed=0)


def start(row: int, token_ids: list[int], computed_len: int, page_ids: list[int]) -> RowStart:
    tokens, pages = tuple(token_ids), tuple(page_ids)
    return RowStart(row, tokens, len(tokens), computed_len, pages, PARAMS, 0, MAX_LEN)


class Row:
    """What a row should hold."""

    def __init__(self, token_ids: list[int], computed_len: int, page_ids: list[int]) -> None:
        self.token_ids, self.computed_len, self.page_ids = token_ids, computed_len, page_ids


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_batches_are_what_the_plans_say(data: st.DataObject) -> None:
    state, rows = RowState(NUM_ROWS, MAX_LEN, PAGE, torch.device("cpu")), dict[int, Row]()
    next_page = 1
    for step_id in range(data.draw(st.integers(1, 8))):
        for row in range(NUM_ROWS):
            if row not in rows or data.draw(st.booleans()):
                known = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
                computed = data.draw(st.integers(0, len(known) - 1))
                pages = list(range(next_page, next_page + -(-len(known) // PAGE)))
                next_page += len(pages)
                rows[row] = Row(known, computed, pages)
                state.start(start(row, list(known), computed, pages))
        steps = []
        for row in data.draw(st.permutations(sorted(rows)).map(lambda p: p[: 1 + p[0] % NUM_ROWS])):
            held = rows[row]
            left = len(held.token_ids) - held.computed_len
            query_len = data.draw(st.integers(1, left))
            fresh = [next_page] if len(held.token_ids) == len(held.page_ids) * PAGE else []
            next_page += len(fresh)
            held.page_ids += fresh
            steps.append(RowStep(row, query_len, query_len == left, new_page_ids=tuple(fresh)))
        step = state.prepare(Plan(step_id, (), (), tuple(steps)))

        ids, positions, begin, sampled = step.batch.token_ids.tolist(), step.batch.positions.tolist(), 0, []
        for i, planned in enumerate(steps):
            held = rows[planned.row]
            end = held.computed_len + planned.query_len
            assert step.batch.segments[i].tolist() == [
                begin,
                planned.query_len,
                held.computed_len,
                planned.row,
            ]
            assert ids[begin : begin + planned.query_len] == held.token_ids[held.computed_len : end]
            assert positions[begin : begin + planned.query_len] == list(range(held.computed_len, end))
            begin += planned.query_len
            table = state.tables[planned.row].tolist()
            assert table == held.page_ids + [0] * (len(table) - len(held.page_ids))
            if planned.samples:
                sampled.append((planned.row, end, begin - 1))
            held.computed_len = end
        assert len(ids) == begin
        assert step.sample_rows.tolist() == [row for row, _, _ in sampled]
        assert step.sample_positions.tolist() == [position for _, position, _ in sampled]
        assert step.sample_at.tolist() == [at for _, _, at in sampled]

        new = [100 + step_id] * len(sampled)
        state.settle(step, torch.tensor(new, dtype=torch.int64))
        for row, _, _ in sampled:
            rows[row].token_ids.append(100 + step_id)
        for row, held in rows.items():
            assert int(state.seq_len[row]) == held.computed_len
            assert int(state.start_bound[row]) == held.computed_len
            if len(held.token_ids) >= MAX_LEN:
                state.start(start(row, [1], 0, [next_page]))
                rows[row], next_page = Row([1], 0, [next_page]), next_page + 1


def test_a_row_may_fill_its_context() -> None:
    state = RowState(1, MAX_LEN, PAGE, torch.device("cpu"))
    state.start(start(0, list(range(MAX_LEN - 1)), 0, list(range(1, 9))))
    step = state.prepare(Plan(0, (), (), (RowStep(0, MAX_LEN - 1, True),)))
    state.settle(step, torch.tensor([7]))
    assert state.token_ids[0, :MAX_LEN].tolist() == [*range(MAX_LEN - 1), 7]


def test_a_reused_row_forgets_the_pages_of_the_last_request() -> None:
    state = RowState(2, MAX_LEN, PAGE, torch.device("cpu"))
    state.start(start(1, list(range(20)), 0, [1, 2, 3, 4, 5]))
    state.start(start(1, [5, 6], 0, [9]))
    assert state.tables[1].tolist() == [9] + [0] * 7
    assert state.tables[0].tolist() == [0] * 8
