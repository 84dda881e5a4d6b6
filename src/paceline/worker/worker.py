"""Runs plans on the model: inputs, forward, sampling, and the records that come back.

Knows nothing of requests, queues or text, and nothing of what kind of model or device it drives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.models.batch import Batch
from paceline.request import TokenLogprobs
from paceline.step import Pending, Plan, RowResult, StepResult
from paceline.worker.rows import RowState, StepInput
from paceline.worker.sampling import LogprobTensors, SamplerState, logprobs, sample


class Model(Protocol):
    """A decoder with its K/V cache."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states fp32 [M, hidden], valid until the next call."""
        ...

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """fp32 [P, vocab] for P rows of hidden states, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step's tokens, perhaps still on the device."""

    plan: Plan
    token_ids: torch.Tensor  # int64 [P], for the rows that sample, in plan order
    asked: tuple[int, ...]  # which of the P want logprobs
    num_top: tuple[int, ...]  # and how many of the most likely
    logprobs: LogprobTensors | None

    def result(self) -> StepResult:
        token_ids = iter(self.token_ids.tolist())
        records = self.logprobs.records(self.num_top) if self.logprobs is not None else []
        by_place = dict(zip(self.asked, records, strict=True))
        rows: list[RowResult] = []
        place = 0
        for step in self.plan.rows:
            tokens: tuple[int, ...] = ()
            scores: tuple[TokenLogprobs, ...] | None = None
            if step.samples:
                tokens = (next(token_ids),)
                scores = (by_place[place],) if place in by_place else None
                place += 1
            rows.append(RowResult(step.row, step.depth, tokens, scores))
        return StepResult(self.plan.step_id, tuple(rows))


class ModelWorker:
    """A `paceline.step.Worker` over a model; keeps rows and sampling parameters."""

    def __init__(self, model: Model, rows: RowState, sampler: SamplerState) -> None:
        self._model, self._rows, self._sampler = model, rows, sampler
        self._num_top: dict[int, int] = {}  # rows that want logprobs

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """See `paceline.step.Worker`."""
        for row in plan.ends:
            self._sampler.end(row)
            self._num_top.pop(row, None)
        for start in plan.starts:
            self._rows.start(start)
            self._sampler.start(start.row, start.params, start.choice, start.token_ids, start.prompt_len)
            self._num_top.pop(start.row, None)
            if start.params.logprobs is not None:
                self._num_top[start.row] = start.params.logprobs
        if not plan.rows:
            return _Pending(plan, torch.empty(0, dtype=torch.int64), (), (), None)
        step = self._rows.prepare(plan)
        hidden = self._model.forward(step.batch)
        token_ids, asked, scores = self._sample(plan, step, hidden)
        self._rows.settle(step, token_ids)
        return _Pending(plan, token_ids, asked, tuple(self._num_top_at(plan, asked)), scores)

    def _sample(
        self, plan: Plan, step: StepInput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, ...], LogprobTensors | None]:
        if not len(step.sample_at):
            return step.sample_rows, (), None
        logits = self._model.logits(hidden[step.sample_at])
        token_ids = sample(logits, step.sample_rows, step.sample_positions, self._sampler)
        if self._sampler.any_penalized:
            self._sampler.accept(step.sample_rows, token_ids)
        if not self._num_top:
            return token_ids, (), None
        sampling = [s.row for s in plan.rows if s.samples]
        asked = tuple(place for place, row in enumerate(sampling) if row in self._num_top)
        if not asked:
            return token_ids, (), None
        at = torch.tensor(asked, device=logits.device)
        widest = max(self._num_top[sampling[place]] for place in asked)
        return token_ids, asked, logprobs(logits[at], token_ids[at], widest)

    def _num_top_at(self, plan: Plan, asked: tuple[int, ...]) -> list[int]:
        if not asked:
            return []
        sampling = [s.row for s in plan.rows if s.samples]
        return [self._num_top[sampling[place]] for place in asked]
