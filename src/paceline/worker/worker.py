"""Runs plans on the model: drafts, inputs, forward, sampling, acceptance, and the records that come back.

Knows nothing of requests, queues or text, and nothing of what kind of model, drafter or device it drives.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paceline.draft.protocol import Drafter, Settled
from paceline.errors import describe
from paceline.models.batch import Batch
from paceline.request import SamplingParams, TokenLogprobs
from paceline.step import GrammarEnd, Pending, Plan, RowResult, RowStart, RowStep, StepResult
from paceline.worker.grammar import GrammarRows, Mask, masked
from paceline.worker.proposing import Proposals, propose
from paceline.worker.rows import RowState, StepInput
from paceline.worker.sampling import Prefix, SamplerState, sample
from paceline.worker.scores import Scores, Wants, answer_scores, prompt_scores
from paceline.worker.verify import Accepted, accept

logger = logging.getLogger(__name__)


class Model(Protocol):
    """A decoder with its K/V cache."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states fp32 [M, hidden], valid until the next call."""
        ...

    @property
    def features(self) -> torch.Tensor | None:
        """What the drafter reads of the latest forward: fp32 [M, k T], valid until the next."""
        ...

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """fp32 [P, vocab] for P rows of hidden states, valid until the next call."""
        ...


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step's tokens and logprobs, perhaps still on the device."""

    plan: Plan
    rows: RowState
    proposals: Proposals | None = None
    accepted: Accepted | None = None  # of the R rows that sample, in plan order
    first_places: Sequence[int] = ()  # [R], of the P places of these rows
    asked: tuple[int, ...] = ()  # which of the P places have a score
    scores: Scores | None = None
    prompt_scores: Mapping[int, Scores] = field(default_factory=dict)  # by row
    grammar_ends: Mapping[int, GrammarEnd] = field(default_factory=dict)  # by row
    drafter_error: str | None = None

    def result(self) -> StepResult:
        if self.proposals is None:
            return StepResult(self.plan.step_id, (), self.drafter_error)
        records = self.scores.records() if self.scores is not None else ()
        by_place = dict(zip(self.asked, records, strict=True))
        blocks = iter(self._blocks())
        rows: list[RowResult] = []
        num_drafted, depths = self.proposals.num_drafted(), self.proposals.depths
        for step, drafted, depth in zip(self.plan.rows, num_drafted, depths, strict=True):
            end, prompt = self.grammar_ends.get(step.row), self.prompt_scores.get(step.row)
            token_ids: tuple[int, ...] = ()
            scores: tuple[TokenLogprobs, ...] | None = None
            if step.samples:
                block, place = next(blocks)
                self.rows.correct(step.row, 1 + depth - len(block))
                token_ids = block if end is None else block[: end.num_tokens]
                if place in by_place:
                    scores = tuple(by_place[place + j] for j in range(len(token_ids)))
            probs = self.proposals.probs.get(step.row)
            rows.append(
                RowResult(
                    step.row,
                    step.depth,
                    token_ids,
                    scores,
                    None if prompt is None else prompt.records(),
                    end,
                    num_drafted=drafted,
                    num_verified=drafted,
                    draft_probs=None if probs is None else tuple(probs[:drafted].tolist()),
                    shadow_ids=self._shadow_ids(step),
                )
            )
        return StepResult(self.plan.step_id, tuple(rows), self.drafter_error)

    def _shadow_ids(self, step: RowStep) -> tuple[int, ...]:
        """What the row drafted in the shadow, up to its first NO_DRAFT."""
        assert self.proposals is not None
        drafts = self.proposals.shadows.get(step.row)
        if drafts is None:
            return ()
        return tuple(itertools.takewhile(lambda draft: draft >= 0, drafts[: step.shadow_depth].tolist()))

    def _blocks(self) -> list[tuple[tuple[int, ...], int]]:
        """The accepted tokens of each row that samples, and its first place."""
        if self.accepted is None:
            return []
        lens, token_ids = self.accepted.accept_len.tolist(), self.accepted.token_ids.tolist()
        return [
            (tuple(block[:accept_len]), place)
            for block, accept_len, place in zip(token_ids, lens, self.first_places, strict=True)
        ]


class ModelWorker:
    """A `paceline.step.Worker` over a model; keeps rows, sampling parameters and grammars.

    Args:
        drafter: None: every step is plain. One that raises is given up: a step can do without drafts.
        trims: whether a step leaves out places that got no draft, for which it reads the drafts on the host.
    """

    def __init__(
        self,
        model: Model,
        rows: RowState,
        sampler: SamplerState,
        grammars: GrammarRows,
        drafter: Drafter | None = None,
        trims: bool = True,
    ) -> None:
        self._model, self._rows, self._sampler, self._grammars = model, rows, sampler, grammars
        self._drafter, self._trims = drafter, trims
        self._drafter_error: str | None = None
        self._wants = Wants()
        self._asking: set[int] = set()  # rows that want the drafter's top probabilities

    @property
    def device(self) -> torch.device:
        """Where rows and drafts are."""
        return self._sampler.device

    @property
    def drafter(self) -> Drafter | None:
        """Who drafts; None: nobody, or it was given up."""
        return self._drafter

    @contextlib.contextmanager
    def drafting_by(self, drafter: Drafter) -> Iterator[None]:
        """Put another drafter in the place of the worker's own, and that one back, as it was, at the end."""
        self._wait_for_drafter()
        own = self._drafter, self._drafter_error
        self._drafter = drafter
        try:
            yield
        finally:
            self._wait_for_drafter()
            self._drafter, self._drafter_error = own

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """See `paceline.step.Worker`."""
        return None if params.grammar is None else self._grammars.prepare(params.grammar)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        """See `paceline.step.Worker`."""
        self._wait_for_drafter()  # until now, what the last step left to it went on beside the host's work
        for row in plan.ends:
            self._sampler.end(row)
            self._grammars.end(row)
            self._wants.end(row)
            self._asking.discard(row)
        for start in plan.starts:
            self._start(start)
        if not plan.rows:
            return _Pending(plan, self._rows, drafter_error=self._drafter_error)
        self._rows.add_pages(plan)
        proposals = self._propose(plan)
        step = self._rows.prepare(plan, proposals.depths, proposals.token_ids)
        hidden = self._model.forward(step.batch)
        return self._finish(plan, proposals, step, hidden)

    def _start(self, start: RowStart) -> None:
        self._rows.start(start)
        self._sampler.start(start.row, start.params, start.choice, start.token_ids, start.prompt_len)
        self._grammars.start(start)
        self._wants.start(start.row, start.params, start.prompt_len)
        self._asking.discard(start.row)
        if start.params.speculation_summary:
            self._asking.add(start.row)

    def _propose(self, plan: Plan) -> Proposals:
        state = (self._rows, self._sampler, self._grammars, self._asking, self._trims)
        try:
            return propose(plan, self._drafter, *state)
        except Exception as error:
            if self._drafter is None:
                raise
            self._give_up(error)
            return propose(plan, None, *state)

    def _finish(self, plan: Plan, proposals: Proposals, step: StepInput, hidden: torch.Tensor) -> _Pending:
        """From hidden states to tokens; the rows and the drafter move on."""
        known = self._rows.token_ids
        prompt = prompt_scores(self._wants, plan, step, hidden, known, self._model.logits)
        ends: dict[int, GrammarEnd] = {}
        asked: tuple[int, ...] = ()
        scores = None
        if not len(step.sample_at):  # of no rows
            accepted = Accepted(step.depths, step.drafts.new_empty(0, 1))
        else:
            # index_select, not [...]: indexing takes to torch's threads from 3,277 numbers on, and those spin
            # for milliseconds afterwards on the cores that the kernels want (measured: 1.5 times the step at
            # 8 rows).
            logits = self._model.logits(hidden.index_select(0, step.sample_at))
            y = self._choose(proposals, step, logits, ends)
            accepted = accept(y, step.drafts, step.first, step.depths, step.room)
            self._count(step, accepted)
            self._settle_grammars(proposals, step, accepted, ends)
            if self._wants.answer:
                asked, scores = answer_scores(self._wants, step.place_rows, logits, y)
        last = self._rows.settle(step, accepted.accept_len, accepted.token_ids)
        self._settle_draft(step, last)
        return _Pending(
            plan,
            self._rows,
            proposals,
            accepted,
            step.first_places,
            asked,
            scores,
            prompt,
            ends,
            self._drafter_error,
        )

    def _choose(
        self, proposals: Proposals, step: StepInput, logits: torch.Tensor, ends: dict[int, GrammarEnd]
    ) -> torch.Tensor:
        """The target's token at each place, int64 [P]; notes rows whose grammar has ended in `ends`."""
        masks: dict[int, Mask] = {}
        for place, row in zip(step.first_places, step.sampling_rows, strict=True):
            cursor = proposals.cursors.get(row)
            if cursor is None:
                continue
            if cursor.end is not None:
                ends[row] = cursor.end
            masks |= {place + j: mask for j, mask in enumerate(cursor.masks)}
        prefix = None
        if step.drafts.shape[1] and self._sampler.any_penalized:
            prefix = Prefix(step.batch.token_ids.index_select(0, step.sample_at), step.num_drafted)
        allowed = masked(logits, masks) if masks else logits
        return sample(allowed, step.sample_rows, step.sample_positions, self._sampler, prefix)

    def _count(self, step: StepInput, accepted: Accepted) -> None:
        """Count the new tokens of rows with penalties."""
        if self._sampler.any_penalized:
            ahead = torch.arange(accepted.token_ids.shape[1], device=accepted.token_ids.device)
            new = ahead < accepted.accept_len[:, None]
            rows = step.rows[step.sampling][:, None].expand_as(new)
            self._sampler.accept(rows[new], accepted.token_ids[new])

    def _settle_grammars(
        self, proposals: Proposals, step: StepInput, accepted: Accepted, ends: dict[int, GrammarEnd]
    ) -> None:
        for i, row in enumerate(step.sampling_rows):
            if row in proposals.cursors and row not in ends:
                block = accepted.token_ids[i, : int(accepted.accept_len[i])].tolist()
                end = self._grammars.settle_block(row, block)
                if end is not None:
                    ends[row] = end

    def _settle_draft(self, step: StepInput, last: torch.Tensor) -> None:
        if self._drafter is None:
            return
        try:
            self._drafter.settle(
                Settled(step.batch, self._rows.next_ids(step), self._model.features, step.rows, last)
            )
        except Exception as error:
            self._give_up(error)

    def _wait_for_drafter(self) -> None:
        if self._drafter is not None:
            try:
                self._drafter.wait()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Go on without the drafter."""
        self._drafter_error = describe(error)
        self._drafter = None
        logger.info("where the drafter failed", exc_info=error)  # the engine warns
