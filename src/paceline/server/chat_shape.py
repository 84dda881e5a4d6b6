"""How `/v1/chat/completions` shows an answer: messages, their pieces, and tool calls read from the text."""

from __future__ import annotations

import secrets
from typing import ClassVar

import msgspec
from msgspec import UNSET

from paceline.output import Delta
from paceline.request import TokenLogprobs
from paceline.server.render import speculation_of
from paceline.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
    ChatTokenLogprob,
    FinishReason,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from paceline.server.tool_text import CallPiece, ToolText
from paceline.server.tools import ToolUse
from paceline.tokenizer import Tokenizer


class _Reading:
    """One choice's text, read for tool calls."""

    def __init__(self, reader: ToolText, parallel: bool) -> None:
        self._reader = reader
        self._parallel = parallel
        self.any_calls = False

    def read(self, delta: Delta) -> tuple[str, list[CallPiece]]:
        """The content and the pieces of calls in a delta, in order."""
        parsed = self._reader.feed(delta.text)
        content, calls = parsed.content, parsed.calls
        if delta.finish_reason is not None:
            rest = self._reader.finish()
            content, calls = content + rest.content, calls + rest.calls
        if not self._parallel:
            calls = [piece for piece in calls if piece.index == 0]
        self.any_calls = self.any_calls or bool(calls)
        return content, calls


class ChatShape:
    """A `Shape` for one request."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole_record: ClassVar[type[msgspec.Struct]] = ChatResponse
    chunk_record: ClassVar[type[msgspec.Struct]] = ChatChunk

    def __init__(self, tokenizer: Tokenizer, tool_use: ToolUse | None) -> None:
        self._tokenizer = tokenizer
        self._tool_use = tool_use
        self._readings: dict[int, _Reading] = {}  # by index of the choice

    def shown(self, delta: Delta) -> Delta:
        """See `Shape`."""
        return delta

    def whole(self, delta: Delta) -> ChatChoice:
        """See `Shape`."""
        content, pieces = self._read(delta)
        calls = _joined(pieces)
        message = AssistantMessage(content or None if calls else content, tool_calls=calls or UNSET)
        return ChatChoice(
            delta.index,
            message,
            self._logprobs(delta),
            self._finish_reason(delta),
            delta.stop_reason,
            speculation_of(delta),
        )

    def opening(self, index: int) -> ChatChunkChoice:
        """See `Shape`."""
        return ChatChunkChoice(index, ChatDelta("assistant", ""), None, None, None)

    def piece(self, delta: Delta) -> ChatChunkChoice | None:
        """See `Shape`."""
        content, pieces = self._read(delta)
        if not (content or pieces or delta.logprobs or delta.finish_reason):
            return None
        shown = ChatDelta(content=content or None, tool_calls=_deltas(pieces) if pieces else None)
        return ChatChunkChoice(
            delta.index,
            shown,
            self._logprobs(delta),
            self._finish_reason(delta),
            delta.stop_reason,
            speculation_of(delta),
        )

    def _read(self, delta: Delta) -> tuple[str, list[CallPiece]]:
        if self._tool_use is None:
            return delta.text, []
        if delta.index not in self._readings:
            self._readings[delta.index] = _Reading(self._tool_use.reader(), self._tool_use.parallel)
        return self._readings[delta.index].read(delta)

    def _finish_reason(self, delta: Delta) -> FinishReason | None:
        reading = self._readings.get(delta.index)
        called = reading is not None and reading.any_calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

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


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _joined(pieces: list[CallPiece]) -> list[ToolCall]:
    """Whole calls from all their pieces."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        names[piece.index] = piece.name or names[piece.index]
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return [ToolCall(_new_id(), FunctionCall(name, arguments[index])) for index, name in names.items()]


def _deltas(pieces: list[CallPiece]) -> list[ToolCallDelta]:
    """One delta for each piece; the first of a call gives it its id."""
    return [
        ToolCallDelta(piece.index, FunctionCallDelta(piece.arguments))
        if piece.name is None
        else ToolCallDelta(piece.index, FunctionCallDelta(piece.arguments, piece.name), _new_id(), "function")
        for piece in pieces
    ]
