"""The loop itself, and what is left of it when the worker fails."""

import time

import pytest
from engine_driver import make_request
from fake_worker import EOS, VOCAB_SIZE, Done, FakeWorker, alone

from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.steering import Steering
from paceline.errors import EngineDeadError
from paceline.policy import Decision, Fixed, Load, Observation, RowView
from paceline.request import RequestOutput
from paceline.step import Plan, StepResult, Worker

CONFIG = EngineConfig(page_size=4, max_num_seqs=2, max_num_batched_tokens=16, debug=True)
NUM_PAGES = 32


def make_engine(worker: Worker, steering: Steering | None = None) -> tuple[Engine, Scheduler]:
    limits = {"num_pages": NUM_PAGES, "max_model_len": 100, "vocab_size": VOCAB_SIZE}
    scheduler = Scheduler(CONFIG, eos_token_ids=[EOS], steering=steering, **limits)
    return Engine(scheduler, worker, CONFIG), scheduler


class Failing(FakeWorker):
    """Fails at one step, when launched or when asked for the result, or answers nonsense."""

    def __init__(self, at_step: int, how: str) -> None:
        super().__init__(CONFIG, NUM_PAGES)
        self.at_step, self.how = at_step, how

    def launch(self, plan: Plan) -> Done:
        done = super().launch(plan)
        if plan.step_id != self.at_step:
            return done
        if self.how == "launch":
            raise RuntimeError("out of memory\nTried to allocate")
        if self.how == "result":
            return Broken(done.answer)
        return Done(StepResult(plan.step_id, done.answer.rows[1:]))


class Broken(Done):
    def result(self) -> StepResult:
        raise ValueError("bad step")


class Pensive(Fixed):
    """Thinks for long before every second step, or after it."""

    def __init__(self, before: bool) -> None:
        super().__init__(0)
        self.before, self.num_asked = before, 0
        self.seconds: list[float] = []

    def think(self) -> None:
        time.sleep(0.05 * (self.num_asked % 2))

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        self.num_asked += 1
        if self.before:
            self.think()
        return super().decide(load, rows)

    def observe(self, observation: Observation) -> None:
        assert observation.seconds is not None
        self.seconds.append(observation.seconds)
        if not self.before:
            self.think()


@pytest.mark.parametrize("before", [True, False])
def test_the_time_of_a_step_does_not_hold_the_policys_thinking(before: bool):
    policy = Pensive(before)
    engine, _ = make_engine(FakeWorker(CONFIG, NUM_PAGES), Steering(policy))
    engine.add(make_request("r", [1, 2, 3], max_tokens=12, ignore_eos=True))
    engine.rest()
    while engine.has_work:
        engine.step()
    assert policy.num_asked == len(policy.seconds) == 11
    assert min(policy.seconds) > 0
    assert sorted(policy.seconds)[-3] < 0.03


def test_runs_requests_to_their_end():
    engine, _ = make_engine(FakeWorker(CONFIG, NUM_PAGES))
    requests = [make_request(f"r{i}", [1, 2, 3, 4, i], max_tokens=6) for i in range(5)]
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens == {request.request_id: alone(request, 100)[0] for request in requests}
    assert engine.step() == []
    assert engine.stats().num_generated_tokens == sum(map(len, tokens.values()))


@pytest.mark.parametrize("rests", [True, False])
def test_time_that_the_caller_was_away_is_no_steps(rests: bool):
    engine, scheduler = make_engine(FakeWorker(CONFIG, NUM_PAGES))
    seconds: list[float | None] = []
    scheduler._steering.policy.observe = lambda observation: seconds.append(observation.seconds)
    engine.add(make_request("a", [1, 2, 3], max_tokens=12))
    for _ in range(5):
        engine.step()
    time.sleep(0.2)
    if rests:
        engine.rest()
    engine.step()
    assert len(seconds) == 5, "the first step is the prompt's"
    assert max(seconds[:-1]) < 0.1
    assert (seconds[-1] < 0.1) == rests


def test_abort_returns_the_final_output():
    engine, _ = make_engine(FakeWorker(CONFIG, NUM_PAGES))
    engine.add(make_request("a", [1, 2]))
    assert engine.abort("a") == RequestOutput("a", finish_reason="abort")
    assert engine.abort("a") is None
    assert not engine.has_work


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("launch", "the engine failed: RuntimeError: out of memory"),
        ("result", "the engine failed: ValueError: bad step"),
        ("nonsense", "the engine failed: InvariantError: 2 rows ran, 1 came back"),
    ],
)
def test_a_failed_step_answers_everybody_then_raises(how: str, reason: str):
    engine, scheduler = make_engine(Failing(at_step=2, how=how))
    for i in range(4):  # two run, two wait
        engine.add(make_request(f"r{i}", [1, 2, 3, i], max_tokens=30, ignore_eos=True))
    delivered: list[RequestOutput] = []
    while not any(output.finish_reason for output in delivered):
        delivered += engine.step()
    assert engine.has_work, "there is something to raise"
    with pytest.raises(EngineDeadError, match=reason) as caught:
        engine.step()
    assert type(caught.value.__cause__).__name__ in reason
    final = [output for output in delivered if output.finish_reason]
    assert [output.request_id for output in final] == ["r0", "r1", "r2", "r3"]
    assert {(output.finish_reason, output.error) for output in final} == {("error", reason)}
    scheduler.check()
    assert scheduler.stats().num_pages_used == 0
    assert not scheduler.has_work
    with pytest.raises(EngineDeadError, match=reason):
        engine.add(make_request("late", [1]))


def test_a_step_in_flight_when_the_worker_fails_is_forgotten():
    _, scheduler = make_engine(FakeWorker(CONFIG, NUM_PAGES))
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=30))
    scheduler.add(make_request("b", [4, 5], max_tokens=30))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is not None
    assert scheduler.abort("b") is not None  # leaves once its steps are committed, which never happens
    assert [output.request_id for output in scheduler.abandon("gone")] == ["a"]
    scheduler.check()
    assert not scheduler.has_work


def test_debug_finds_a_page_lost_while_idle():
    engine, scheduler = make_engine(FakeWorker(CONFIG, NUM_PAGES))
    engine.add(make_request("a", [1, 2], max_tokens=1))
    scheduler._pool.allocate(1)
    outputs = engine.step()
    assert [output.finish_reason for output in outputs] == ["length"], "what was done is delivered"
    with pytest.raises(EngineDeadError, match="page 1 counts 1 holders, block tables hold it 0 times"):
        engine.step()
