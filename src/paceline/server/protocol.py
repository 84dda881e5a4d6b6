"""OpenAI's request and response records, as far as they are supported, and not a field further.

A field that is not here is refused by name; one typed `NotYet` is known and refused as not supported
yet. Beyond OpenAI's own, the sampling fields are those of `SamplingParams`, under the same names as
in vLLM. Knows nothing of tokens, the engine or HTTP.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from paceline.errors import RequestError
from paceline.request import MAX_LOGPROBS, FinishReason, SamplingParams
from paceline.server.validation import NotYet

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; chat has none


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and text completions share. None means the default, as null does in JSON."""

    model: str | None = None  # None: the one model there is
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # the caller's own label; nothing depends on it
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options is for stream: true only")
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in _SAME_NAMES if getattr(self, name) is not None
        }
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            fields["stop_token_ids"] = tuple(self.stop_token_ids)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)


_SAME_NAMES = tuple(
    name
    for name in GenerationRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__
    and name not in ("stop", "stop_token_ids", "max_tokens", "logprobs")
)


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """One part of a message's content; text is the only kind."""

    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a conversation. `developer` is OpenAI's newer name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None  # reaches the chat template
    tool_calls: NotYet = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content as one string."""
        parts = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": parts}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: NotYet = None
    tool_choice: NotYet = None
    parallel_tool_calls: NotYet = None
    response_format: NotYet = None

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError naming the field that is wrong."""
        if not self.messages:
            raise RequestError("messages", "messages must not be empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                "top_logprobs", f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {self.top_logprobs}"
            )
        newer, older = self.max_completion_tokens, self.max_tokens
        if newer is not None and older is not None and older != newer:
            raise RequestError(
                "max_completion_tokens", f"max_completion_tokens ({newer}) and max_tokens ({older}) differ"
            )
        return self._sampling(
            max_tokens=older if newer is None else newer,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def field_named(self, param: str) -> str:
        """What this body calls `param` of the engine's request."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return "messages" if param == "prompt" else param


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `/v1/completions`. One prompt, as text or as token ids."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: NotYet = None

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError naming the field that is wrong."""
        if self.echo:
            raise RequestError("echo", "echo is not supported yet")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of", "best_of other than n is not supported yet")
        max_tokens = COMPLETIONS_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(max_tokens=max_tokens, logprobs=self.logprobs)

    def field_named(self, param: str) -> str:
        """What this body calls `param` of the engine's request."""
        return param


# Responses. Fields that OpenAI sends as null are sent as null.


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One token that might have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """The token that was, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Chat's logprobs: one entry per token."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Text completions' logprobs: parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer in full."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the answer; the first one carries the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a finished chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # vLLM's: which stop token or string it was


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice in a chunk of a chat stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, whole or in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


Choice: TypeAlias = ChatChoice | ChatChunkChoice | TextChoice
Object: TypeAlias = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A finished completion, or one chunk of a stream (then `usage` is null but in the last)."""

    id: str
    object: Object
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """What every failed request gets."""

    error: ErrorDetail
