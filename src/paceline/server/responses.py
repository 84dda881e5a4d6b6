"""OpenAI's response records, as far as they are filled here; what OpenAI sends as null is null here too.

Knows nothing of how they come about (`render`) or of HTTP.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from paceline.server.speculation import Speculation, SpeculationHealth

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort", "error"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request, all its prompts and choices together."""

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
    """Text completions' logprobs: parallel lists. Of an echoed prompt's first token they are null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class FunctionCall(msgspec.Struct, frozen=True):
    """What the model calls, with `arguments` as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call in full."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call; the first one carries the name."""

    arguments: str  # "" too is sent: clients add them up
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the call `index`; the first one carries `id` and `type`."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: Literal["function"] | None = None


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer in full."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of the answer; the first one carries the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a finished chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # vLLM's: which stop token or string it was
    speculation: Speculation | UnsetType = UNSET  # when asked for


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice in a chunk of a chat stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    speculation: Speculation | UnsetType = UNSET  # in the last one, when asked for


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a text completion, whole or in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    speculation: Speculation | UnsetType = UNSET  # when finished, when asked for


Choice: TypeAlias = ChatChoice | ChatChunkChoice | TextChoice


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A finished chat completion."""

    id: str
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream; only the last one has `usage`, unless asked otherwise."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, finished or one event of a stream (then `usage` is null but in the last)."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model that is served."""

    id: str
    created: int
    max_model_len: int  # prompt plus answer, in tokens
    max_depth: int  # largest speculation.depth; 0: there is no drafter
    draft: str | None  # the drafter's name
    owned_by: str = "paceline"
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models: the one."""

    data: list[Model]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Special tokens and the chat template's source: what a client needs to write prompts itself."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether requests are answered at present."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None
    speculation: SpeculationHealth | None = None  # while requests are answered


class Version(msgspec.Struct, frozen=True):
    """Paceline's version."""

    version: str


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """What every failed request gets."""

    error: ErrorDetail
