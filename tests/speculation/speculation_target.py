"""A real worker under a real scheduler and engine, with any drafter and any choice of depth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from chosen_depths import Chosen
from exact_model import make_exact
from made_drafters import KEY, Knowing, Spoil

from paceline.config import EngineConfig
from paceline.draft.protocol import Drafter
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.steering import Steering
from paceline.policy import Fixed
from paceline.request import EngineRequest, RequestOutput, SamplingParams, SpeculationSummary, TokenLogprobs
from paceline.step import Pending, Plan, StepResult
from paceline.worker.build import ModelInfo, build_worker
from paceline.worker.worker import ModelWorker


@dataclass
class Answer:
    """All that a request was given."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationSummary | None = None

    @property
    def words(self) -> tuple[list[int], str | None, int | None, str | None]:
        """What must not depend on drafts."""
        return self.token_ids, self.reason, self.stop_token_id, self.error

    def take(self, output: RequestOutput) -> None:
        assert self.reason is None, "an output behind the final one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.reason, self.stop_token_id, self.error = output.finish_reason, output.stop_token_id, output.error
        self.num_cached_tokens, self.speculation = output.num_cached_tokens, output.speculation


Answers = dict[str, Answer]


@dataclass
class Watched:
    """A worker, and all that it was told and said."""

    inner: ModelWorker
    steps: list[tuple[Plan, StepResult]] = field(default_factory=list)

    def prepare(self, params: SamplingParams) -> Any:
        return self.inner.prepare(params)

    def launch(self, plan: Plan) -> Pending:
        pending = self.inner.launch(plan)
        self.steps.append((plan, pending.result()))
        return _Done(self.steps[-1][1])

    @property
    def depths(self) -> list[tuple[int, ...]]:
        """Of each step: the depths of its rows."""
        return [tuple(row.depth for row in plan.rows) for plan, _ in self.steps]

    @property
    def num_accepted(self) -> int:
        return sum(max(0, len(row.token_ids) - 1) for _, result in self.steps for row in result.rows)


@dataclass(frozen=True)
class _Done:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


@dataclass
class Run:
    """An engine at work, and its answers so far. Its books are checked at every step."""

    engine: Engine
    scheduler: Scheduler
    worker: Watched
    answers: Answers = field(default_factory=dict)
    checked: bool = True

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.engine.add(request)
            self.answers[request.request_id] = Answer()

    def step(self) -> None:
        for output in self.engine.step():
            self.answers[output.request_id].take(output)
        if self.checked:
            self.scheduler.check()

    def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        assert output is not None
        self.answers[request_id].take(output)

    def drain(self) -> Answers:
        while self.engine.has_work:
            self.step()
        self.scheduler.check()
        assert self.scheduler.stats().num_pages_used == 0
        assert all(answer.reason is not None for answer in self.answers.values())
        return self.answers


class Target:
    """A model that is loaded once, for many engines one after the other.

    Args:
        head: of its own drafter.
        exact: compute so that batch shapes do not matter, see `exact_model`.
    """

    def __init__(
        self, model: Path, head: Path | str, *, exact: bool, threads: int = 1, **settings: Any
    ) -> None:
        self.config = EngineConfig(model=str(model), draft=str(head), threads=threads, **settings)
        self.worker: ModelWorker
        self.info: ModelInfo
        self.worker, self.info = build_worker(self.config)
        if exact:
            make_exact(self.worker, self.info, self.config.page_size)
        drafter = self.worker._drafter
        assert drafter is not None
        self.own_drafter: Drafter = drafter

    def run(
        self,
        drafter: Drafter | None = None,
        depth: int | Callable[[int], int] = 0,
        *,
        num_pages: int | None = None,
        max_model_len: int | None = None,
        **changes: Any,
    ) -> Run:
        """A new engine. `num_pages` and `max_model_len` may be less than the worker has."""
        self.worker.launch(Plan(-1, tuple(range(self.config.max_num_seqs)), (), ()))
        self.worker._drafter, self.worker._drafter_error = drafter, None
        config = replace(self.config, **changes)
        scheduler = Scheduler(
            config,
            num_pages=self.info.num_pages if num_pages is None else num_pages,
            eos_token_ids=self.info.eos_token_ids,
            max_model_len=max_model_len or self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            max_depth=self.info.max_depth,
            steering=Steering(Fixed(depth) if isinstance(depth, int) else Chosen(depth)),
        )
        watched = Watched(self.worker)
        return Run(Engine(scheduler, watched, config), scheduler, watched)

    def answer(
        self,
        requests: Iterable[EngineRequest],
        drafter: Drafter | None = None,
        depth: int | Callable[[int], int] = 0,
        **changes: Any,
    ) -> Answers:
        """Run these requests, all at once as far as there are rows."""
        run = self.run(drafter, depth, **changes)
        run.checked = False
        run.add(*requests)
        return run.drain()

    def knowing(self, requests: Sequence[EngineRequest], answers: Answers, spoil: Spoil) -> Knowing:
        """A drafter that knows these answers."""
        texts = [[*request.prompt_ids, *answers[request.request_id].token_ids] for request in requests]
        return Knowing(self.worker._rows.token_ids, texts, spoil)


def prompt(number: int, length: int = 5) -> list[int]:
    """Token ids below 203; its first two tell it from other numbers below 40,000."""
    head = [3 + number // 200, 3 + number % 200]
    return (head + [3 + (number * 31 + 17 * j * j) % 200 for j in range(length - KEY)])[:length]


def request(
    number: int, name: str | None = None, length: int = 5, choice: int = 0, **params: Any
) -> EngineRequest:
    """Its prompt and seed go by its number."""
    settings = {"seed": 1000 + number, "max_tokens": 10} | params
    return EngineRequest(name or str(number), prompt(number, length), SamplingParams(**settings), choice)


def changing() -> Callable[[int], int]:
    """Another depth at every step."""
    depths: Iterator[int] = itertools.cycle((4, 0, 2, 3, 1, 0, 4, 1))
    return lambda num_decoding: next(depths)


def check_same(plain: Answers, got: Answers) -> None:
    """The words are the same for every request, and so are logprobs, as far as float32 goes."""
    assert plain.keys() == got.keys()
    differ = [name for name, answer in plain.items() if got[name].words != answer.words]
    assert not differ, (
        f"{len(differ)} answers differ, {differ[0]}: {plain[differ[0]]} is now {got[differ[0]]}"
    )
    for name, answer in plain.items():
        for mine, theirs in (
            (got[name].logprobs, answer.logprobs),
            (got[name].prompt_logprobs, answer.prompt_logprobs),
        ):
            assert [len(entry.top_ids) for entry in mine] == [len(entry.top_ids) for entry in theirs]
            assert [entry.logprob for entry in mine] == pytest.approx([e.logprob for e in theirs], abs=1e-4)
            assert [p for entry in mine for p in entry.top_logprobs] == pytest.approx(
                [p for entry in theirs for p in entry.top_logprobs], abs=1e-4
            )
