"""Requests whose grammars compile wait beside the queue, and keep nobody waiting."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from fake_worker import FakeWorker, alone

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.errors import QueueFullError, RequestError
from paceline.request import EngineRequest, Grammar, RequestOutput, SamplingParams

CONFIG = EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, max_queue=2, debug=True)


class PreparingWorker(FakeWorker):
    """Compiles when told to."""

    def __init__(self) -> None:
        super().__init__(CONFIG, 33)
        self.futures: dict[str, Future[None]] = {}

    def prepare(self, params: SamplingParams) -> Future[Any]:
        assert params.grammar is not None
        return self.futures.setdefault(params.grammar.source, Future())


@pytest.fixture
def worker() -> PreparingWorker:
    return PreparingWorker()


@pytest.fixture
def engine(worker: PreparingWorker) -> Engine:
    scheduler = Scheduler(CONFIG, num_pages=33, eos_token_ids=(0,), max_model_len=64, vocab_size=40)
    return Engine(scheduler, worker, CONFIG)


def request(name: str, source: str | None = None, prompt_len: int = 5) -> EngineRequest:
    grammar = None if source is None else Grammar("regex", source)
    params = SamplingParams(seed=0, max_tokens=6, grammar=grammar)
    return EngineRequest(name, list(range(1, prompt_len + 1)), params)


def run(engine: Engine, num_steps: int = 30) -> list[RequestOutput]:
    return [output for _ in range(num_steps) if engine.has_work for output in engine.step()]


def tokens(outputs: list[RequestOutput], name: str) -> list[int]:
    return [t for output in outputs if output.request_id == name for t in output.token_ids]


def test_others_run_while_one_compiles(engine: Engine, worker: PreparingWorker) -> None:
    engine.add(request("slow", "a"))
    engine.add(request("quick"))
    assert engine.stats().num_waiting == 2
    before = run(engine)
    assert tokens(before, "quick") == alone(request("quick"), 64)[0]
    assert tokens(before, "slow") == []
    assert engine.has_work
    worker.futures["a"].set_result(None)
    assert tokens(run(engine), "slow") == alone(request("slow"), 64)[0]
    assert not engine.has_work
    engine.add(request("again", "a"))  # compiled already: it queues at once
    assert tokens(run(engine), "again")


def test_one_that_does_not_compile_is_told_so(engine: Engine, worker: PreparingWorker) -> None:
    engine.add(request("bad", "a"))
    worker.futures["a"].set_exception(ValueError("no such grammar"))
    [output] = run(engine)
    assert (output.finish_reason, output.error, output.error_param) == ("error", "no such grammar", "grammar")
    assert not engine.has_work


def test_a_full_queue_delays_what_is_compiled_and_newcomers_do_not_pass(
    engine: Engine, worker: PreparingWorker
) -> None:
    for name in ("first", "second"):
        engine.add(request(name, name))
    for i in range(4):
        engine.add(request(f"full {i}"))  # two run, two wait
    for future in worker.futures.values():
        future.set_result(None)
    outputs = engine.step()
    num_newcomers = 0
    while engine.has_work:
        try:
            engine.add(request(f"newcomer {num_newcomers}"))
            num_newcomers += 1
        except QueueFullError:
            pass
        outputs += engine.step()
        if num_newcomers == 9:
            break
    order = [o.request_id for o in outputs if o.finish_reason is not None]
    assert all(o.error is None for o in outputs)
    for name in ("first", "second"):
        assert tokens(outputs, name) == alone(request(name), 64)[0]
        assert order.index(name) < order.index("newcomer 0")
    assert order.index("first") <= order.index("second")


def test_an_abort_ends_the_wait(engine: Engine, worker: PreparingWorker) -> None:
    engine.add(request("gone", "a"))
    assert engine.abort("gone") == RequestOutput("gone", finish_reason="abort")
    worker.futures["a"].set_result(None)
    assert not engine.has_work
    assert engine.abort("gone") is None


def test_what_cannot_run_is_refused_before_it_compiles(engine: Engine, worker: PreparingWorker) -> None:
    with pytest.raises(RequestError, match="context"):
        engine.add(request("long", "a", prompt_len=64))
    engine.add(request("same", "a"))
    with pytest.raises(RequestError, match="in use"):
        engine.add(request("same", "a"))
    engine.add(request("other", "b"))
    with pytest.raises(QueueFullError):
        engine.add(request("third", "c"))
    assert set(worker.futures) == {"a", "b"}


def test_a_failed_engine_answers_those_who_wait_too(
    engine: Engine, worker: PreparingWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(worker, "launch", fail)
    engine.add(request("waits", "a"))
    engine.add(request("runs"))
    outputs = engine.step()
    assert {o.request_id: o.finish_reason for o in outputs} == {"waits": "error", "runs": "error"}
