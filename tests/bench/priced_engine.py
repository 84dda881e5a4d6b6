"""An engine without weights whose steps cost what a formula says, on a clock of its own.

A step of m target tokens at draft depth k takes `fixed + per_token m + per_draft k` seconds. A draft is
accepted with one chance, whatever its position, in turns and not by dice: exactly the expected share.
So throughput, crossovers and verdicts have answers that can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.workload import Prompt
from paceline.engine.factory import BuiltEngine
from paceline.engine.messages import Ready
from paceline.engine.stats import SchedulerStats, SpeculationStats
from paceline.request import EngineRequest, RequestOutput

MAX_MODEL_LEN, NUM_PAGES = 4096, 512


@dataclass
class Clock:
    """Time that passes only when somebody works."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Prices:
    """Seconds, and the chance that a draft is right when those before it were."""

    fixed: float = 0.010
    per_token: float = 0.001
    per_draft: float = 0.0
    acceptance: float = 0.5

    def rate(self, rows: int, depth: int) -> float:
        """Tokens a second of this many rows, all at one depth."""
        accepted = sum(self.acceptance**j for j in range(1, depth + 1))
        seconds = self.fixed + self.per_token * rows * (1 + depth) + self.per_draft * depth
        return rows * (1 + accepted) / seconds

    def crossover(self, depth: int) -> float:
        """Rows at which this depth is as fast as none."""
        accepted = sum(self.acceptance**j for j in range(1, depth + 1))
        gain = accepted * self.fixed - self.per_draft * depth
        return gain / (self.per_token * (depth - accepted))


@dataclass
class PricedEngine:
    """The real one's promises to `ClosedLoop`: blocks cut at max_tokens, one final output each."""

    clock: Clock
    prices: Prices
    choose: Callable[[int], int]  # depth of rows that do not say, by the number of rows
    max_depth: int = 0
    fails_at: int | None = None  # rows
    ends_at: Callable[[EngineRequest], int] | None = None  # tokens after which the model ends an answer
    live: dict[str, list[Any]] = field(default_factory=dict)  # request, tokens given, luck owed
    num_generated: int = 0
    num_added: int = 0
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * 32)
    rounds_by_depth: list[int] = field(default_factory=lambda: [0] * 33)

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: EngineRequest) -> None:
        assert request.request_id not in self.live
        self.num_added += 1
        owed = [(self.num_added * 0.618 + position * 0.382) % 1 for position in range(32)]
        self.live[request.request_id] = [request, 0, owed]

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def rest(self) -> None:
        pass

    def step(self) -> list[RequestOutput]:
        if len(self.live) == self.fails_at:
            raise RuntimeError("out of luck\nand of words")
        decoding = [entry for entry in self.live.values() if entry[1]]
        depths = {id(entry): self._depth(entry[0], len(decoding)) for entry in decoding}
        num_tokens = len(self.live) + sum(depths.values())
        deepest = max(depths.values(), default=0)
        self.clock.now += (
            self.prices.fixed + self.prices.per_token * num_tokens + self.prices.per_draft * deepest
        )
        return [self._advance(entry, depths.get(id(entry))) for entry in list(self.live.values())]

    def _depth(self, request: EngineRequest, num_decoding: int) -> int:
        asked = request.params.depth
        return self.choose(num_decoding) if asked is None else asked

    def _advance(self, entry: list[Any], depth: int | None) -> RequestOutput:
        """A row's step; depth None: its prompt, which gives the first token."""
        request, given, owed = entry
        num_accepted = 0
        if depth is not None:
            self.rounds_by_depth[depth] += 1
            while num_accepted < depth and self._is_right(owed, num_accepted):
                self.accepted_per_pos[num_accepted] += 1
                num_accepted += 1
        max_len = request.params.max_tokens
        end = max_len
        if self.ends_at is not None and not request.params.ignore_eos:
            end = min(max_len, self.ends_at(request))
        num = min(1 + num_accepted, end - given)
        entry[1] += num
        self.num_generated += num
        reason = None
        if entry[1] == end:
            reason = "length" if end == max_len else "stop"
            del self.live[request.request_id]
        return RequestOutput(request.request_id, [7] * num, finish_reason=reason)

    def _is_right(self, owed: list[float], position: int) -> bool:
        owed[position] += self.prices.acceptance
        if owed[position] < 1.0:
            return False
        owed[position] -= 1.0
        return True

    def stats(self) -> SchedulerStats:
        drafted = sum(depth * num for depth, num in enumerate(self.rounds_by_depth))
        return SchedulerStats(
            num_running=len(self.live),
            num_waiting=0,
            num_pages=NUM_PAGES,
            num_pages_used=0,
            num_pages_cached=0,
            num_preemptions=0,
            num_prompt_tokens_computed=0,
            num_prompt_tokens_cached=0,
            num_generated_tokens=self.num_generated,
            speculation=SpeculationStats(
                max_depth=self.max_depth,
                num_rounds=sum(self.rounds_by_depth[1:]),
                num_drafted=drafted,
                num_verified=drafted,
                num_accepted=sum(self.accepted_per_pos),
                accepted_per_pos=self.accepted_per_pos[: self.max_depth],
                rounds_by_depth=self.rounds_by_depth[: self.max_depth + 1],
            ),
        )


class Words:
    """A token a word."""

    def encode(self, prompt: str) -> list[int]:
        return [3] * max(1, len(prompt.split()))


def built(engine: PricedEngine) -> BuiltEngine:
    """As the factory gives it."""
    ready = Ready(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=100,
        max_depth=engine.max_depth,
        draft="priced" if engine.max_depth else None,
    )
    return BuiltEngine(engine, ready)


def prompts(num: int = 50) -> Sequence[Prompt]:
    return [Prompt(f"prompt number {i} of the list") for i in range(num)]
