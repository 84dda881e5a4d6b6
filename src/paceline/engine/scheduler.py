"""Which rows run in the next step, and what became of the last: computed tokens chase known ones.

There is no prefill phase and no decode phase. A step has a token budget: every decoding row takes
1 + its depth of it, prompt chunks share the rest first come first served. Who holds which row and which
pages, and who gives them up for others, is the `Roster`'s.

Plans are made from bounds, never from what a step in flight will yield, so `schedule` may be called
again before `commit`.

Knows nothing of the model, text, time or processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.config import EngineConfig
from paceline.engine.block import check_result, cut
from paceline.engine.drafting import Drafting, Tally
from paceline.engine.limits import Limits
from paceline.engine.pages import InvariantError, PagePool, ensure
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.roster import Roster
from paceline.engine.sequence import Sequence, Status
from paceline.engine.stats import SchedulerStats
from paceline.engine.steering import Candidate, Round, Steering
from paceline.errors import QueueFullError, RequestError
from paceline.policy import Decision, Fixed
from paceline.request import EngineRequest, RequestOutput
from paceline.step import Plan, RowResult, RowStart, RowStep, StepResult


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    chunk_budget: int  # tokens left for prompt chunks
    round: Round | None = None  # how deep decoding rows draft, if there are any
    starts: list[RowStart] = field(default_factory=list)
    decodes: list[tuple[Sequence, RowStep]] = field(default_factory=list)
    chunks: list[tuple[Sequence, RowStep]] = field(default_factory=list)
    short: bool = False  # somebody was short of pages: nobody new comes in


class _Launched(NamedTuple):
    """A step whose result is not there yet."""

    plan: Plan
    sequences: list[Sequence]  # of its rows
    num_decoding: int  # the first ones; the others are prompts, after a preemption with the answer so far
    decision: Decision | None


class Scheduler:
    """Requests in, plans out; results in, outputs out.

    Args:
        config: page size, row, budget and queue limits, prefix caching.
        num_pages: pages of the worker's K/V pool, the trash page (page 0) among them.
        eos_token_ids: end a request unless it says `ignore_eos`.
        max_model_len: most tokens, prompt and answer, that the model takes.
        vocab_size: token ids of a prompt must be below it.
        max_depth: largest depth that a request may ask for; 0: there is no drafter.
        steering: asked at every step with decoding rows how deep they draft, and told what came of it. The
            budget, the row's limit and the free pages trim every row's depth. None: nobody drafts.

    Raises:
        ConfigError: `num_pages` is too small to hold anything.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_pages: int,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        vocab_size: int,
        max_depth: int = 0,
        steering: Steering | None = None,
    ) -> None:
        self._config = config
        self._eos_token_ids = frozenset(eos_token_ids)
        self._drafting = Drafting(max_depth)
        self._steering = steering or Steering(Fixed(0))

        self._pool = PagePool(num_pages, config.page_size)
        self._limits = Limits(max_model_len, vocab_size, config.page_size, self._pool.capacity, max_depth)
        self._prefixes = PrefixCache(self._pool, enabled=config.prefix_caching)
        self._roster = Roster(self._pool, self._prefixes, config.max_num_seqs)
        self._live: dict[str, Sequence] = {}  # accepted and without a final output
        self._in_flight: deque[_Launched] = deque()  # oldest first

        self._num_arrivals = 0
        self._num_steps = 0
        self._num_prompt_tokens_computed = 0
        self._num_prompt_tokens_cached = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request lacks its final output or a step is in flight."""
        return bool(self._live or self._in_flight)

    def take_seconds_thought(self) -> float:
        """How long the policy has been at work since this was last asked for."""
        return self._steering.take_seconds_thought()

    def stats(self) -> SchedulerStats:
        """The numbers of this moment; cheap enough for every step."""
        return SchedulerStats(
            num_running=self._roster.num_running,
            num_waiting=len(self._live) - self._roster.num_running,
            num_pages=self._pool.capacity,
            num_pages_used=self._pool.num_used,
            num_pages_cached=self._pool.num_cached,
            num_preemptions=self._roster.num_preemptions,
            num_prompt_tokens_computed=self._num_prompt_tokens_computed,
            num_prompt_tokens_cached=self._num_prompt_tokens_cached,
            num_generated_tokens=self._num_generated_tokens,
            speculation=self._drafting.stats(),
            policy=self._steering.stats(),
        )

    # Requests come and go.

    def add(self, request: EngineRequest) -> None:
        """Accept a request: from now on it is owed exactly one final output.

        Raises:
            RequestError: it can never run here; the message has the numbers.
            QueueFullError: `max_num_seqs` run and `max_queue` wait already.
        """
        max_len = self.vet(request)
        stop_ids = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stop_ids |= self._eos_token_ids
        seq = Sequence(request, self._num_arrivals, max_len, stop_ids, list(request.prompt_ids))
        if request.params.speculation_summary:
            seq.tally = Tally()
        self._num_arrivals += 1
        self._live[request.request_id] = seq
        self._roster.enter(seq)

    def vet(self, request: EngineRequest) -> int:
        """What `add` would raise now; returns the most tokens that prompt and answer may come to."""
        if request.request_id in self._live:
            raise RequestError("request_id", f"request_id {request.request_id!r} is in use")
        max_len = self._limits.max_len(request)
        max_num_seqs, max_queue = self._config.max_num_seqs, self._config.max_queue
        if len(self._live) >= max_num_seqs + max_queue:
            raise QueueFullError(
                f"the queue is full: {len(self._live)} requests are open, the limit is max_num_seqs "
                f"({max_num_seqs}) running plus max_queue ({max_queue}) waiting"
            )
        return max_len

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; returns its final output, or None if no open request has that id."""
        seq = self._live.get(request_id)
        if seq is None:
            return None
        self._end(seq)
        return RequestOutput(request_id, finish_reason="abort", num_cached_tokens=seq.num_cached_tokens)

    def abandon(self, reason: str) -> list[RequestOutput]:
        """End every request by an error and forget the steps in flight: their worker has failed."""
        for launched in self._in_flight:
            for seq, step in zip(launched.sequences, launched.plan.rows, strict=True):
                seq.settle(step)
        self._in_flight.clear()
        self._roster.nothing_in_flight()
        ended = list(self._live.values())
        for seq in ended:
            self._end(seq)
        return [
            RequestOutput(
                seq.request_id, finish_reason="error", num_cached_tokens=seq.num_cached_tokens, error=reason
            )
            for seq in ended
        ]

    def _end(self, seq: Sequence) -> None:
        """No open request any more: the caller makes the final output."""
        del self._live[seq.request_id]
        self._steering.ended(seq.request_id)
        self._roster.end(seq)

    # The next step.

    def schedule(self) -> Plan | None:
        """Plan a step; it counts as launched from here on, and `commit` takes the plans in order.

        None: nothing can run before a step in flight is committed, or nothing is there to do.
        """
        step = self._new_step()
        # Oldest first: whoever is preempted on the way is younger, hence not planned yet.
        for seq in self._roster.running:
            if seq.status is not Status.RUNNING:
                continue
            if seq.decoding:
                self._plan_decode(seq, step)
            else:
                self._plan_chunk(seq, step)
        if not step.short and not self._roster.is_held_up:
            while step.chunk_budget and (first := self._roster.first) and self._admit(first, step):
                self._plan_chunk(first, step)
        return self._launch(step)

    def _new_step(self) -> _Step:
        budget = self._config.max_num_batched_tokens
        decoding = [seq for seq in self._roster.running if seq.decoding and seq.remaining]
        if not decoding:
            return _Step(budget)
        # Every running row, and whoever comes next, keeps a share of the budget: drafts never stop a prompt.
        num_shares = self._roster.num_running + (self._roster.first is not None)
        most = min(budget // num_shares - 1, self._drafting.max_depth)
        rows = [
            Candidate(seq.request_id, min(most, self._room(seq)), seq.request.params.depth, seq.known_len)
            for seq in decoding
        ]
        chosen = self._steering.decide(rows, min(budget - len(rows), self._num_prompt_tokens_due()))
        return _Step(budget - sum(1 + depth for depth in chosen.depths.values()), chosen)

    def _num_prompt_tokens_due(self) -> int:
        """Prompt tokens that want to be computed, as far as can be told before it is planned."""
        due = sum(seq.known_len - seq.planned_len for seq in self._roster.running if not seq.decoding)
        for seq in self._roster.coming:
            if due >= self._config.max_num_batched_tokens:
                break
            due += seq.known_len - len(self._prefixes.match(seq)) * self._pool.page_size
        return due

    def _room(self, seq: Sequence) -> int:
        """Drafts beyond a row's limit cannot be accepted, and none is worth preempting somebody for."""
        num_tokens = (len(seq.page_ids) + self._pool.num_available) * self._pool.page_size
        return max(0, min(seq.remaining - 1, num_tokens - seq.upper_len))

    def _admit(self, seq: Sequence, step: _Step) -> bool:
        """Let the roster's first run, if it can."""
        start = self._roster.admit(step.chunk_budget)
        if start is None:
            return False
        step.starts.append(start)
        if not seq.num_preemptions:
            self._num_prompt_tokens_cached += seq.num_cached_tokens
        return True

    def _reserve(self, seq: Sequence, num_tokens: int, step: _Step) -> tuple[int, ...] | None:
        """Pages that the row lacks for so many tokens; None: it sits this step out."""
        num_preemptions = self._roster.num_preemptions
        new_page_ids = self._roster.reserve(seq, num_tokens)
        step.short |= new_page_ids is None or self._roster.num_preemptions > num_preemptions
        return new_page_ids

    def _plan_decode(self, seq: Sequence, step: _Step) -> None:
        if seq.remaining == 0:
            return  # the steps in flight finish it
        assert step.round is not None
        room = self._room(seq)
        depth = min(step.round.depths[seq.request_id], room)
        shadow = 0 if depth else min(step.round.shadow_depths.get(seq.request_id, 0), room)
        new_page_ids = self._reserve(seq, min(seq.upper_len + max(depth, shadow), seq.max_len - 1), step)
        if new_page_ids is not None:
            step.decodes.append((seq, RowStep(seq.row, 1, True, depth, new_page_ids, shadow)))

    def _plan_chunk(self, seq: Sequence, step: _Step) -> None:
        query_len = min(seq.known_len - seq.planned_len, step.chunk_budget)
        if query_len == 0:
            return
        end = seq.planned_len + query_len
        new_page_ids = self._reserve(seq, end, step)
        if new_page_ids is not None:
            step.chunk_budget -= query_len
            step.chunks.append((seq, RowStep(seq.row, query_len, end == seq.known_len, 0, new_page_ids)))

    def _launch(self, step: _Step) -> Plan | None:
        planned = step.decodes + step.chunks
        if not planned:
            return None
        for seq, row_step in planned:
            seq.launch(row_step)
        self._num_prompt_tokens_computed += sum(row_step.query_len for _, row_step in step.chunks)
        rows = tuple([row_step for _, row_step in planned])
        plan = Plan(self._num_steps, self._roster.take_ended_rows(), tuple(step.starts), rows)
        self._num_steps += 1
        decision = None if step.round is None else step.round.decision
        sequences = [seq for seq, _ in planned]
        self._in_flight.append(_Launched(plan, sequences, len(step.decodes), decision))
        return plan

    # What became of a step.

    def commit(self, plan: Plan, result: StepResult, seconds: float | None = None) -> list[RequestOutput]:
        """Take the result of the oldest plan in flight; returns what it gave each request.

        `seconds` are those of the step, from result to result, less those thought; None if they mean
        nothing.
        """
        assert plan is self._in_flight[0].plan, "plans are committed in the order they were made"
        check_result(plan, result)
        if result.drafter_error is not None:
            self._drafting.fail(result.drafter_error)
        _, sequences, num_decoding, decision = self._in_flight.popleft()
        outputs: list[RequestOutput] = []
        rounds: dict[str, RowResult] = {}
        for i, (seq, step, got) in enumerate(zip(sequences, plan.rows, result.rows, strict=True)):
            seq.settle(step)
            if i < num_decoding and seq.status is not Status.ENDED:
                rounds[seq.request_id] = got
                self._drafting.count(got)
                if seq.tally is not None:
                    seq.tally.add(got)
            if seq.status is not Status.ENDED:
                if step.samples:
                    outputs.append(self._accept(seq, got))
                else:
                    prompt_logprobs = seq.take_prompt_logprobs(got)
                    seq.computed_len += step.query_len
                    self._prefixes.publish(seq)
                    if prompt_logprobs:
                        outputs.append(RequestOutput(seq.request_id, prompt_logprobs=prompt_logprobs))
            self._roster.settled(seq)
        if decision is not None:
            self._steering.observe(decision, rounds, seconds)
        return outputs

    def _accept(self, seq: Sequence, got: RowResult) -> RequestOutput:
        """Append a block to its request, as far as that goes."""
        if not got.token_ids and got.grammar_end is None:
            raise InvariantError(f"row {got.row} yielded nothing for a request that has not ended")
        prompt_logprobs = seq.take_prompt_logprobs(got)
        self._steering.drafted(seq.request_id, seq.known_len, got.shadow_ids)
        end = cut(got.token_ids, seq.known_len, seq.max_len, seq.stop_ids, got.grammar_end)
        token_ids = got.token_ids[: end.num_tokens]
        seq.token_ids.extend(token_ids)
        seq.computed_len = seq.known_len - 1
        self._steering.committed(seq.request_id, seq.token_ids)
        self._num_generated_tokens += end.num_tokens
        self._prefixes.publish(seq)
        if end.finish_reason is not None:
            self._end(seq)
        return RequestOutput(
            seq.request_id,
            token_ids=list(token_ids),
            logprobs=None if got.logprobs is None else list(got.logprobs[: end.num_tokens]),
            prompt_logprobs=prompt_logprobs,
            finish_reason=end.finish_reason,
            stop_token_id=end.stop_token_id,
            num_cached_tokens=seq.num_cached_tokens,
            speculation=None if seq.tally is None else seq.tally.summary(),
            error=end.error,
            error_param=None if end.error is None else "grammar",
        )

    # Proof.

    def check(self) -> None:
        """Prove that pages, rows and queues agree with each other.

        Raises:
            InvariantError: names what does not.
        """
        holders = self._roster.check()
        num_launched = sum(len(launched.sequences) for launched in self._in_flight)
        num_counted = sum(seq.num_in_flight for seq in holders)
        ensure(num_launched == num_counted, f"{num_launched} row steps in flight, rows count {num_counted}")
        ensure(bool(self._live or self._in_flight or not self._pool.num_used), "pages are held while idle")
