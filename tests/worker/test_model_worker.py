"""ModelWorker on a tiny real model: plans in, tokens out, against transformers' own continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_driver import random_ids

from paceline.config import EngineConfig
from paceline.request import SamplingParams
from paceline.step import Plan, RowResult, RowStart, RowStep
from paceline.worker.build import build_worker
from paceline.worker.worker import ModelWorker

PAGE, VOCAB = 16, 208
GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass
class Session:
    """A worker and the bookkeeping that the scheduler would do: step ids and pages."""

    worker: ModelWorker
    num_steps: int = 0
    next_page: int = 1
    pages: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def launch(
        self, *rows: RowStep, starts: Sequence[RowStart] = (), ends: Sequence[int] = ()
    ) -> tuple[RowResult, ...]:
        plan = Plan(self.num_steps, tuple(ends), tuple(starts), rows)
        self.num_steps += 1
        result = self.worker.launch(plan).result()
        assert result.step_id == plan.step_id
        assert [r.row for r in result.rows] == [r.row for r in rows]
        return result.rows

    def start(
        self,
        row: int,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        prompt_len: int | None = None,
        computed_len: int = 0,
        shared: Sequence[int] = (),
    ) -> RowStart:
        """A start with pages for 128 tokens, `shared` ones first."""
        needed = 128 // PAGE - len(shared)
        self.pages[row] = (*shared, *range(self.next_page, self.next_page + needed))
        self.next_page += needed
        prompt_len = len(token_ids) if prompt_len is None else prompt_len
        return RowStart(row, tuple(token_ids), prompt_len, computed_len, self.pages[row], params, 0, 128)

    def generate(self, row: int, start: RowStart, num_tokens: int, chunk: int = 512) -> list[int]:
        """Run one row alone: its known tokens `chunk` at a time, then token by token."""
        known, at, starts = len(start.token_ids), start.computed_len, [start]
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            query_len = min(chunk, known - at) if not tokens else 1
            at += query_len
            samples = at >= known
            (result,) = self.launch(RowStep(row, query_len, samples), starts=starts)
            assert len(result.token_ids) == int(samples)
            tokens += result.token_ids
            starts = []
        return tokens


@pytest.fixture
def session(tiny_folder: Path) -> Session:
    config = EngineConfig(model=str(tiny_folder), precision="fp32", max_num_seqs=4, threads=1)
    return Session(build_worker(config)[0])


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_folder).eval()


@torch.inference_mode()
def logits_after(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([list(token_ids)])).logits[0, -1].float()


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(int(logits_after(model, [*prompt, *tokens]).argmax()))
    return tokens


@pytest.mark.parametrize("chunk", [512, 7, 1])
def test_generates_what_transformers_does(session: Session, model: Any, chunk: int) -> None:
    prompt = random_ids(45, VOCAB, 1)
    assert session.generate(2, session.start(2, prompt), 12, chunk) == greedy(model, prompt, 12)


def test_rows_side_by_side_and_reused(session: Session, model: Any) -> None:
    prompts = [random_ids(n, VOCAB, seed) for seed, n in enumerate((30, 5, 17, 40, 9))]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    got: dict[int, list[int]] = {}
    of_row = {0: 0, 1: 1, 3: 2}
    starts = [session.start(row, prompts[i]) for row, i in of_row.items()]
    steps = [RowStep(3, 17, True), RowStep(0, 11, False), RowStep(1, 5, True)]  # a plan's order is its own
    for result in session.launch(*steps, starts=starts):
        got.setdefault(of_row[result.row], []).extend(result.token_ids)
    steps = [RowStep(0, 19, True), RowStep(1, 1, True), RowStep(3, 1, True)]
    for result in session.launch(*steps):
        got.setdefault(of_row[result.row], []).extend(result.token_ids)
    # Row 1 goes to somebody else, and row 2 is taken, while the others go on.
    got_of_1, of_row = got.pop(1), {0: 0, 3: 2, 1: 3, 2: 4}
    starts = [session.start(row, prompts[i]) for row, i in ((1, 3), (2, 4))]
    steps = [RowStep(1, 40, True), RowStep(0, 1, True), RowStep(2, 9, True), RowStep(3, 1, True)]
    for i in range(6):
        plan: dict[str, Any] = {"ends": [1], "starts": starts} if i == 0 else {}
        for result in session.launch(*steps, **plan):
            got.setdefault(of_row[result.row], []).extend(result.token_ids)
        steps = [RowStep(row, 1, True) for row in (1, 0, 2, 3)]
    assert got_of_1 == expected[1][:2]
    for i, tokens in got.items():
        assert tokens[:6] == expected[i]


def test_shared_pages_stand_for_their_tokens(session: Session, model: Any) -> None:
    prefix = random_ids(2 * PAGE, VOCAB, 3)
    first, second = prefix + random_ids(8, VOCAB, 4), prefix + random_ids(11, VOCAB, 5)
    assert session.generate(0, session.start(0, first), 4) == greedy(model, first, 4)
    start = session.start(1, second, computed_len=2 * PAGE, shared=session.pages[0][:2])
    assert session.generate(1, start, 4) == greedy(model, second, 4)
    # Without those pages the answer is another: the test would see it.
    session.worker._model._attention._cache[:, :, PAGE : 3 * PAGE] = 0.0
    start = session.start(2, second, computed_len=2 * PAGE, shared=session.pages[0][:2])
    assert session.generate(2, start, 4) != greedy(model, second, 4)


def test_a_preempted_request_goes_on_where_it_was(session: Session, model: Any) -> None:
    prompt = random_ids(20, VOCAB, 6)
    expected = greedy(model, prompt, 10)
    tokens = session.generate(0, session.start(0, prompt), 4)
    again = session.start(3, prompt + tokens, prompt_len=len(prompt))
    session.launch(ends=[0])
    assert tokens + session.generate(3, again, 6, chunk=13) == expected


def test_ends_alone_and_chunks_alone_yield_nothing(session: Session) -> None:
    assert session.launch() == ()
    start = session.start(0, random_ids(20, VOCAB))
    (result,) = session.launch(RowStep(0, 5, False), starts=[start])
    assert (result.token_ids, result.logprobs) == ((), None)
    assert session.launch(ends=[0]) == ()


def test_logprobs_are_the_models_own_and_only_for_those_who_ask(session: Session, model: Any) -> None:
    asks = [
        SamplingParams(temperature=0.0, seed=0, logprobs=3, logit_bias={7: 100.0}),  # picks token 7
        SamplingParams(temperature=0.0, seed=0),
        SamplingParams(temperature=0.7, seed=5, top_k=5, logprobs=0),
        SamplingParams(temperature=0.0, seed=0, logprobs=1),
    ]
    prompts = [random_ids(6 + row, VOCAB, row) for row in range(4)]
    starts = [session.start(row, prompts[row], params) for row, params in enumerate(asks)]
    steps = [RowStep(row, len(prompts[row]), row != 3) for row in (2, 3, 1, 0)]
    steps[1] = RowStep(3, 2, False)  # asks, but samples nothing yet
    results = {r.row: r for r in session.launch(*steps, starts=starts)}

    assert results[1].logprobs is None
    assert results[3].logprobs is None
    assert results[0].token_ids == (7,)
    for row, num_top in ((0, 3), (2, 0)):
        (record,) = results[row].logprobs or ()
        expected = logits_after(model, prompts[row]).log_softmax(0)
        assert record.logprob == pytest.approx(float(expected[results[row].token_ids[0]]), abs=1e-4)
        top = expected.topk(num_top)
        assert record.top_ids == top.indices.tolist()
        assert record.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)

    session.launch(ends=[0, 2])
    start = session.start(0, prompts[0])  # does not ask, where one asked before
    (result,) = session.launch(RowStep(0, len(prompts[0]), True), starts=[start])
    assert result.logprobs is None


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 4.0}]
)
def test_penalties_count_on(session: Session, model: Any, penalty: dict[str, float]) -> None:
    prompt, num_tokens = random_ids(10, VOCAB, 8), 14
    expected: list[int] = []
    for _ in range(num_tokens):
        logits = logits_after(model, prompt + expected)
        counts = torch.bincount(torch.tensor(expected, dtype=torch.int64), minlength=VOCAB).float()
        seen = counts > 0
        seen[prompt] = True
        factor = penalty.get("repetition_penalty", 1.0)
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits -= penalty.get("frequency_penalty", 0.0) * counts
        logits -= penalty.get("presence_penalty", 0.0) * (counts > 0)
        expected.append(int(logits.argmax()))
    start = session.start(1, prompt, SamplingParams(temperature=0.0, seed=0, **penalty))
    assert session.generate(1, start, num_tokens) == expected
    assert expected != greedy(model, prompt, num_tokens)
    session.launch(ends=[1])
    assert not session.worker._sampler.any_penalized
