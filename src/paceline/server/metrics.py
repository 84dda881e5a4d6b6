"""What `/metrics` shows, under vLLM's names where the meaning is vLLM's.

Tokens and times are counted in this process, from what is delivered, so they end exactly where the
answers do: at a stop string's token, at a stop, at a limit. What only the engine knows (rows, pages,
preemptions, drafts) comes from its newest report, at most a second old.

Distributions are kept as plain counts and handed to prometheus-client when it asks: a stream of 20,000
tokens a second leaves no time for its locks. One thread only. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from paceline.engine.stats import SchedulerStats
from paceline.output import Delta
from paceline.request import EngineRequest, FinishReason
from paceline.server.monotonic import Monotonic
from paceline.server.speculation_metrics import PolicyMetrics, SpeculationMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
            40.0, 80.0, 160.0, 640.0)  # fmt: skip
_PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


class Arrival(NamedTuple):
    """A delta, as far as it is measured."""

    request_id: str
    at: float  # seconds, monotonic
    num_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None

    @classmethod
    def of(cls, delta: Delta, at: float) -> Arrival:
        """What is to be measured of a delta."""
        return cls(delta.request_id, at, len(delta.token_ids), delta.num_cached_tokens, delta.finish_reason)


class Distribution:
    """Counts of values by upper bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, maybe several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help: str, model: str) -> HistogramMetricFamily:
        """As prometheus-client takes it."""
        total, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, help, labels=("model_name",))
        family.add_metric((model,), buckets, self._sum)
        return family


class _Choice:
    """One choice on its way."""

    __slots__ = ("came", "first", "last", "max_tokens", "n", "num_tokens", "prompt_len")

    def __init__(self, came: float, request: EngineRequest) -> None:
        self.came = came
        self.prompt_len = len(request.prompt_ids)
        self.max_tokens = request.params.max_tokens or 0
        self.n = request.params.n if request.choice == 0 else 0  # told once for each prompt
        self.first = self.last = 0.0
        self.num_tokens = 0


class Metrics(Collector):
    """All numbers of one server.

    Args:
        stats: the engine's newest report, None before the first; asked at every scrape.
    """

    def __init__(self, model: str, stats: Callable[[], SchedulerStats | None]) -> None:
        self._model = model
        self._stats = stats
        self._num_preemptions = Monotonic()
        self._speculation = SpeculationMetrics(model)
        self._policy = PolicyMetrics(model)
        self._choices: dict[str, _Choice] = {}  # by request id, those under way
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_cache_queries = self._num_cache_hits = 0
        self._finished: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error"), 0))
        self._to_first, self._end_to_end = Distribution(_SECONDS), Distribution(_SECONDS)
        self._between, self._per_token = Distribution(_PER_TOKEN), Distribution(_PER_TOKEN)
        self._prompt_lens, self._answer_lens = Distribution(_TOKENS), Distribution(_TOKENS)
        self._num_choices, self._max_tokens = Distribution(_CHOICES), Distribution(_TOKENS)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def begin(self, requests: Sequence[EngineRequest], came: float) -> None:
        """A request is handed over; `came` is when its body had arrived, in monotonic seconds."""
        for request in requests:
            self._choices[request.request_id] = _Choice(came, request)

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Count what was delivered."""
        for arrival in arrivals:
            choice = self._choices.get(arrival.request_id)
            if choice is not None:
                self._count(choice, arrival)

    def forget(self, requests: Sequence[EngineRequest]) -> None:
        """A request was refused after all."""
        for request in requests:
            self._choices.pop(request.request_id, None)

    def end(self, requests: Sequence[EngineRequest]) -> None:
        """Nobody reads on: what has not finished is counted as aborted."""
        now = time.monotonic()
        for request in requests:
            if (choice := self._choices.get(request.request_id)) is not None:
                self._finish(request.request_id, choice, "abort", now)

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def _count(self, choice: _Choice, arrival: Arrival) -> None:
        if arrival.num_tokens:
            if not choice.num_tokens:
                choice.first = choice.last = arrival.at
                self._to_first.add(arrival.at - choice.came)
                self._num_prompt_tokens += choice.prompt_len
                self._num_cache_queries += choice.prompt_len
                self._num_cache_hits += arrival.num_cached_tokens
                rest = arrival.num_tokens - 1  # came with the first
                if rest:
                    self._between.add(0.0, rest)
            else:
                # Tokens of one block come at once: the wait for the block is shared by all of them.
                share = (arrival.at - choice.last) / arrival.num_tokens
                self._between.add(share, arrival.num_tokens)
            choice.last = arrival.at
            choice.num_tokens += arrival.num_tokens
            self._num_generated_tokens += arrival.num_tokens
        if arrival.finish_reason is not None:
            self._finish(arrival.request_id, choice, arrival.finish_reason, arrival.at)

    def _finish(self, request_id: str, choice: _Choice, reason: FinishReason, at: float) -> None:
        del self._choices[request_id]
        self._finished[reason] += 1
        self._end_to_end.add(at - choice.came)
        self._prompt_lens.add(choice.prompt_len)
        self._answer_lens.add(choice.num_tokens)
        self._max_tokens.add(choice.max_tokens)
        if choice.n:
            self._num_choices.add(choice.n)
        if choice.num_tokens > 1:
            self._per_token.add((choice.last - choice.first) / (choice.num_tokens - 1))

    # What prometheus-client asks for.

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known when they are collected."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family, with the numbers of this moment."""
        yield from self._engine_families()
        yield self._counter("prompt_tokens", "Prompt tokens of answers begun", self._num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens delivered", self._num_generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up", self._num_cache_queries)
        yield self._counter("prefix_cache_hits", "Of these, those that were cached", self._num_cache_hits)
        finished = CounterMetricFamily(
            "paceline:request_success", "Choices that ended", labels=("model_name", "finished_reason")
        )
        for reason, num in self._finished.items():
            finished.add_metric((self._model, reason), num)
        yield finished
        for name, help, values in (
            ("time_to_first_token_seconds", "From the request's arrival to its first token", self._to_first),
            ("inter_token_latency_seconds", "Between tokens; a block's wait is shared", self._between),
            (
                "request_time_per_output_token_seconds",
                "Mean of a choice after its first token",
                self._per_token,
            ),
            ("e2e_request_latency_seconds", "From the request's arrival to its last token", self._end_to_end),
            ("request_prompt_tokens", "Prompt tokens of a choice", self._prompt_lens),
            ("request_generation_tokens", "Tokens of a choice", self._answer_lens),
            ("request_params_n", "n of a prompt", self._num_choices),
            ("request_params_max_tokens", "Most tokens a choice may have", self._max_tokens),
        ):
            yield values.family(f"paceline:{name}", help, self._model)

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Choices that hold a row", stats.num_running)
        yield self._gauge("num_requests_waiting", "Choices that wait for one", stats.num_waiting)
        used = stats.num_pages_used / stats.num_pages
        yield self._gauge("kv_cache_usage_perc", "Share of the K/V pages in use, 1 is all", used)
        preempted = self._num_preemptions.update(stats.num_preemptions)
        yield self._counter("num_preemptions", "Rows given up for pages, to be computed again", preempted)
        yield from self._speculation.families(stats.speculation)
        yield from self._policy.families(stats.policy, stats.speculation.max_depth)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"paceline:{name}", help, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"paceline:{name}", help, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
