"""OpenAI's request records, as far as they are supported, and not a field further.

A field that is not here is refused by name; one typed `NotYet` is known and refused as not supported
yet. Beyond OpenAI's own, the sampling fields are those of `SamplingParams`, under the same names as
in vLLM. Knows nothing of tokens, the engine or HTTP.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from paceline.errors import RequestError
from paceline.request import MAX_LOGPROBS, Grammar, SamplingParams
from paceline.server.speculation import SpeculationOptions
from paceline.server.structured import ResponseFormat, Schema, StructuredOutputs, chosen_grammar
from paceline.server.tools import Called, Tool, ToolChoice
from paceline.server.validation import NotYet

COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; chat has none

# Fields that clients send, with the values that change nothing here; another value is refused.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),  # no such spaces are ever made
    "use_beam_search": (False,),
    "modalities": (["text"],),
}
# A template is given these by the request's own fields.
_TEMPLATE_WORDS = ("messages", "tools", "documents", "add_generation_prompt")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: counts so far in every chunk


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat and text completions share. None means the default, as null does in JSON."""

    model: str | None = None  # None: the one model there is
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    speculation: SpeculationOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Accepted, and nothing depends on them.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    service_tier: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        return self.wants_usage_chunk and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def asked_grammar(self) -> tuple[str, Grammar] | None:
        """The grammar that the answer must keep to, with the name of the field that asks for it.

        Raises:
            RequestError: more than one asks, or one is wrong.
        """
        guided = {name: getattr(self, name) for name in _GUIDED}
        return chosen_grammar(self.response_format, self.structured_outputs, guided)

    def field_named(self, param: str) -> str:
        """What this body calls `param` of the engine's request."""
        if param == "grammar" and (asked := self.asked_grammar()) is not None:
            return asked[0]
        return "speculation.depth" if param == "depth" else param

    def _sampling(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
    ) -> SamplingParams:
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise RequestError(name, f"{name}: {value!r} is not supported; only {neutral[0]!r} is")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options", "stream_options is for stream: true only")
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in _SAME_NAMES if getattr(self, name) is not None
        }
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            fields["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.speculation is not None:
            fields["depth"] = self.speculation.asked_depth()
            fields["speculation_summary"] = bool(self.speculation.summary)
        if grammar is None and (asked := self.asked_grammar()) is not None:
            grammar = asked[1]
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            **fields,
        )


_GUIDED = tuple(name for name in GenerationRequest.__struct_fields__ if name.startswith("guided_"))
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

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None  # reaches the chat template
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    # What OpenAI's client leaves in an answer that is sent back.
    refusal: NotYet = None
    audio: NotYet = None
    function_call: NotYet = None
    annotations: list[NotYet] | None = None

    @property
    def text(self) -> str | None:
        """Content as one string."""
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def for_template(self, param: str) -> dict[str, Any]:
        """As chat templates expect it. `param` is this message's place in the body.

        Raises:
            RequestError: a field is missing, or one is there that its role does not have.
        """
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise RequestError(f"{param}.content", f"missing field: {param}.content")
        if self.tool_calls is not None and self.role != "assistant":
            raise RequestError(f"{param}.tool_calls", f"{param}.tool_calls is for assistant messages only")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise RequestError(
                f"{param}.tool_call_id", f"{param}.tool_call_id is for messages of a tool, which need it"
            )
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text or "",
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [
                call.for_template(f"{param}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls)
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Conversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chat prompt is made of."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None  # default: true, unless the last message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the model's template

    def check(self) -> None:
        """Raises RequestError naming the field that is wrong."""
        if not self.messages:
            raise RequestError("messages", "messages must not be empty")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        for word in _TEMPLATE_WORDS:
            if word in (self.chat_template_kwargs or {}):
                raise RequestError("chat_template_kwargs", f"chat_template_kwargs must not have {word}")


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `/v1/chat/completions`. The fields of `Conversation`, and how to answer it."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None

    def conversation(self) -> Conversation:
        """What the prompt is made of."""
        return Conversation(**{name: getattr(self, name) for name in Conversation.__struct_fields__})

    def sampling_params(self, tool_grammar: Grammar | None) -> SamplingParams:
        """Raises RequestError naming the field that is wrong."""
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
        asked = self.asked_grammar()
        if asked is not None and self.tools and self.tool_choice != "none":
            raise RequestError(
                asked[0], f"{asked[0]} and tools exclude each other, unless tool_choice is none"
            )
        return self._sampling(
            max_tokens=older if newer is None else newer,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            grammar=tool_grammar,
        )

    def field_named(self, param: str) -> str:
        """What this body calls `param` of the engine's request."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if param == "logprobs":
            return "top_logprobs"
        named = super().field_named(param)
        return {"prompt": "messages", "grammar": "tools"}.get(named, named)


Prompt: TypeAlias = str | list[int]


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of `/v1/completions`. `prompt` is one or several, each a text or token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    return_tokens_as_token_ids: bool | None = None  # vLLM's: logprobs name tokens "token_id:ID"
    add_special_tokens: bool | None = None  # vLLM's: whether a text gets the model's BOS; default: true
    suffix: NotYet = None

    @property
    def prompts(self) -> list[Prompt]:
        """Each prompt.

        Raises:
            RequestError: none, or a mixture of kinds.
        """
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise RequestError("prompt", "the prompt is empty: at least one token is needed")
        kind = type(given[0])
        for i, item in enumerate(given):
            if type(item) is not kind:
                raise RequestError(
                    f"prompt[{i}]", "prompt must be a text, token ids, a list of texts or a list of token ids"
                )
        return [given] if kind is int else list(given)  # type: ignore[list-item, arg-type]

    @property
    def prompt_only(self) -> bool:
        """Whether no answer is wanted beside the echo: OpenAI's `max_tokens: 0`."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self) -> SamplingParams:
        """Raises RequestError naming the field that is wrong."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of", "best_of other than n is not supported")
        max_tokens = COMPLETIONS_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(
            max_tokens=1 if self.prompt_only else max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )

    def field_named(self, param: str) -> str:
        """What this body calls `param` of the engine's request."""
        named = super().field_named(param)
        return "logprobs" if named == "prompt_logprobs" else named


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/tokenize`: vLLM's, a `prompt` or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for a conversation
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def conversation(self) -> Conversation | None:
        """The conversation, None when it is a prompt.

        Raises:
            RequestError: neither or both are given.
        """
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt", "either prompt or messages must be given")
        if self.messages is None:
            for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise RequestError(name, f"{name} needs messages")
            return None
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/detokenize`: vLLM's."""

    tokens: list[int]
    model: str | None = None
