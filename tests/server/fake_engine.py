"""An engine without weights: its answer to a prompt is the prompt, over and over; or, where the
prompt has the special token <|say|>, what follows that up to the next special token, and EOS.

It keeps the real one's promises (blocks cut at stop tokens and at max_tokens, one final output, a
bounded queue, the depth that is asked for) and writes what happens to the file that FAKE_JOURNAL names.
Every draft of its drafter is right. Special tokens in a prompt make it die, raise, be slow, blame the
request's grammar, or lose its drafter or its policy.
"""

from __future__ import annotations

import gc
import os
import time
from itertools import islice
from pathlib import Path

from tiny_model import SPECIAL

from paceline.config import EngineConfig
from paceline.engine.drafting import Drafting, Tally
from paceline.engine.factory import BuiltEngine
from paceline.engine.messages import Ready
from paceline.engine.policies import make_steering
from paceline.engine.stats import SchedulerStats
from paceline.engine.steering import Candidate
from paceline.errors import EngineDeadError, ModelError, QueueFullError
from paceline.policy import Fixed, Observation
from paceline.request import EngineRequest, RequestOutput, TokenLogprobs
from paceline.step import RowResult
from paceline.tokenizer import load_tokenizer

MAX_MODEL_LEN = 4096


class _Misruled(Fixed):
    """A policy with a fault."""

    def __init__(self) -> None:
        super().__init__(1)

    def observe(self, observation: Observation) -> None:
        raise ZeroDivisionError("no such luck")


class FakeEngine:
    def __init__(self, config: EngineConfig, special: dict[str, int]) -> None:
        self._special = special
        self._limit = config.max_num_seqs + config.max_queue
        self._live: dict[str, tuple[EngineRequest, int]] = {}  # with the number of tokens given
        self._drafting = Drafting(0 if config.draft == "none" else config.max_depth)
        self._steering = make_steering(config, self._drafting.max_depth, None)
        self._num_generated_tokens = 0
        self._tallies: dict[str, Tally] = {}
        self._failed = False

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self._failed

    def add(self, request: EngineRequest) -> None:
        if len(self._live) >= self._limit:
            raise QueueFullError(f"the queue is full ({self._limit} requests)")
        journal("engine", "frozen", gc.get_freeze_count())
        journal("add", request.request_id, request.params.seed, request.choice)
        self._live[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self._live.pop(request_id, None):
            self._steering.ended(request_id)
            journal("abort", request_id)

    def step(self) -> list[RequestOutput]:
        if self._failed:
            raise EngineDeadError("the engine failed: RuntimeError: boom") from RuntimeError("boom")
        prompts = [set(request.prompt_ids) for request, _ in self._live.values()]
        if any(self._special["<|die|>"] in p for p in prompts):
            os._exit(3)
        if any(self._special["<|raise|>"] in p for p in prompts):
            self._failed = True
            return [RequestOutput(i, finish_reason="error", error="boom") for i in self._live]
        if any(self._special["<|slow|>"] in p for p in prompts):
            time.sleep(0.02)
        if any(self._special["<|undraft|>"] in p for p in prompts):
            self._drafting.fail("RuntimeError: no drafts today")
        if any(self._special["<|misrule|>"] in p for p in prompts):
            self._steering.policy = _Misruled()
        outputs = self._blame() + self._round()
        for output in outputs:
            if output.finish_reason is not None:
                journal("finish", output.request_id)
                self._live.pop(output.request_id, None)
                self._steering.ended(output.request_id)
        return outputs

    def _round(self) -> list[RequestOutput]:
        """A block for everybody, as deep as the policy says."""
        begun, room, outputs = time.perf_counter(), self._drafting.max_depth, []
        rows = [
            Candidate(request.request_id, room, request.params.depth, len(request.prompt_ids) + start)
            for request, start in self._live.values()
        ]
        chosen = self._steering.decide(rows, 0)
        results = {}
        for request, start in list(self._live.values()):
            output, got = self._advance(request, start, chosen.depths[request.request_id])
            outputs.append(output)
            results[request.request_id] = got
            self._num_generated_tokens += len(output.token_ids)
        self._steering.observe(chosen.decision, results, time.perf_counter() - begun)
        return outputs

    def _blame(self) -> list[RequestOutput]:
        """End requests as the real one ends those whose grammar cannot go on."""
        dead = self._special["<|dead|>"]
        blamed = [i for i, (request, _) in self._live.items() if dead in request.prompt_ids]
        for request_id in blamed:
            del self._live[request_id]
        words = "the grammar failed: no way on"
        return [RequestOutput(i, finish_reason="error", error=words, error_param="grammar") for i in blamed]

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._live),
            num_waiting=0,
            num_pages=1,
            num_pages_used=0,
            num_pages_cached=0,
            num_preemptions=0,
            num_prompt_tokens_computed=0,
            num_prompt_tokens_cached=0,
            num_generated_tokens=self._num_generated_tokens,
            speculation=self._drafting.stats(),
            policy=self._steering.stats(),
        )

    def _advance(self, request: EngineRequest, start: int, depth: int) -> tuple[RequestOutput, RowResult]:
        params = request.params
        assert params.max_tokens is not None
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {self._special["<|im_end|>"]})
        token_ids: list[int] = []
        stop_token_id = finish_reason = None
        script = self._script(request.prompt_ids)
        for i in range(start, start + 1 + depth):
            token_ids.append(script[i % len(script)])
            if token_ids[-1] in stops:
                stop_token_id, finish_reason = token_ids[-1], "stop"
                break
            if i + 1 == params.max_tokens:
                finish_reason = "length"
                break
        self._live[request.request_id] = (request, start + len(token_ids))
        tally = self._tallies.setdefault(request.request_id, Tally())
        block = tuple(script[i % len(script)] for i in range(start, start + 1 + depth))
        got = RowResult(0, depth, block, None, None, None, depth, depth, (0.5,) * depth)
        self._drafting.count(got)
        tally.add(got)
        logprobs = None if params.logprobs is None else [_logprobs(t, params.logprobs) for t in token_ids]
        output = RequestOutput(
            request.request_id,
            token_ids,
            logprobs,
            _prompt_logprobs(request) if start == 0 else None,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=2,
            speculation=tally.summary() if params.speculation_summary else None,
        )
        return output, got

    def _script(self, prompt_ids: list[int]) -> list[int]:
        say = self._special["<|say|>"]
        if say not in prompt_ids:
            return prompt_ids
        said = prompt_ids[prompt_ids.index(say) + 1 :]
        end = next((i for i, t in enumerate(said) if t in self._special.values()), len(said))
        return [*said[:end], self._special["<|im_end|>"]]


def _prompt_logprobs(request: EngineRequest) -> list[TokenLogprobs] | None:
    num_top = request.params.prompt_logprobs
    if num_top is None:
        return None
    return [
        TokenLogprobs(-float(t), [7, 8][:num_top], [-0.25, -0.5][:num_top]) for t in request.prompt_ids[1:]
    ]


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top_ids = list(islice((token_id, *(t for t in range(256) if t != token_id)), num_top))
    return TokenLogprobs(-0.5, top_ids, [-0.5 - i for i in range(num_top)])


def journal(*words: object) -> None:
    if path := os.environ.get("FAKE_JOURNAL"):
        with Path(path).open("a") as file:
            print(*words, file=file)


def build(config: EngineConfig) -> BuiltEngine:
    """The factory."""
    if (Path(config.model) / "refuse").exists():
        raise ModelError(f"{config.model}: tensor lm_head.weight is missing")
    tokenizer = load_tokenizer(Path(config.model))
    special = {text: tokenizer.encode(text)[0] for text in SPECIAL}
    has_drafter = config.draft != "none"
    depth: int | str = config.depth if config.depth == "auto" else int(config.depth)
    ready = Ready(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        max_depth=config.max_depth if has_drafter else 0,
        depth=depth if has_drafter else 0,
        draft=config.draft if has_drafter else None,
    )
    return BuiltEngine(FakeEngine(config, special), ready)


def never(config: EngineConfig) -> BuiltEngine:
    """A factory that is still loading."""
    time.sleep(600)
    raise AssertionError("nobody waits that long")
