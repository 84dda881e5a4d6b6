"""Engines in this process as arms: launched once, shared where they can be, driven step by step.

All fixed depths run on one engine with its drafter loaded; each adaptive arm has its own, and `plain` one
that was launched without a drafter. All have the same pages. One runs at a time.

Knows nothing of rounds and passes, or of what the numbers are for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from paceline.bench.arms import Arm
from paceline.bench.window import Sample, Speculation, Trace, sample
from paceline.bench.workload import Deal, Job, Work
from paceline.config import EngineConfig
from paceline.engine.factory import BuiltEngine, Factory, StepEngine
from paceline.engine.stats import SchedulerStats
from paceline.errors import ConfigError, EngineDeadError, PacelineError, RequestError
from paceline.prepare import ModelLimits, prepare
from paceline.request import EngineRequest, SamplingParams
from paceline.tokenizer import Tokenizer

Clock: TypeAlias = Callable[[], float]
Launch: TypeAlias = tuple[tuple[str, str], ...]


class Encoder:
    """Prompts as the model reads them: through its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a user's message, with the opening of the answer."""
        if prompt not in self._known:
            if self._tokenizer.has_chat_template:
                text = self._tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
                self._known[prompt] = self._tokenizer.encode(text, add_special_tokens=False)
            else:
                self._known[prompt] = self._tokenizer.encode(prompt)
        return self._known[prompt]

    def lengthen(self, prompt: str, filler: str, num_tokens: int) -> str:
        """The prompt with filler before it, or its end alone, so that it encodes to about `num_tokens`."""
        excess = len(self.encode(prompt)) - num_tokens
        own = self._tokenizer.encode(prompt, add_special_tokens=False)
        if excess >= 0:
            return self._tokenizer.decode(own[min(excess, len(own) - 1) :])
        ids = self._tokenizer.encode(filler, add_special_tokens=False)
        while len(ids) < -excess:
            ids += ids
        return self._tokenizer.decode(ids[:-excess]) + "\n\n" + prompt


@dataclass(frozen=True, slots=True)
class Launched:
    """An engine and the settings it has."""

    config: EngineConfig
    built: BuiltEngine


class Engines:
    """The engines that arms need, each launched when first asked for.

    Args:
        config: the settings common to all.
        arms: all that will ask.
        is_shared: fixed depths run on one engine, one at a time; else each arm has its own.
    """

    def __init__(
        self, config: EngineConfig, arms: Sequence[Arm], factory: Factory, is_shared: bool = True
    ) -> None:
        self._is_shared = is_shared
        depths = [arm.depth for arm in arms if arm.depth is not None]
        self._config = dataclasses.replace(config, max_depth=max([config.max_depth, *depths]))
        self._factory = factory
        self._launched: dict[tuple[Launch, int | None], Launched | Exception] = {}

    @property
    def draft(self) -> str | None:
        """The drafter's name, once an engine has one."""
        readies = [each.built.ready for each in self._launched.values() if isinstance(each, Launched)]
        names = [ready.draft for ready in readies if ready.draft is not None and ready.max_depth > 0]
        return Path(names[0]).name if names else None

    def of(self, arm: Arm) -> Launched:
        """The arm's engine.

        Raises:
            PacelineError: it cannot be launched, or has no drafter and needs one.
        """
        launched = self._launch(arm.launch, None if self._is_shared else arm.depth)
        if arm.needs_drafter and launched.built.ready.max_depth == 0:
            raise ConfigError("the engine has no drafter (--draft names one)")
        return launched

    def _launch(self, launch: Launch, depth: int | None) -> Launched:
        key = launch, depth
        if key not in self._launched:
            try:
                config = _with(self._config, launch)
                self._launched[key] = Launched(config, self._factory(config))
            except Exception as error:
                self._launched[key] = error
        launched = self._launched[key]
        if isinstance(launched, Exception):
            raise launched
        if self._config.kv_cache_tokens is None:  # chosen from free memory; those to come get as many
            num_tokens = launched.built.engine.stats().num_pages * self._config.page_size
            self._config = dataclasses.replace(self._config, kv_cache_tokens=num_tokens)
        return launched


def _with(config: EngineConfig, launch: Launch) -> EngineConfig:
    """Raises ConfigError where this build has no such setting, or not this value of it."""
    known = {field.name for field in dataclasses.fields(config)}
    for name, value in launch:
        if name not in known:
            raise ConfigError(f"this build has no setting {name} (wanted: {value})")
    changes: dict[str, Any] = dict(launch)
    return dataclasses.replace(config, **changes)


class LocalTarget:
    """One arm on its engine.

    Args:
        depth: asked for by every request; None: the engine chooses.
        warms_prompts: the work's prompts are in the engine's prefix cache before the clock runs.
    """

    def __init__(
        self,
        launched: Launched,
        encoder: Encoder,
        depth: int | None,
        clock: Clock = time.perf_counter,
        warms_prompts: bool = False,
    ) -> None:
        ready = launched.built.ready
        self._engine = launched.built.engine
        self._limits = ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_depth=ready.max_depth,
            draft=ready.draft,
        )
        self._max_num_seqs = launched.config.max_num_seqs
        self._encoder = encoder
        self._depth = depth
        self._clock = clock
        self._warms_prompts = warms_prompts
        self._num_requests = 0

    def run(self, work: Work) -> Sample:
        """Do the work, as long as every client is busy.

        Raises:
            PacelineError: a request was refused or failed, or the engine did.
        """
        ride = self.begin(work)
        ride.go_on(math.inf)
        return ride.result()

    def begin(self, work: Work) -> Ride:
        """Get ready for the work, and send each client's first request.

        Raises:
            PacelineError: as `run`.
        """
        concurrency = work.column.concurrency
        if concurrency > self._max_num_seqs:
            raise ConfigError(
                f"{concurrency} requests need --max-num-seqs of as many, got {self._max_num_seqs}"
            )
        if self._warms_prompts:
            self._warm(work)
        return Ride(self, work, {job: self.request(job) for job in work.jobs})

    def _warm(self, work: Work) -> None:
        """Let every prompt go through the engine, for a token each."""
        loop = self.loop()
        for prompt in dict.fromkeys(job.prompt for job in work.jobs):
            loop.send(self.request(Job(prompt, answer_len=1, seed=0, temperature=0.0)))
            while loop.num_open == self._max_num_seqs:
                loop.step()
        while loop.num_open:
            loop.step()

    def loop(self, clock: Clock | None = None) -> ClosedLoop:
        """Nothing in flight yet."""
        return ClosedLoop(self._engine, clock or self._clock)

    @property
    def clock(self) -> Clock:
        """Seconds."""
        return self._clock

    def stats(self) -> SchedulerStats:
        """The engine's numbers of this moment."""
        return self._engine.stats()

    def request(self, job: Job) -> EngineRequest:
        """A job as the engine takes it."""
        self._num_requests += 1
        params = SamplingParams(
            temperature=job.temperature,
            seed=job.seed,
            max_tokens=job.answer_len,
            ignore_eos=not job.natural_stop,
            depth=self._depth,
        )
        [request] = prepare(
            f"sweep-{id(self)}-{self._num_requests}", self._encoder.encode(job.prompt), params, self._limits
        )
        return request


class Ride:
    """A work under way, for a while at a time. On its own clock no time passes in between.

    Args:
        requests: of all jobs, made before the clock runs.
    """

    def __init__(self, target: LocalTarget, work: Work, requests: Mapping[Job, EngineRequest]) -> None:
        self._target, self._requests = target, requests
        self._concurrency, self._deal = work.column.concurrency, Deal(work)
        self._ridden, self._began = 0.0, target.clock()
        self._loop, self._doing = target.loop(self._now), dict[str, Job]()
        self._before, self._num_steps = target.stats(), 0
        for job in self._deal.firsts:
            self._send(job)

    def _now(self) -> float:
        return self._ridden + self._target.clock() - self._began

    def _send(self, job: Job) -> None:
        request = self._requests[job]
        self._doing[request.request_id] = job
        self._loop.send(request)

    def go_on(self, seconds: float) -> bool:
        """Ride for so long, or until a client finds no job left; returns whether that is so.

        Raises:
            PacelineError: a request or the engine failed; the ride is over.
        """
        self._began = self._target.clock()
        until = self._ridden + seconds
        self._loop.rest()
        try:
            while (is_going := self._loop.num_open == self._concurrency) and self._now() < until:
                self._loop.step()
                self._num_steps += 1
                for request_id in self._loop.ended:
                    following = self._deal.after(self._doing[request_id])
                    if following is not None:
                        self._send(following)
        except BaseException:
            self._loop.give_up()
            raise
        self._ridden = self._now()
        if not is_going:
            self._loop.give_up()
        return not is_going

    def result(self) -> Sample:
        """What it came to. After its end.

        Raises:
            PacelineError: the clients were never busy together.
        """
        before, after = self._before, self._target.stats()
        num_preempted = after.num_preemptions - before.num_preemptions
        drafted = drafting(before, after)
        return sample(self._loop.traces, self._concurrency, num_preempted, drafted, self._num_steps)


class ClosedLoop:
    """Requests in flight on an engine, and what became of each."""

    def __init__(self, engine: StepEngine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._open: dict[str, Trace] = {}
        self.traces: list[Trace] = []  # in the order of sending
        self.ended: list[str] = []  # requests that the newest step ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    def send(self, request: EngineRequest) -> None:
        """Submit a request."""
        trace = Trace(self._clock())
        self._engine.add(request)
        self._open[request.request_id] = trace
        self.traces.append(trace)

    def rest(self) -> None:
        """Before a step that does not follow at once on the one before."""
        self._engine.rest()

    def step(self) -> int:
        """Run a step; returns how many requests it ended.

        Raises:
            RequestError, EngineDeadError: one ended by an error.
        """
        outputs = self._engine.step()
        now = self._clock()
        self.ended = []
        for output in outputs:
            if output.error is not None:
                self._open.pop(output.request_id, None)
                if output.error_param is not None:
                    raise RequestError(output.error_param, output.error)
                raise EngineDeadError(output.error)
            trace = self._open[output.request_id]
            if output.token_ids:
                trace.pieces.append((now, len(output.token_ids)))
            if output.finish_reason is not None:
                trace.end = now
                del self._open[output.request_id]
                self.ended.append(output.request_id)
        return len(self.ended)

    def give_up(self) -> None:
        """Abort what is open."""
        for request_id in self._open:
            self._engine.abort(request_id)
        self._open.clear()


def drafting(before: SchedulerStats, after: SchedulerStats) -> Speculation | None:
    """What was drafted between two moments; None without a drafter.

    Raises:
        PacelineError: the drafter has turned itself off.
    """
    if after.speculation.drafter_error is not None:
        raise PacelineError(f"the drafter turned itself off: {after.speculation.drafter_error}")
    if after.speculation.max_depth == 0:
        return None
    return counters(after).since(counters(before))


def counters(stats: SchedulerStats) -> Speculation:
    """The engine's counters since its start."""
    now = stats.speculation
    return Speculation(
        now.num_rounds,
        now.num_drafted,
        now.num_accepted,
        tuple(now.accepted_per_pos),
        tuple(now.rounds_by_depth),
    )
