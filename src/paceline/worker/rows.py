"""Per-row state of the worker: tokens, lengths and block tables, in tensors indexed by row.

The tensors on the device are the truth; `start_bound` is the host's upper bound of each row's length, which
is exact as long as no step is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.batch import Batch
from paceline.step import Plan, RowStart


@dataclass(frozen=True, slots=True)
class StepInput:
    """A plan as tensors: the batch, and the places in it whose next token is asked for."""

    batch: Batch
    rows: torch.Tensor  # int64 [S], every row of the plan
    q_lens: torch.Tensor  # int64 [S]
    sample_at: torch.Tensor  # int64 [P], index in the flat batch
    sample_rows: torch.Tensor  # int64 [P]
    sample_positions: torch.Tensor  # int64 [P], index in the sequence of the token to come


class RowState:
    """Tokens [rows, max_len], computed lengths [rows] and block tables [rows, pages] of all rows."""

    def __init__(self, num_rows: int, max_len: int, page_size: int, device: torch.device) -> None:
        num_pages = -(-max_len // page_size)
        self.tables = torch.zeros(num_rows, num_pages, dtype=torch.int32, device=device)
        self.token_ids = torch.zeros(num_rows, max_len + 1, dtype=torch.int64, device=device)
        self.seq_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.start_bound = np.zeros(num_rows, np.int64)
        self._num_pages = [0] * num_rows
        self._device = device

    def start(self, start: RowStart) -> None:
        """A request takes a row."""
        row, known = start.row, len(start.token_ids)
        self.token_ids[row, :known] = torch.tensor(start.token_ids, device=self._device)
        self.seq_len[row] = start.computed_len
        self.start_bound[row] = start.computed_len
        self.tables[row] = 0  # the trash page, until pages come
        self._num_pages[row] = 0
        self._add_pages(row, start.page_ids)

    def _add_pages(self, row: int, page_ids: tuple[int, ...]) -> None:
        if page_ids:
            end = self._num_pages[row] + len(page_ids)
            pages = torch.tensor(page_ids, dtype=torch.int32, device=self._device)
            self.tables[row, self._num_pages[row] : end] = pages
            self._num_pages[row] = end

    def prepare(self, plan: Plan) -> StepInput:
        """The plan's rows as one flat batch, in the plan's order."""
        for step in plan.rows:
            self._add_pages(step.row, step.new_page_ids)
        rows = np.array([step.row for step in plan.rows], np.int64)
        q_lens = np.array([step.query_len for step in plan.rows], np.int64)
        samples = np.array([step.samples for step in plan.rows], np.bool_)
        starts = self.start_bound[rows]
        ends = np.cumsum(q_lens)
        segments = np.stack((ends - q_lens, q_lens, starts, rows), axis=1)
        self.start_bound[rows] += q_lens

        flat_rows = torch.from_numpy(np.repeat(rows, q_lens)).to(self._device)
        offsets = torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - q_lens, q_lens)).to(self._device)
        positions = self.seq_len[flat_rows] + offsets
        batch = Batch(self.token_ids[flat_rows, positions], positions, segments)
        sample_at = torch.from_numpy((ends - 1)[samples]).to(self._device)
        return StepInput(
            batch=batch,
            rows=torch.from_numpy(rows).to(self._device),
            q_lens=torch.from_numpy(q_lens).to(self._device),
            sample_at=sample_at,
            sample_rows=flat_rows[sample_at],
            sample_positions=positions[sample_at] + 1,
        )

    def settle(self, step: StepInput, sampled: torch.Tensor) -> None:
        """The step's tokens are computed and `sampled` int64 [P] are known."""
        self.seq_len[step.rows] += step.q_lens
        self.token_ids[step.sample_rows, step.sample_positions] = sampled
