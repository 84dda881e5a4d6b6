"""The Python API: a model in this process.

    from paceline import LLM, SamplingParams

    with LLM("smollm2-135m-instruct") as llm:
        for completion in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
            print(completion.text)

The same engine and the same text handling as the server's, without HTTP and the second process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from tqdm import tqdm

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.draft.load import resolve_draft
from paceline.engine.factory import StepEngine, build
from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError
from paceline.models.hub import resolve_model
from paceline.output import Delta, OutputProcessor, merge
from paceline.prepare import ModelLimits, prepare
from paceline.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    SpeculationSummary,
    TokenLogprobs,
)
from paceline.tokenizer import Tokenizer, load_tokenizer

Prompt: TypeAlias = str | Sequence[int]  # text, or token ids
Conversation: TypeAlias = Sequence[Mapping[str, Any]]  # messages with "role" and "content"


@dataclass(frozen=True, slots=True)
class CompletionChoice:
    """One of a prompt's `n` answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # up to and with the stop token, or the token that completed a stop string
    finish_reason: FinishReason  # "stop" or "length"
    stop_reason: int | str | None  # the stop token id or stop string of the request's that ended it
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, when asked for
    speculation: SpeculationSummary | None  # what drafting did for it, when asked for


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of one prompt. `text`, `token_ids`, … are the first choice's."""

    prompt: str | None  # None when the prompt was given as token ids
    prompt_ids: tuple[int, ...]
    choices: tuple[CompletionChoice, ...]
    num_cached_tokens: int  # prompt tokens that the prefix cache had

    @property
    def text(self) -> str:
        """The answer."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One per token, when asked for."""
        return self.choices[0].logprobs


class LLM:
    """A loaded model. For one thread at a time.

    Ctrl-C during a call ends it between two steps: what ran is aborted, KeyboardInterrupt is raised,
    and the object remains usable.

    Args:
        model: built-in name, Hugging Face id, local folder or .gguf file.
        settings: any other field of `EngineConfig`.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: the model cannot be found, read or run.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **settings: Any) -> None:
        self._load(EngineConfig(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """The same from a ready-made config."""
        llm = cls.__new__(cls)
        llm._load(config)
        return llm

    def _load(self, config: EngineConfig) -> None:
        path = resolve_model(config.model, config.revision)
        self.tokenizer: Tokenizer = load_tokenizer(path)
        # What was found here is not looked for again; and a path does not tell which head was shipped for it.
        draft = resolve_draft(config.draft, config.model, config.draft_revision)
        built = build(replace(config, model=str(path), draft=draft))
        self.limits = ModelLimits(
            max_model_len=built.ready.max_model_len,
            vocab_size=built.ready.vocab_size,
            max_depth=built.ready.max_depth,
            draft=built.ready.draft,
        )
        self._engine: StepEngine | None = built.engine
        self._processor = OutputProcessor(self.tokenizer)
        self._num_calls = 0
        self._inboxes: dict[str, list[Delta]] = {}  # by request: one call's steps serve all open streams

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete prompts, all of them batched together; the results are in the prompts' order.

        Args:
            prompts: one prompt or several, each a text or a list of token ids.
            sampling_params: for all prompts, or one per prompt; default: `SamplingParams()`.
            progress: show a progress bar on standard error.

        Raises:
            RequestError: a prompt or its parameters cannot run; it names the prompt's index, and
                nothing has run when a prompt is too long.
        """
        listed = _listed(prompts)
        requests = self._prepare(listed, _per_prompt(sampling_params, len(listed)))
        return self._complete(listed, requests, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, through the model's chat template; otherwise as `generate`."""
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        prompts = [self.chat_prompt(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, piece by piece. Leaving the iterator early aborts the rest."""
        [requests] = self._prepare([prompt], [sampling_params or SamplingParams()])
        for deltas in self._run(requests):
            yield from deltas

    def chat_prompt(self, messages: Conversation) -> list[int]:
        """The token ids of a conversation and the opening of the answer to it."""
        text = self.tokenizer.apply_chat_template([dict(m) for m in messages])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """Let the model go. Calls after this raise PacelineError."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[list[EngineRequest]]:
        self._num_calls += 1
        prepared = []
        for i, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            try:
                prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
                prepared.append(prepare(f"{self._num_calls}.{i}", prompt_ids, wanted, self.limits))
            except RequestError as error:
                raise RequestError(error.param, f"prompts[{i}]: {error}") from None
        return prepared

    def _complete(
        self, prompts: Sequence[Prompt], prepared: Sequence[Sequence[EngineRequest]], progress: bool
    ) -> list[Completion]:
        deltas: dict[str, list[Delta]] = {r.request_id: [] for requests in prepared for r in requests}
        with _Bar(len(deltas), progress) as bar:
            for batch in self._run([r for requests in prepared for r in requests]):
                for delta in batch:
                    deltas[delta.request_id].append(delta)
                bar.update(batch)
        return [
            _completion(prompt, requests, [merge(deltas[r.request_id]) for r in requests])
            for prompt, requests in zip(prompts, prepared, strict=True)
        ]

    def _run(self, requests: Sequence[EngineRequest]) -> Iterator[list[Delta]]:
        """Run requests to their ends; a caller that leaves early has the rest aborted."""
        engine = self._engine
        if engine is None:
            raise PacelineError("this LLM is closed")
        to_add, open_ids = deque(requests), {r.request_id for r in requests}
        inbox: list[Delta] = []
        self._inboxes.update(dict.fromkeys(open_ids, inbox))
        try:
            while open_ids:
                with _interrupt_deferred():
                    self._feed(engine, to_add)
                    if not inbox:
                        self._step(engine)
                    deltas = inbox.copy()
                    inbox.clear()
                for delta in deltas:
                    if delta.error is not None:
                        if delta.error_param is not None:
                            raise RequestError(delta.error_param, delta.error)
                        raise EngineDeadError(delta.error)
                    if delta.finish_reason is not None:
                        open_ids.discard(delta.request_id)
                yield deltas
        finally:
            for request_id in open_ids:
                self._processor.drop(request_id)
                engine.abort(request_id)
            for request in requests:
                del self._inboxes[request.request_id]

    def _step(self, engine: StepEngine) -> None:
        """Run a step and sort what it gave into the inboxes."""
        deltas, to_abort = self._processor.process(engine.step())
        for request_id in to_abort:
            engine.abort(request_id)
        for delta in deltas:
            self._inboxes[delta.request_id].append(delta)

    def _feed(self, engine: StepEngine, to_add: deque[EngineRequest]) -> None:
        """Give the engine what its queue takes."""
        while to_add:
            request = to_add[0]
            try:
                engine.add(request)
            except QueueFullError:
                if not engine.has_work:  # an empty engine that takes nothing never will
                    raise
                return
            self._processor.add(to_add.popleft())


class _Bar:
    """Progress over requests, with the rate of tokens."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(total=total, unit="req", disable=None if shown else True, dynamic_ncols=True)
        self._began = time.monotonic()
        self._num_tokens = 0

    def update(self, deltas: Sequence[Delta]) -> None:
        self._num_tokens += sum(len(d.token_ids) for d in deltas)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        self._bar.set_postfix_str(f"{self._num_tokens / elapsed:.1f} tok/s", refresh=False)
        self._bar.update(sum(d.finish_reason is not None for d in deltas))

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Keep SIGINT until the block is done: a step that is torn leaves an engine nobody can use."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda signum, frame: caught.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, from one or several: a string or a list of integers is one."""
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts", f"prompts must be a text, token ids or a list of these, got {type(prompts).__name__}"
        )
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _token_ids(prompt: object) -> list[int]:
    """Numbers that are no integers are refused, not rounded."""
    if not isinstance(prompt, Sequence) or not all(isinstance(token_id, int) for token_id in prompt):
        raise RequestError("prompt", "a prompt must be a text or a list of token ids")
    return list(prompt)


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if len(sampling_params) != num_prompts:
        raise RequestError(
            "sampling_params",
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts: give one, or one each",
        )
    return sampling_params


def _completion(prompt: Prompt, requests: Sequence[EngineRequest], answers: Sequence[Delta]) -> Completion:
    choices = []
    for answer in answers:
        assert answer.finish_reason is not None
        choices.append(
            CompletionChoice(
                index=answer.choice,
                text=answer.text,
                token_ids=tuple(answer.token_ids),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                logprobs=None if answer.logprobs is None else tuple(answer.logprobs),
                speculation=answer.speculation,
            )
        )
    return Completion(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=tuple(requests[0].prompt_ids),
        choices=tuple(choices),
        num_cached_tokens=answers[0].num_cached_tokens,
    )
