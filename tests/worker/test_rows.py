"""RowState against a plain model of rows: lists of tokens, pages and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.protocol import NO_DRAFT
from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.worker.rows import RowState, StepInput

PAGE, MAX_LEN, NUM_ROWS, VOCAB = 4, 32, 3, 100
PARAMS = SamplingParams(seed=0)
both = pytest.mark.parametrize("library", ["numpy", "torch"])  # how CPU and other devices index


def row_state(library: str, num_rows: int = NUM_ROWS) -> RowState:
    state = RowState(num_rows, MAX_LEN, PAGE, torch.device("cpu"))
    if library == "torch":
        state._library = torch
        state._token_ids, state._seq_len, state._max_len = state.token_ids, state.seq_len, state.max_len
    return state


def start(
    row: int, token_ids: Sequence[int], computed_len: int, page_ids: Sequence[int], max_len: int = MAX_LEN
) -> RowStart:
    tokens, pages = tuple(token_ids), tuple(page_ids)
    return RowStart(row, tokens, len(tokens), computed_len, pages, PARAMS, 0, max_len)


def no_drafts(num_rows: int) -> torch.Tensor:
    return torch.empty(num_rows, 0, dtype=torch.int64)


@dataclass
class Row:
    """What a row should hold."""

    token_ids: list[int]
    computed_len: int
    page_ids: list[int]
    max_len: int


@dataclass
class Piece:
    """What a row brings to a step, and what comes of it."""

    step: RowStep
    drafts: list[int]  # those that go through the target; NO_DRAFT where nobody trimmed
    accept_len: int
    new: list[int]  # 1 + len(drafts) tokens, of which accept_len are taken


class Machine:
    """Rows that start, grow and go through steps, beside a RowState that is told the same."""

    def __init__(self, library: str, data: st.DataObject) -> None:
        self.state, self.data, self.rows = row_state(library), data, dict[int, Row]()
        self.num_pages = self.num_steps = 0

    def pages(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(1 + self.num_pages - count, 1 + self.num_pages))

    def start_some(self) -> None:
        draw = self.data.draw
        for row in range(NUM_ROWS):
            full = row in self.rows and len(self.rows[row].token_ids) >= self.rows[row].max_len
            if row not in self.rows or full or draw(st.booleans()):
                known = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
                computed, max_len = draw(st.integers(0, len(known) - 1)), draw(st.integers(13, MAX_LEN))
                pages = self.pages(-(-len(known) // PAGE))
                self.rows[row] = Row(list(known), computed, pages, max_len)
                self.state.start(start(row, known, computed, pages, max_len))

    def plan(self) -> list[Piece]:
        draw, pieces = self.data.draw, []
        for row in draw(st.permutations(sorted(self.rows)).map(lambda p: p[: 1 + p[0] % NUM_ROWS])):
            held = self.rows[row]
            left = len(held.token_ids) - held.computed_len
            query_len = draw(st.integers(1, left))
            samples = query_len == left
            most = min(4, held.max_len - len(held.token_ids) - 1) if samples else 0
            token = st.integers(NO_DRAFT, VOCAB - 1)
            drafts = draw(st.lists(token, max_size=most))
            missing = -(-(len(held.token_ids) + len(drafts)) // PAGE) - len(held.page_ids)
            fresh = self.pages(max(0, missing))
            held.page_ids += fresh
            accept_len = draw(st.integers(1, 1 + len(drafts))) if samples else 0
            new = draw(st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5))
            step = RowStep(row, query_len, samples, len(drafts), tuple(fresh))
            pieces.append(Piece(step, drafts, accept_len, new))
        return pieces

    def run(self, pieces: list[Piece]) -> None:
        plan = Plan(self.num_steps, (), (), tuple(piece.step for piece in pieces))
        self.num_steps += 1
        width = max(len(piece.drafts) for piece in pieces)
        padded = [piece.drafts + [NO_DRAFT] * (width - len(piece.drafts)) for piece in pieces]
        self.state.add_pages(plan)
        drafts = torch.tensor(padded, dtype=torch.int64).reshape(len(pieces), width)
        step = self.state.prepare(plan, [len(piece.drafts) for piece in pieces], drafts)
        self.check_batch(step, pieces)
        self.check_places(step, pieces)
        sampled = [piece for piece in pieces if piece.step.samples]
        last = self.state.settle(
            step,
            torch.tensor([piece.accept_len for piece in sampled], dtype=torch.int64),
            torch.tensor([p.new[: 1 + width] for p in sampled], dtype=torch.int64).reshape(-1, 1 + width),
        )
        for piece in sampled:
            self.state.correct(piece.step.row, 1 + len(piece.drafts) - piece.accept_len)
        self.check_settled(step, pieces, last.tolist())

    def check_batch(self, step: StepInput, pieces: list[Piece]) -> None:
        ids, positions, begin = step.batch.token_ids.tolist(), step.batch.positions.tolist(), 0
        for i, piece in enumerate(pieces):
            held, query_len, row = self.rows[piece.step.row], piece.step.query_len, piece.step.row
            q_len, first = query_len + len(piece.drafts), held.computed_len
            assert step.batch.segments[i].tolist() == [begin, q_len, first, row]
            known = held.token_ids[first : first + query_len]
            assert ids[begin : begin + q_len] == known + [max(0, draft) for draft in piece.drafts]
            assert positions[begin : begin + q_len] == list(range(first, first + q_len))
            assert step.flat_rows[begin : begin + q_len].tolist() == [row] * q_len
            begin += q_len
            table = self.state.tables[row].tolist()
            assert table == held.page_ids + [0] * (len(table) - len(held.page_ids))
        assert len(ids) == begin

    def check_places(self, step: StepInput, pieces: list[Piece]) -> None:
        rows, at, positions, num_drafted, first, end = [], [], [], [], [], 0
        sampled = [i for i, piece in enumerate(pieces) if piece.step.samples]
        for i, piece in enumerate(pieces):
            end += piece.step.query_len + len(piece.drafts)
            if i not in sampled:
                continue
            first.append(len(rows))
            for j in range(1 + len(piece.drafts)):
                rows.append(piece.step.row)
                at.append(end - 1 - len(piece.drafts) + j)
                positions.append(len(self.rows[piece.step.row].token_ids) + j)
                num_drafted.append(j)
        assert step.sampling.tolist() == sampled
        assert step.sampling_rows == tuple(pieces[i].step.row for i in sampled)
        assert step.sample_rows.tolist() == list(step.place_rows) == rows
        assert step.sample_at.tolist() == at
        assert step.sample_positions.tolist() == positions
        assert step.num_drafted.tolist() == num_drafted
        assert step.first.tolist() == list(step.first_places) == first
        assert step.depths.tolist() == [len(pieces[i].drafts) for i in sampled]
        held = [self.rows[pieces[i].step.row] for i in sampled]
        assert step.room.tolist() == [row.max_len - len(row.token_ids) for row in held]
        for i, drafts in zip(sampled, step.drafts.tolist(), strict=True):
            assert drafts[: len(pieces[i].drafts)] == pieces[i].drafts

    def check_settled(self, step: StepInput, pieces: list[Piece], last: list[int]) -> None:
        next_ids, begin = self.state.next_ids(step).tolist(), 0
        for piece, last_settled in zip(pieces, last, strict=True):
            held = self.rows[piece.step.row]
            held.token_ids += piece.new[: piece.accept_len]
            num_settled = piece.step.query_len + max(0, piece.accept_len - 1)
            assert last_settled == begin + num_settled - 1
            first = held.computed_len
            follow = held.token_ids[first + 1 : first + 1 + num_settled]
            assert next_ids[begin : begin + len(follow)] == follow
            assert len(follow) == num_settled
            begin += piece.step.query_len + len(piece.drafts)
            held.computed_len += num_settled
        for row, held in self.rows.items():
            assert int(self.state.seq_len[row]) == int(self.state.start_bound[row]) == held.computed_len
            assert self.state.token_ids[row, : len(held.token_ids)].tolist() == held.token_ids


@both
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_batches_are_what_the_plans_say(library: str, data: st.DataObject) -> None:
    machine = Machine(library, data)
    for _ in range(data.draw(st.integers(1, 8))):
        machine.start_some()
        machine.run(machine.plan())


@both
def test_rows_about_to_draft(library: str) -> None:
    state = row_state(library)
    state.start(start(2, [7, 8, 9], 2, [1]))
    state.start(start(0, [4, 5], 0, [2]))
    import numpy as np

    rows, token_ids, lengths = state.newest(np.array([2, 0]), np.array([1, 2]))
    assert (rows.tolist(), token_ids.tolist(), lengths.tolist()) == ([2, 0], [9, 5], [2, 1])


@both
@pytest.mark.parametrize("num_drafts", [0, 1])
def test_a_row_may_fill_its_context(library: str, num_drafts: int) -> None:
    """To the last place; what it does not take goes where nobody reads."""
    state, known = row_state(library, 1), MAX_LEN - 1 - num_drafts
    state.start(start(0, list(range(known)), 0, list(range(1, 9))))
    plan = Plan(0, (), (), (RowStep(0, known, True, num_drafts),))
    drafts = torch.full((1, num_drafts), 5)
    step = state.prepare(plan, [num_drafts], drafts)
    assert step.room.tolist() == [1 + num_drafts]
    new = torch.tensor([[7, 8][: 1 + num_drafts]])
    state.settle(step, torch.tensor([1 + num_drafts]), new)
    assert state.token_ids[0, :MAX_LEN].tolist() == [*range(known), *new[0].tolist()]


@both
def test_a_full_row_takes_nothing(library: str) -> None:
    """As in a step that was launched before it was known to be the last."""
    state = row_state(library)
    state.start(start(1, [1, 2, 3, 4], 3, [1], max_len=4))
    step = state.prepare(Plan(0, (), (), (RowStep(1, 1, True),)), [0], no_drafts(1))
    assert step.room.tolist() == [0]
    last = state.settle(step, torch.tensor([0]), torch.tensor([[9]]))
    assert last.tolist() == [0]
    assert state.seq_len[1] == 3
    assert state.token_ids[1, :5].tolist() == [1, 2, 3, 4, 0]


def test_a_reused_row_forgets_the_pages_of_the_last_request() -> None:
    state = row_state("numpy")
    state.start(start(1, list(range(20)), 0, [1, 2, 3, 4, 5]))
    state.start(start(1, [5, 6], 0, [9]))
    assert state.tables[1].tolist() == [9] + [0] * 8  # one more than a full row has: the trash page
    assert state.tables[0].tolist() == [0] * 9
