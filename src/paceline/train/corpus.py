"""The conversations that a head is trained on: what kinds, how many of each, how long.

First the target writes raw material (passages, sentences, questions), then it does tasks over it.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.models.config import ModelConfig
from paceline.models.weights import Weights
from paceline.tokenizer import Tokenizer
from paceline.train import tasks
from paceline.train.generate import Conversations, Lockstep, join
from paceline.train.scripts import Script, Template, decode_answers

logger = logging.getLogger(__name__)

_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.6, 0.8, 0.8, 1.0)  # drawn from; greedy half of the time
_SHORT_KINDS = (
    *("math", "translation", "question", "chat") * 2,
    *("code", "advice", "writing"),
)
_LONG_KINDS = ("summary", "summary", "summary", "reading", "reading", "chat", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlan:
    """Sizes of generation. `seconds` bounds it; at least one batch of each stage is made."""

    seconds: float
    num_rows: int  # of a long batch; short batches have twice as many
    short_len: int = 512
    long_len: int = 2048
    max_turn_tokens: int = 256


@dataclass(frozen=True, slots=True)
class _Material:
    passages: list[str]
    sentences: list[str]
    questions: list[str]
    own: list[str]  # the user's prompts


class CorpusMaker:
    """Makes conversations with one target."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer,
        plan: CorpusPlan,
        device: str,
        seed: int,
        own_prompts: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self._plan, self._rng, self._seed = tokenizer, plan, random.Random(seed), seed
        self._template = Template(tokenizer)
        self._own = list(own_prompts)
        self._make: Callable[[int, int], Lockstep] = lambda rows, length: Lockstep(
            config,
            weights,
            tokenizer.eos_token_ids,
            rows,
            min(length, config.max_position_embeddings),
            device,
        )

    def run(self) -> Conversations:
        """All conversations, in the order made."""
        started = time.monotonic()
        plan, parts = self._plan, []
        short = self._make(2 * plan.num_rows, plan.short_len)
        raw = self._batch(short, [self._raw_script() for _ in range(short.num_rows)])
        parts.append(raw)
        material = self._material(raw)
        parts.append(
            self._batch(short, [self._short_script(material, short.length) for _ in range(short.num_rows)])
        )
        long = self._make(plan.num_rows, plan.long_len)
        while True:
            parts.append(
                self._batch(long, [self._long_script(material, long.length) for _ in range(long.num_rows)])
            )
            spent = time.monotonic() - started
            logger.info("made %.1f M tokens in %.0f s", sum(int(p.lengths.sum()) for p in parts) / 1e6, spent)
            if spent > plan.seconds:
                return join(parts)
            parts.append(
                self._batch(
                    short, [self._short_script(material, short.length) for _ in range(short.num_rows)]
                )
            )

    def _batch(self, lockstep: Lockstep, scripts: list[Script]) -> Conversations:
        self._seed += 1
        heat = [self._rng.choice(_TEMPERATURES) for _ in scripts]
        return lockstep.run(scripts, heat, self._seed, self._plan.max_turn_tokens)

    def _raw_script(self) -> Script:
        make = self._rng.choice(
            (tasks.passage_prompt, tasks.passage_prompt, tasks.sentence_prompt, tasks.question_prompt)
        )
        kind = {
            tasks.passage_prompt: "writing",
            tasks.sentence_prompt: "sentence",
            tasks.question_prompt: "asking",
        }[make]
        return self._template.task(kind, [make(self._rng) for _ in range(1 if kind == "writing" else 6)])

    def _material(self, raw: Conversations) -> _Material:
        found: dict[str, list[str]] = {"writing": [], "sentence": [], "asking": []}
        for row, kind in enumerate(raw.kinds):
            length = int(raw.lengths[row])
            answer = (raw.turns[row, :length] == 2).tolist()
            found[kind] += [
                t for t in decode_answers(self._tokenizer, raw.token_ids[row, :length].tolist(), answer) if t
            ]
        passages = [t for t in found["writing"] if len(t.split(" ")) > 40] or ["The sun rises in the east."]
        fallback = [t.split(". ")[0] for t in passages]
        questions = [t.splitlines()[0] for t in found["asking"] if "?" in t]
        return _Material(passages, found["sentence"] + fallback, questions or ["What is water?"], self._own)

    def _prompt(self, kind: str, material: _Material) -> str:
        rng = self._rng
        if kind == "own":
            return rng.choice(material.own)
        if kind == "translation":
            return tasks.translation(rng, rng.choice(material.sentences))
        if kind == "question":
            return rng.choice(material.questions)
        if kind in tasks.OVER_PASSAGE:
            return tasks.OVER_PASSAGE[kind](rng, tasks.cut_passage(rng, material.passages))
        return tasks.PLAIN[kind](rng)

    def _script(self, kind: str, material: _Material, length: int) -> Script:
        """One conversation that fills `length` tokens, as far as can be told beforehand."""
        if kind == "own" and not material.own:
            kind = "reading"
        if kind == "chat":
            return self._template.open_chat(max(1, length // 150))
        prompts: list[str] = []
        left = length
        while left > 0 and len(prompts) < 12:
            prompts.append(self._prompt(kind, material))
            left -= len(prompts[-1]) // 4 + 120
        return self._template.task(kind, prompts)

    def _short_script(self, material: _Material, length: int) -> Script:
        # Serving sees most requests at position 0, so some rows hold a single task and end.
        return self._script(self._rng.choice(_SHORT_KINDS), material, self._rng.choice((1, length, length)))

    def _long_script(self, material: _Material, length: int) -> Script:
        return self._script(self._rng.choice(_LONG_KINDS), material, length)
