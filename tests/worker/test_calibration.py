"""Timing a real worker: what is covered, how long it takes, and that nothing is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_cases import config as head_config
from draft_cases import random_draft
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.draft.checkpoint import export_draft
from paceline.draft.protocol import Choose, Drafter, Round, Settled
from paceline.errors import ConfigError, ModelError
from paceline.models.batch import Batch
from paceline.policy import CostModel, DraftSample, TargetSample
from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.worker.build import ModelInfo, build_worker
from paceline.worker.calibrated import fit_costs
from paceline.worker.calibration import Cell, Limits, Samples, measure, plan_cells
from paceline.worker.worker import ModelWorker

ROWS, DEEPEST = 8, 3


class Paced:
    """A clock on which time passes with the target's tokens, and only then: 20 ms a step, 10 ms a token."""

    def __init__(self, worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.longest = 0.0
        forward = worker._model.forward

        def paced(batch: Batch) -> torch.Tensor:
            self.longest = max(self.longest, took := seconds(batch.num_tokens))
            self.now += took
            return forward(batch)

        monkeypatch.setattr(worker._model, "forward", paced)

    def __call__(self) -> float:
        return self.now


def seconds(num_tokens: int) -> float:
    return 0.02 + 0.01 * num_tokens


class Failing:
    """A drafter that gives up in the middle of a calibration."""

    def __init__(self, inner: Drafter, method: str) -> None:
        self._inner, self._method, self._left = inner, method, 20
        self.capture = inner.capture

    def settle(self, settled: Settled) -> None:
        self._count("settle")
        self._inner.settle(settled)

    def wait(self) -> None:
        self._inner.wait()

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        self._count("propose")
        return self._inner.propose(drafting, choose)

    def _count(self, method: str) -> None:
        self._left -= method == self._method
        if self._left < 0:
            raise RuntimeError("no more")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the quantised model."""
    sizes = {
        **{"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 96, "head_dim": 64},
        **{"num_heads": 4, "num_kv_heads": 2, "vocab_size": 208, "draft_vocab_size": 64},
        "capture_layer_ids": (0, 2),
    }
    folder = tmp_path_factory.mktemp("head") / "head"
    export_draft(random_draft(head_config(**sizes)), folder)
    return folder


def build(model: Path, draft: Path | str, **changes: Any) -> tuple[ModelWorker, ModelInfo]:
    settings: dict[str, Any] = {"max_num_seqs": ROWS, "threads": 1, **changes}
    return build_worker(EngineConfig(model=str(model), draft=str(draft), **settings))


def limits_of(info: ModelInfo, **changes: Any) -> Limits:
    sizes = {
        **{"num_rows": ROWS, "num_tokens": 512, "page_size": 16, "deepest": DEEPEST},
        **{"max_len": info.max_model_len, "num_pages": info.num_pages, "vocab_size": info.vocab_size},
    }
    return Limits(**(sizes | changes))


@st.composite
def some_limits(draw: st.DrawFn) -> Limits:
    num_rows = draw(st.integers(1, 300))
    return Limits(
        num_rows=num_rows,
        num_tokens=draw(st.integers(num_rows, 2000)),
        max_len=draw(st.integers(2, 5000)),
        num_pages=draw(st.integers(2, 3000)),
        page_size=draw(st.sampled_from((1, 4, 16, 64))),
        deepest=draw(st.integers(1, 16)),
        vocab_size=draw(st.integers(2, 50_000)),
    )


@given(some_limits())
def test_every_cell_is_possible(limits: Limits) -> None:
    # Two tokens that are known, the drafts, and the model's own token; a step of two; pages for all that.
    short = min(64, limits.max_len - limits.deepest - 2)
    needed = -(-(short + 3) // limits.page_size)
    if short < 2 or limits.num_tokens < 2 or limits.num_pages <= needed:
        with pytest.raises(ConfigError, match="no room for a row that drafts"):
            plan_cells(limits)
        return
    cells = plan_cells(limits)
    assert len(set(cells)) == len(cells)
    assert [(cell.num_rows, cell.depth) for cell in cells[:2]] == [(1, 0), (1, 1)]
    for cell in cells:
        assert 0 <= cell.depth <= limits.deepest
        assert cell.num_rows + bool(cell.num_prompt_tokens) <= limits.num_rows
        assert 1 <= cell.size <= limits.num_tokens
        # What a row may know after the step, if all of it is accepted.
        lens = [cell.context_len + cell.depth + 1] * cell.num_rows + [cell.num_prompt_tokens]
        assert max(lens) <= limits.max_len
        assert sum(-(-length // limits.page_size) for length in lens) < limits.num_pages


def test_all_axes_are_covered() -> None:
    sizes = {"num_rows": 64, "num_tokens": 512, "max_len": 8192, "num_pages": 1537, "page_size": 16}
    cells = plan_cells(Limits(**sizes, deepest=6, vocab_size=49_152))
    tokens = {cell.num_tokens for cell in cells}
    assert tokens >= {*range(1, 17), 32, 64, 128}
    assert max(tokens) == 128
    assert {cell.depth for cell in cells if cell.num_rows == 1} == set(range(7))
    for depth in (0, 1, 2, 3, 4, 6):
        assert len({cell.num_rows for cell in cells if cell.depth == depth}) >= 6
    by_tokens = [
        len({c.num_rows for c in cells if c.num_tokens == m and c.num_prompt_tokens == 0})
        for m in (4, 6, 12, 16, 64)
    ]
    assert min(by_tokens) >= 3  # rows and queries are told apart where m is the same
    contexts = {cell.context_len for cell in cells}
    assert (min(contexts), max(contexts)) == (64, 2048)
    assert max(cell.num_rows * cell.context_len for cell in cells) <= 4096
    assert {cell.num_prompt_tokens for cell in cells} == {0, 16, 64, 256}


@pytest.mark.parametrize("draft", ["head", "ngram"])
def test_samples_make_a_cost_model(tiny_gguf: Path, head: Path, draft: str) -> None:
    worker, info = build(tiny_gguf, head if draft == "head" else "ngram")
    samples = measure(worker, limits_of(info), budget_seconds=2.0)
    assert all(sample.seconds > 0 for sample in (*samples.target, *samples.drafts))
    assert {s.num_tokens for s in samples.target} >= {1, 2, 3, 4, 6, 8, 12, 16}
    assert {s.num_prompt_tokens for s in samples.target} == {0, 16, 64}
    assert {(s.num_rows, s.depth) for s in samples.drafts} >= {
        (rows, depth) for rows in (1, 2, 4) for depth in (1, 2, 3)
    }
    costs = fit_costs(samples)
    assert 0 < costs.tokens(1) <= costs.tokens(16)  # how much, a clock of our own says below
    assert costs.draft_seconds([1]) > 0
    assert CostModel.from_dict(costs.to_dict()) == costs


def test_the_target_gets_as_many_tokens_as_planned(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a drafter that finds nothing: histories are made up, so that nothing repeats."""
    worker, info = build(tiny_gguf, "ngram")
    sizes: list[int] = []
    forward = worker._model.forward

    def watched(batch: Batch) -> torch.Tensor:
        sizes.append(batch.num_tokens)
        return forward(batch)

    monkeypatch.setattr(worker._model, "forward", watched)
    samples = measure(worker, limits_of(info), budget_seconds=1.0)
    assert set(sizes) == {s.num_tokens + s.num_prompt_tokens for s in samples.target}


def generate(worker: ModelWorker, temperature: float) -> list[int]:
    """Tokens of a request that drafts, in the last row."""
    params = SamplingParams(temperature=temperature, seed=7, repetition_penalty=1.1)
    start = RowStart(ROWS - 1, (5, 6, 7, 8, 9), 5, 0, (1, 2, 3, 4), params, 0, 60)
    tokens = list(
        worker.launch(Plan(0, (), (start,), (RowStep(ROWS - 1, 5, True),))).result().rows[0].token_ids
    )
    for i in range(12):
        step = RowStep(ROWS - 1, 1, True, depth=i % (DEEPEST + 1))
        tokens += worker.launch(Plan(i, (), (), (step,))).result().rows[0].token_ids
    worker.launch(Plan(0, (ROWS - 1,), (), ()))
    return tokens[:13]


def state_of(worker: ModelWorker) -> dict[str, Any]:
    """All that a row could leave to the next one, but for what its start writes."""
    sampler = worker._sampler
    found: dict[str, Any] = {
        name: getattr(sampler, name).tolist()
        for name in ("floats", "ints", "bias_ids", "bias_values", "bias_until")
    }
    found |= {
        name: getattr(sampler, name) for name in ("any_biased", "any_penalized", "any_truncated", "num_rows")
    }
    found["rows"] = [row in worker._grammars for row in range(ROWS)]
    found["asking"], found["error"], found["drafter"] = (
        set(worker._asking),
        worker._drafter_error,
        id(worker.drafter),
    )
    found["wants"] = (worker._wants.answer, worker._wants.prompt)
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_worker_is_as_fresh_as_before(tiny_gguf: Path, head: Path, temperature: float) -> None:
    untouched, info = build(tiny_gguf, head)
    calibrated, _ = build(tiny_gguf, head)
    before = state_of(calibrated)
    measure(calibrated, limits_of(info), budget_seconds=0.5)
    assert state_of(calibrated) == before
    assert generate(calibrated, temperature) == generate(untouched, temperature)


@pytest.mark.parametrize("method", ["propose", "settle"])
def test_a_drafter_that_fails_ends_it_and_leaves_no_row(tiny_gguf: Path, head: Path, method: str) -> None:
    worker, info = build(tiny_gguf, head)
    own = worker.drafter
    assert own is not None
    before = state_of(worker)
    with worker.drafting_by(Failing(own, method)), pytest.raises(ModelError, match="RuntimeError: no more"):
        measure(worker, limits_of(info), budget_seconds=1.0)
    assert worker.drafter is own
    assert state_of(worker) == before
    assert len(generate(worker, 1.0)) == 13


@pytest.mark.parametrize("budget", [0.5, 3.0, 10.0, 60.0])
def test_the_budget_is_kept(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    worker, info = build(tiny_gguf, "ngram")
    clock = Paced(worker, monkeypatch)
    samples = measure(worker, limits_of(info), budget_seconds=budget, clock=clock)
    assert clock.now <= budget + 1e-9
    all_cells = plan_cells(limits_of(info))
    if budget >= 10.0:
        assert len(samples.target) == len(all_cells)
        assert clock.now > budget - clock.longest - 2.0 or budget > 30.0  # not idle while there is time
    else:
        assert 2 < len(samples.target) < len(all_cells)
    if budget == 0.5:  # coarse ones first
        assert {s.num_rows for s in samples.target} == {1, 4}
    assert samples.spread == pytest.approx(0.0, abs=1e-9)
    for sample in samples.target:
        expected = seconds(sample.num_tokens + sample.num_prompt_tokens)
        assert sample.seconds == pytest.approx(expected)
    costs = fit_costs(samples)
    assert costs.tokens(1) == pytest.approx(seconds(1))
    assert (costs.row_seconds, costs.context_seconds) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_what_the_drafter_does_beside_the_host_is_timed_too(
    tiny_gguf: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settling may still be at it when a step returns; its time is the step's all the same."""
    worker, info = build(tiny_gguf, head)
    clock, drafter = Paced(worker, monkeypatch), worker.drafter
    assert drafter is not None
    settle, wait, left = drafter.settle, drafter.wait, [False]

    def settling(settled: Settled) -> None:
        settle(settled)
        left[0] = True

    def waiting() -> None:
        wait()
        clock.now += 0.5 * left[0]
        left[0] = False

    monkeypatch.setattr(drafter, "settle", settling)
    monkeypatch.setattr(drafter, "wait", waiting)
    samples = measure(worker, limits_of(info), budget_seconds=100.0, clock=clock)
    for sample in samples.target:
        expected = seconds(sample.num_tokens + sample.num_prompt_tokens) + 0.5
        assert sample.seconds == pytest.approx(expected)


def test_timings_that_differ_show_as_spread(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, info = build(tiny_gguf, "ngram")
    clock = Paced(worker, monkeypatch)
    forward, turn = worker._model.forward, [0]

    def uneven(batch: Batch) -> torch.Tensor:
        turn[0] += 1
        clock.now += seconds(batch.num_tokens) * (turn[0] % 3) / 2
        return forward(batch)

    monkeypatch.setattr(worker._model, "forward", uneven)
    samples = measure(worker, limits_of(info), budget_seconds=20.0, clock=clock)
    assert 0.1 < samples.spread < 0.7


def test_without_time_there_is_still_a_cost_model(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, info = build(tiny_gguf, "ngram")
    clock = Paced(worker, monkeypatch)
    samples = measure(worker, limits_of(info), budget_seconds=0.0, clock=clock)
    assert [(s.num_rows, s.num_tokens) for s in samples.target] == [(1, 1), (1, 2)]
    assert fit_costs(samples).is_measured


def test_where_no_row_can_draft_it_is_refused(tiny_gguf: Path) -> None:
    worker, info = build(tiny_gguf, "ngram", kv_cache_tokens=32)
    assert info.num_pages == 3
    with pytest.raises(ConfigError, match=r"no room for a row that drafts: max_model_len 32, 1 pages"):
        measure(worker, limits_of(info, num_pages=2))


def test_noise_does_not_make_tokens_cost_less_than_nothing(caplog: pytest.LogCaptureFixture) -> None:
    drafts = [DraftSample(1, 1, 0.001)]
    calm = [TargetSample(1, 1, 64, 1.0), TargetSample(4, 1, 64, 1.3), TargetSample(4, 4, 256, 1.6)]
    costs = fit_costs(Samples(calm, drafts))
    assert (costs.row_seconds + 64 * costs.context_seconds) * 3 == pytest.approx(0.3, rel=0.01)
    assert not caplog.records
    noisy = [*calm[:2], TargetSample(4, 4, 256, 9.0), TargetSample(1, 1, 64, 1.1, num_prompt_tokens=16)]
    costs = fit_costs(Samples(noisy, drafts))
    assert (costs.tokens(1), costs.tokens(4), costs.row_seconds) == (1.0, 1.3, 0.0)
    assert costs.prompt(16) < 0  # a line through 1.0 and 1.3 says 2.6 for 17 tokens
    assert "the machine is busy" in caplog.text


def test_cells_are_kinds_of_steps() -> None:
    cell = Cell(num_rows=3, depth=2, context_len=10, num_prompt_tokens=5)
    assert (cell.num_tokens, cell.size) == (9, 14)
