"""What the parts of the speculation benchmark share: yardstick prompts, two engines, one request timed.

Both engines are in this process and have equal pages: one has the shipped head loaded, the other was launched
with `draft="none"` and is what *plain* means. Looks into the worker for the time that its parts take.

Knows nothing of what is compared, or of how results are shown.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from common import PROMPTS
from paceline.bench.arms import arm_of
from paceline.bench.local import ClosedLoop, Encoder, Engines, drafting
from paceline.bench.window import Speculation
from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.engine.factory import BuiltEngine, build
from paceline.models.hub import resolve_model
from paceline.prepare import ModelLimits, prepare
from paceline.request import EngineRequest, SamplingParams
from paceline.tokenizer import load_tokenizer

CATEGORIES = ("translation", "summarization", "qa", "math_reasoning")
MAX_NEW_TOKENS, SEED = 128, 20_261_129
PARTS = ("draft", "target", "settle")  # of a step; what else it does is the rest
PLAIN, HEAD = "plain", "head"  # the two engines
_ARMS = {HEAD: arm_of("0"), PLAIN: arm_of("plain")}

PINNED = EngineConfig(depth="0")  # no policy and no calibration: requests say how deep

_request_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class YardstickPrompt:
    """A user's message as the model reads it."""

    number: int  # among all, and what its seed depends on
    category: str
    token_ids: list[int]


def yardstick(encoder: Encoder) -> list[YardstickPrompt]:
    """All prompts, the categories in turn: any four in a row have one of each."""
    by_category: dict[str, list[str]] = {category: [] for category in CATEGORIES}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        by_category[record["category"]].append(record["turns"][0])
    mixed = [
        (category, text)
        for texts in zip(*by_category.values(), strict=True)
        for category, text in zip(by_category, texts, strict=True)
    ]
    return [YardstickPrompt(i, kind, encoder.encode(text)) for i, (kind, text) in enumerate(mixed)]


class Stopwatch:
    """Seconds that the parts of a worker's steps took, since the last lap.

    Reading the clock eight times a step costs a microsecond, on both engines.
    """

    def __init__(self, worker: Any) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        for part, owner, name in (
            ("draft", worker, "_propose"),
            ("target", worker._model, "forward"),
            ("target", worker._model, "logits"),
            ("settle", worker, "_settle_draft"),
        ):
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def lap(self) -> dict[str, float]:
        """The seconds by part."""
        lap, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        return lap

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self._seconds[part] += time.perf_counter() - begin

        return timed


@dataclass(frozen=True, slots=True)
class Answer:
    """One request alone. Seconds, steps and parts are those after its first token, which is the prompt's."""

    token_ids: tuple[int, ...]
    seconds: float
    num_steps: int
    parts: Mapping[str, float]
    speculation: Speculation | None  # None: the engine has no drafter

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (len(self.token_ids) - 1) / self.seconds

    @property
    def step_seconds(self) -> float:
        """Mean over steps."""
        return self.seconds / self.num_steps

    @property
    def step_len(self) -> float:
        """Tokens a step, as delivered: rounds without drafts count, and what is cut off does not."""
        return (len(self.token_ids) - 1) / self.num_steps


@dataclass(slots=True)
class Side:
    """One engine."""

    built: BuiltEngine
    max_tokens: int = MAX_NEW_TOKENS  # of an answer
    stopwatch: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch(self.worker)

    @property
    def engine(self) -> Any:
        return self.built.engine

    @property
    def worker(self) -> Any:
        """What computes. No interface of the engine's: looked into here alone."""
        return self.engine._worker

    def request(
        self,
        prompt: YardstickPrompt,
        depth: int | None,
        temperature: float = 0.0,
        **params: Any,
    ) -> EngineRequest:
        """For this prompt, with the seed that it always has; `params` are further ones of its sampling."""
        ready = self.built.ready
        limits = ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_depth=ready.max_depth,
            draft=ready.draft,
        )
        params.setdefault("max_tokens", self.max_tokens)
        wanted = SamplingParams(temperature=temperature, seed=SEED + prompt.number, depth=depth, **params)
        [request] = prepare(f"spec-{next(_request_numbers)}", prompt.token_ids, wanted, limits)
        return request

    def warm(self, prompts: list[YardstickPrompt]) -> None:
        """Leave the prompts in the prefix cache."""
        loop = self.loop()
        for prompt in prompts:
            loop.send(self.request(prompt, 0, max_tokens=1))
        while loop.num_open:
            loop.step()

    def loop(self) -> ClosedLoop:
        """Nothing in flight yet."""
        return ClosedLoop(self.engine, time.perf_counter)

    def answer(self, request: EngineRequest) -> Answer:
        """Run a request alone to its end.

        Raises:
            RuntimeError: it ended by an error.
            PacelineError: the drafter has turned itself off.
        """
        before = self.engine.stats()
        self.engine.add(request)
        token_ids: list[int] = []
        num_steps, begin = 0, 0.0
        while self.engine.has_work:
            outputs = self.engine.step()
            num_steps += bool(token_ids)
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(output.error)
                if not token_ids:
                    self.stopwatch.lap()
                    begin = time.perf_counter()
                token_ids += output.token_ids
        seconds = time.perf_counter() - begin
        drafted = drafting(before, self.engine.stats())
        return Answer(tuple(token_ids), seconds, num_steps, self.stopwatch.lap(), drafted)


class Bench:
    """The prompts and the engines, each made when first needed."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.max_tokens = 16 if quick else MAX_NEW_TOKENS

    @cached_property
    def prompts(self) -> list[YardstickPrompt]:
        """See `yardstick`."""
        return yardstick(Encoder(load_tokenizer(resolve_model(DEFAULT_MODEL))))

    def of(self, category: str) -> Iterator[YardstickPrompt]:
        """A category's prompts."""
        return (prompt for prompt in self.prompts if prompt.category == category)

    @cached_property
    def _engines(self) -> Engines:
        """Each is launched when asked for, with the pages of the first."""
        return Engines(PINNED, list(_ARMS.values()), build)

    @cached_property
    def head(self) -> Side:
        """With the shipped head loaded."""
        return Side(self._engines.of(_ARMS[HEAD]).built, self.max_tokens)

    @cached_property
    def plain(self) -> Side:
        """Launched without a drafter."""
        return Side(self._engines.of(_ARMS[PLAIN]).built, self.max_tokens)

    @property
    def sides(self) -> dict[str, Side]:
        """Both."""
        return {HEAD: self.head, PLAIN: self.plain}
