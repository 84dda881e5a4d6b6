"""Runs plans on the model: inputs, forward, sampling, and the records that come back.

Knows nothing of requests, queues or text, and nothing of what kind of model or device it drives.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.models.batch import Batch
from paceline.request import SamplingParams
from paceline.step import GrammarEnd, Pending, Plan, RowResult, StepResult
from paceline.worker.grammar import GrammarComplete, GrammarFailure, GrammarRows, Mask, masked
from paceline.worker.rows import RowState, StepInput
from paceline.worker.sampling import SamplerState, sample
from paceline.worker.scores import Scores, Wants, answer_scores, prompt_scores


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
    """A step's tokens and logprobs, perhaps still on the device."""

    plan: Plan
    token_ids: torch.Tensor  # int64 [P], for the rows that sample, in plan order
    asked: tuple[int, ...] = ()  # which of the P places have a score
    scores: Scores | None = None
    prompt_scores: Mapping[int, Scores] = field(default_factory=dict)  # by row
    grammar_ends: Mapping[int, GrammarEnd] = field(default_factory=dict)  # by row

    def result(self) -> StepResult:
        token_ids = iter(self.token_ids.tolist())
        records = self.scores.records() if self.scores is not None else ()
        by_place = dict(zip(self.asked, records, strict=True))
        rows: list[RowResult] = []
        place = 0
        for step in self.plan.rows:
            end, prompt = self.grammar_ends.get(step.row), self.prompt_scores.get(step.row)
            num_tokens, score = 0, None
            if step.samples:
                token = next(token_ids)
                num_tokens = 1 if end is None else end.num_tokens
                score, place = by_place.get(place), place + 1
            rows.append(
                RowResult(
                    step.row,
                    step.depth,
                    (token,) if num_tokens else (),
                    None if score is None else (score,)[:num_tokens],
                    None if prompt is None else prompt.records(),
                    end,
                )
            )
        return StepResult(self.plan.step_id, tuple(rows))


class ModelWorker:
    """A `paceline.step.Worker` over a model; keeps rows, sampling parameters and grammars."""

    def __init__(self, model: Model, rows: RowState, sampler: SamplerState, grammars: GrammarRows) -> None:
        self._model, self._rows, self._sampler, self._grammars = model, rows, sampler, grammars
        self._wants = Wants()

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """See `paceline.step.Worker`."""
        return None if params.grammar is None else self._grammars.prepare(params.grammar)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """See `paceline.step.Worker`."""
        for row in plan.ends:
            self._sampler.end(row)
            self._grammars.end(row)
            self._wants.end(row)
        for start in plan.starts:
            self._rows.start(start)
            self._sampler.start(start.row, start.params, start.choice, start.token_ids, start.prompt_len)
            self._grammars.start(start)
            self._wants.start(start.row, start.params, start.prompt_len)
        if not plan.rows:
            return _Pending(plan, torch.empty(0, dtype=torch.int64))
        step = self._rows.prepare(plan)
        hidden = self._model.forward(step.batch)
        pending = self._sample(plan, step, hidden)
        self._rows.settle(step, pending.token_ids)
        return pending

    def _sample(self, plan: Plan, step: StepInput, hidden: torch.Tensor) -> _Pending:
        known = self._rows.token_ids
        prompt = prompt_scores(self._wants, plan, step, hidden, known, self._model.logits)
        if not len(step.sample_at):
            return _Pending(plan, step.sample_rows, prompt_scores=prompt)
        # index_select, not [...]: indexing takes to torch's threads from 3,277 numbers on, and those spin for
        # milliseconds afterwards on the cores that the kernels want (measured: 1.5 times the step at 8 rows).
        logits = self._model.logits(hidden.index_select(0, step.sample_at))
        rows = {place: s.row for place, s in enumerate(s for s in plan.rows if s.samples)}
        constrained = {place: row for place, row in rows.items() if row in self._grammars}
        masks, ends = self._masks(constrained)
        allowed = masked(logits, masks) if masks else logits
        token_ids = sample(allowed, step.sample_rows, step.sample_positions, self._sampler)
        if self._sampler.any_penalized:
            self._sampler.accept(step.sample_rows, token_ids)
        for place in masks:
            end = self._grammars.settle(rows[place], int(token_ids[place]))
            if end is not None:
                ends[rows[place]] = end
        if not self._wants.answer:
            return _Pending(plan, token_ids, (), None, prompt, ends)
        asked, scores = answer_scores(self._wants, plan, logits, token_ids)
        return _Pending(plan, token_ids, asked, scores, prompt, ends)

    def _masks(self, constrained: Mapping[int, int]) -> tuple[dict[int, Mask], dict[int, GrammarEnd]]:
        """The masks of places (given with their rows), and the ends of rows that can have none."""
        masks: dict[int, Mask] = {}
        ends: dict[int, GrammarEnd] = {}
        for place, row in constrained.items():
            try:
                masks[place], lift = self._grammars.allowed(row)
            except GrammarComplete:
                ends[row] = GrammarEnd(0)
            except GrammarFailure as failure:
                ends[row] = GrammarEnd(0, str(failure))
            else:
                if lift:
                    self._sampler.lift_min_tokens(row)
        return masks, ends
