"""Runs a scheduler with the fake worker, serially or with steps in flight, and keeps the books."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from chosen_depths import Chosen
from fake_worker import EOS, VOCAB_SIZE, Done, FakeWorker, NextToken, alone, hashed, logprob_of

from paceline.config import EngineConfig
from paceline.engine.scheduler import Scheduler
from paceline.engine.steering import Steering
from paceline.request import EngineRequest, RequestOutput, SamplingParams
from paceline.step import Plan


def make_request(
    request_id: str, prompt_ids: Sequence[int], max_tokens: int = 8, **params: object
) -> EngineRequest:
    return EngineRequest(
        request_id, list(prompt_ids), SamplingParams(max_tokens=max_tokens, seed=0, **params)
    )


class Driver:
    """Every output of every request, and the proof at each step that the books agree.

    `lag` steps are launched ahead of the one that is committed: 0 is the serial loop, 1 the overlapped.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 200,
        lag: int = 0,
        max_depth: int = 8,
        choose_depth: Callable[[int], int] = lambda num_decoding: 0,
        next_token: NextToken = hashed,
        accepts: Callable[[Sequence[int], int], int] = lambda history, depth: depth,
        **settings: object,
    ) -> None:
        self.config = EngineConfig(
            **{"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16} | settings
        )
        self.scheduler = Scheduler(
            self.config,
            num_pages=num_pages,
            eos_token_ids=[EOS],
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_depth=max_depth,
            steering=Steering(Chosen(choose_depth)),
        )
        self.worker = FakeWorker(self.config, num_pages, next_token, accepts)
        self.choose_depth = choose_depth
        self.max_model_len, self.next_token, self.lag = max_model_len, next_token, lag
        self.in_flight: deque[tuple[Plan, Done]] = deque()
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id)
        assert output is not None
        self.outputs[request_id].append(output)
        self.scheduler.check()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.check_age(plan)
            self.check_depths(plan)
            self.in_flight.append((plan, self.worker.launch(plan)))
        assert self.in_flight or not self.scheduler.has_work, "work, but nothing runs"
        if self.in_flight and (plan is None or len(self.in_flight) > self.lag):
            oldest, pending = self.in_flight.popleft()
            for output in self.scheduler.commit(oldest, pending.result()):
                self.outputs[output.request_id].append(output)
        self.scheduler.check()

    def check_age(self, plan: Plan) -> None:
        """Where a decoding row sits out for want of pages, nobody younger gets any."""
        steps, sat_out = {step.row: step for step in plan.rows}, False
        for seq in self.scheduler._roster._running.values():
            if seq.row in steps:
                assert not (sat_out and steps[seq.row].new_page_ids), (
                    f"{seq.request_id} took an elder's pages"
                )
            elif seq.decoding and seq.remaining:
                sat_out = True

    def check_depths(self, plan: Plan) -> None:
        """No row drafts more than its request asks for, or than is chosen for those that do not ask."""
        rows = {seq.row: seq.request.params.depth for seq in self.scheduler._roster._running.values()}
        decoding = sum(step.samples for step in plan.rows) + len(rows)
        chosen = max(self.choose_depth(num) for num in range(decoding + 1))
        failed = self.scheduler.stats().speculation.drafter_error is not None
        for step in plan.rows:
            asked = rows[step.row]
            assert step.depth <= (0 if failed else chosen if asked is None else asked)

    def drain(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not done after {most_steps} steps"
        assert self.scheduler.stats().num_pages_used == 0
        for request_id in self.requests:
            self.check_outputs(request_id)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def reason(self, request_id: str) -> str | None:
        """Its finish reason, or None while it is open."""
        return self.outputs[request_id][-1].finish_reason if self.outputs[request_id] else None

    def check_outputs(self, request_id: str) -> None:
        """One final output, the last; words and logprobs as if it had been alone."""
        request, outputs = self.requests[request_id], self.outputs[request_id]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [
            True
        ]
        tokens, reason = alone(request, self.max_model_len, self.next_token)
        if self.reason(request_id) == "abort":
            assert self.tokens(request_id) == tokens[: len(self.tokens(request_id))]
        else:
            assert (self.tokens(request_id), self.reason(request_id)) == (tokens, reason)
            assert outputs[-1].stop_token_id == (tokens[-1] if reason == "stop" else None)
        if request.params.logprobs is not None:
            got = [logprob for output in outputs for logprob in output.logprobs or ()]
            history = [*request.prompt_ids, *tokens]
            places = islice(range(len(request.prompt_ids), len(history)), len(got))
            assert got == [logprob_of(history[:at], history[at]) for at in places]
            assert len(got) == len(self.tokens(request_id))
