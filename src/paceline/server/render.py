"""From deltas to response records: the only place where chat and text completions differ in shape."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

from paceline.output import Delta
from paceline.request import TokenLogprobs
from paceline.server.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatTokenLogprob,
    Choice,
    CompletionLogprobs,
    Object,
    PromptTokensDetails,
    Response,
    TextChoice,
    TopLogprob,
    Usage,
)
from paceline.tokenizer import Tokenizer


class Shape(Protocol):
    """How one endpoint shows a choice."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[Object]
    chunk_object: ClassVar[Object]

    def whole(self, delta: Delta) -> Choice:
        """A finished choice."""
        ...

    def opening(self, choice: int) -> Choice | None:
        """What a stream says of a choice before its first token."""
        ...

    def piece(self, delta: Delta) -> Choice:
        """One choice in one chunk."""
        ...


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_object: ClassVar[Object] = "chat.completion"
    chunk_object: ClassVar[Object] = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, delta: Delta) -> Choice:
        message = AssistantMessage(delta.text)
        return ChatChoice(
            delta.choice, message, self._logprobs(delta), delta.finish_reason, delta.stop_reason
        )

    def opening(self, choice: int) -> Choice | None:
        return ChatChunkChoice(choice, ChatDelta("assistant", ""), None, None, None)

    def piece(self, delta: Delta) -> Choice:
        content = ChatDelta(content=delta.text or None)
        return ChatChunkChoice(
            delta.choice, content, self._logprobs(delta), delta.finish_reason, delta.stop_reason
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if delta.logprobs is None:
            return None
        return ChatLogprobs([self._entry(t, p) for t, p in zip(delta.token_ids, delta.logprobs, strict=True)])

    def _entry(self, token_id: int, position: TokenLogprobs) -> ChatTokenLogprob:
        top = [self._candidate(t, p) for t, p in zip(position.top_ids, position.top_logprobs, strict=True)]
        chosen = self._candidate(token_id, position.logprob)
        return ChatTokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)

    def _candidate(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return TopLogprob(raw.decode("utf-8", errors="replace"), logprob, list(raw))


class TextShape:
    """`/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_object: ClassVar[Object] = "text_completion"
    chunk_object: ClassVar[Object] = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, delta: Delta) -> Choice:
        return TextChoice(
            delta.choice, delta.text, self._logprobs(delta), delta.finish_reason, delta.stop_reason
        )

    def opening(self, choice: int) -> Choice | None:
        return None

    def piece(self, delta: Delta) -> Choice:
        return self.whole(delta)

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if delta.logprobs is None or delta.text_offsets is None:
            return None
        return CompletionLogprobs(
            text_offset=list(delta.text_offsets),
            token_logprobs=[p.logprob for p in delta.logprobs],
            tokens=[self._text(t) for t in delta.token_ids],
            top_logprobs=[
                {self._text(t): p for t, p in zip(position.top_ids, position.top_logprobs, strict=True)}
                for position in delta.logprobs
            ],
        )

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


class Renderer:
    """Makes the responses of one request: the same id, time and model in all of them."""

    def __init__(self, response_id: str, model: str, prompt_len: int, shape: Shape) -> None:
        self._id = response_id
        self._model = model
        self._prompt_len = prompt_len
        self._shape = shape
        self._created = int(time.time())
        self._num_completion_tokens = 0
        self._num_cached_tokens = 0

    def whole(self, deltas: Sequence[Delta]) -> Response:
        """The answer to a request that does not stream; one finished delta per choice."""
        self._count(deltas)
        return self._response(self._shape.whole_object, [self._shape.whole(d) for d in deltas], self._usage())

    def openings(self, num_choices: int) -> list[Response]:
        """The chunks before the first token."""
        openings = (self._shape.opening(choice) for choice in range(num_choices))
        return [self._chunk([opening]) for opening in openings if opening is not None]

    def chunks(self, deltas: Sequence[Delta]) -> list[Response]:
        """One chunk per choice that has something to show."""
        self._count(deltas)
        shown = (d for d in deltas if d.text or d.logprobs or d.finish_reason is not None)
        return [self._chunk([self._shape.piece(d)]) for d in shown]

    def usage_chunk(self) -> Response:
        """The last chunk, for `include_usage`: counts of everything rendered so far."""
        return self._chunk([], self._usage())

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_len,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._prompt_len + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._num_cached_tokens),
        )

    def _count(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._num_completion_tokens += len(delta.token_ids)
            # Later choices find the prompt that the first one computed; only what the first found was saved.
            if delta.choice == 0:
                self._num_cached_tokens = delta.num_cached_tokens

    def _chunk(self, choices: list[Choice], usage: Usage | None = None) -> Response:
        return self._response(self._shape.chunk_object, choices, usage)

    def _response(
        self,
        kind: Object,
        choices: list[Choice],
        usage: Usage | None,
    ) -> Response:
        return Response(
            id=self._id, object=kind, created=self._created, model=self._model, choices=choices, usage=usage
        )
