"""Per-row state of the worker: tokens, lengths and block tables, in tensors indexed by row.

The tensors on the device are the truth; `start_bound` is the host's upper bound of each row's length, which
is exact as long as no step is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.models.batch import Batch
from paceline.step import Plan, RowStart

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepInput:
    """A plan as tensors: the batch, and the *places* in it whose next token is asked for.

    A row that samples has one place for its newest known token and one for each draft behind it. The S rows
    of the plan, the R of them that sample and the P places all stand in the plan's order.
    """

    batch: Batch
    rows: torch.Tensor  # int64 [S]
    q_lens: torch.Tensor  # int64 [S], known tokens; drafts not among them
    begins: torch.Tensor  # int64 [S], index of a row's first token in the flat batch
    flat_rows: torch.Tensor  # int64 [M], the row of each token
    sampling: torch.Tensor  # int64 [R], index among the S rows
    drafts: torch.Tensor  # int64 [R, D], NO_DRAFT where there is none
    depths: torch.Tensor  # int64 [R], places of the row minus 1
    first: torch.Tensor  # int64 [R], the row's first place among the P
    room: torch.Tensor  # int64 [R], tokens that the row may still take
    sampling_rows: tuple[int, ...]  # [R], on the host, as the next two
    first_places: tuple[int, ...]  # [R]
    place_rows: tuple[int, ...]  # [P]
    sample_at: torch.Tensor  # int64 [P], index in the flat batch
    sample_rows: torch.Tensor  # int64 [P]
    sample_positions: torch.Tensor  # int64 [P], index in the sequence of the token to come
    num_drafted: torch.Tensor  # int64 [P], drafts between the row's newest known token and the place


class RowState:
    """Tokens [rows, max_len], computed lengths [rows] and block tables [rows, pages] of all rows."""

    def __init__(self, num_rows: int, max_len: int, page_size: int, device: torch.device) -> None:
        # A column more than any row fills: a position beyond max_len falls on the trash page.
        num_pages = -(-max_len // page_size) + 1
        self.tables = torch.zeros(num_rows, num_pages, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, max_len + 1, dtype=torch.int64, device=device)
        self.seq_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.max_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.start_bound = np.zeros(num_rows, np.int64)
        self._num_pages = [0] * num_rows
        self._device = device
        # What follows indexes small arrays, which costs five times less in numpy, over the same memory.
        on_cpu = device.type == "cpu"
        self._library: Any = np if on_cpu else torch
        state = (self.token_ids, self.seq_len, self.max_len)
        self._token_ids, self._seq_len, self._max_len = (t.numpy() if on_cpu else t for t in state)

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        """A host array as this state indexes with it."""
        return array if self._library is np else torch.from_numpy(array).to(self._device)

    def _tensor(self, array: Any) -> torch.Tensor:
        """The other way."""
        return torch.from_numpy(array) if self._library is np else array

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        row, known = start.row, len(start.token_ids)
        self.token_ids[row, :known] = torch.tensor(start.token_ids, device=self._device)
        self.seq_len[row] = start.computed_len
        self.max_len[row] = start.max_len
        self.start_bound[row] = start.computed_len
        self.tables[row] = 0  # the trash page, until pages come
        self._num_pages[row] = 0
        self._add_pages(row, start.page_ids)

    def add_pages(self, plan: Plan) -> None:
        """Lengthen the block tables as the plan says: before anything of its step runs."""
        for step in plan.rows:
            self._add_pages(step.row, step.new_page_ids)

    def _add_pages(self, row: int, page_ids: tuple[int, ...]) -> None:
        if page_ids:
            end = self._num_pages[row] + len(page_ids)
            pages = torch.tensor(page_ids, dtype=torch.int32, device=self._device)
            self.tables[row, self._num_pages[row] : end] = pages
            self._num_pages[row] = end

    def newest(self, rows: Ints, num_new: Ints) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that are about to compute `num_new` tokens each, up to the newest: int64 [B], as tensors; its
        id; and its position.
        """
        at = self._array(rows)
        newest = self._seq_len[at] + self._array(num_new - 1)
        return self._tensor(at), self._tensor(self._token_ids[at, newest]), self._tensor(newest)

    def prepare(self, plan: Plan, depths: Sequence[int], drafts: torch.Tensor) -> StepInput:
        """The plan's rows as one flat batch, in the plan's order.

        Args:
            depths: of each row of the plan: drafts that go through the target, at most the plan's.
            drafts: int64 [S, D], what they are.
        """
        rows = np.array([step.row for step in plan.rows], np.int64)
        q_lens = np.array([step.query_len for step in plan.rows], np.int64)
        samples = np.array([step.samples for step in plan.rows], np.bool_)
        extra = np.array(depths, np.int64)
        lens = q_lens + extra
        starts, ends = self.start_bound[rows], np.cumsum(lens)
        self.start_bound[rows] += lens
        flat_rows, offsets = np.repeat(rows, lens), np.arange(ends[-1]) - np.repeat(ends - lens, lens)

        sampling = np.flatnonzero(samples)
        num_places = 1 + extra[sampling]
        first = np.cumsum(num_places) - num_places
        place_rows = np.repeat(rows[sampling], num_places)
        num_drafted = np.arange(len(place_rows)) - np.repeat(first, num_places)
        sample_at = np.repeat(ends[sampling] - num_places, num_places) + num_drafted

        flat, at, sampled = self._array(flat_rows), self._array(sample_at), self._array(rows[sampling])
        positions = self._seq_len[flat] + self._array(offsets)
        token_ids = self._token_ids[flat, positions]
        drafted: Any = drafts.numpy() if self._library is np else drafts
        drafted = drafted[self._array(sampling)]
        if drafted.shape[1] and extra.any():
            behind = np.flatnonzero(num_drafted)
            source = np.repeat(np.arange(len(sampling)), num_places)[behind]
            chosen = drafted[self._array(source), self._array(num_drafted[behind] - 1)]
            token_ids[at[self._array(behind)]] = chosen.clip(min=0)
        t = self._tensor
        segments = np.empty((len(rows), 4), np.int64)
        segments[:, 0], segments[:, 1], segments[:, 2], segments[:, 3] = ends - lens, lens, starts, rows
        return StepInput(
            batch=Batch(t(token_ids), t(positions), segments),
            rows=t(self._array(rows)),
            q_lens=t(self._array(q_lens)),
            begins=t(self._array(ends - lens)),
            flat_rows=t(flat),
            sampling=t(self._array(sampling)),
            drafts=t(drafted),
            depths=t(self._array(extra[sampling])),
            first=t(self._array(first)),
            room=t(self._max_len[sampled] - self._seq_len[sampled] - self._array(q_lens[sampling])),
            sampling_rows=tuple(rows[sampling].tolist()),
            first_places=tuple(first.tolist()),
            place_rows=tuple(place_rows.tolist()),
            sample_at=t(at),
            sample_rows=t(self._array(place_rows)),
            sample_positions=t(positions[at] + 1),
            num_drafted=t(self._array(num_drafted)),
        )

    def settle(self, step: StepInput, accept_len: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The step's tokens are computed and its new ones are known.

        Args:
            accept_len: int64 [R].
            token_ids: int64 [R, 1 + D]; the first `accept_len` of each row are its new tokens.

        Returns:
            int64 [S], the place in the batch of each row's last settled position.
        """
        tensors = (step.rows, step.begins, step.sampling, step.q_lens, accept_len, token_ids)
        arrays: Any = (x.numpy() for x in tensors) if self._library is np else tensors
        all_rows, begins, sampling, q_lens, lens, new = arrays
        rows = all_rows[sampling]
        ahead = self._array(np.arange(new.shape[1]))
        columns = (self._seq_len[rows] + q_lens[sampling])[:, None] + ahead
        trash = self.token_ids.shape[1] - 1  # read by nobody who minds
        self._token_ids[rows[:, None], self._library.where(ahead < lens[:, None], columns, trash)] = new
        settled = q_lens + 0
        settled[sampling] += lens - 1
        self._seq_len[all_rows] += settled
        # np.maximum, not clip: that goes through three layers of Python.
        at_least_one = np.maximum(settled, 1) if self._library is np else settled.clamp(min=1)
        return self._tensor(begins + at_least_one - 1)

    def correct(self, row: int, surplus: int) -> None:
        """A step has come back with `surplus` positions less than the bound took it for."""
        self.start_bound[row] -= surplus

    def next_ids(self, step: StepInput) -> torch.Tensor:
        """int64 [M], the token behind each of the step's positions, once the step has settled."""
        if self._library is np:
            return torch.from_numpy(self._token_ids[step.flat_rows.numpy(), step.batch.positions.numpy() + 1])
        return self.token_ids[step.flat_rows, step.batch.positions + 1]
