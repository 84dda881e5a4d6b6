"""How `/v1/completions` shows an answer: text, maybe behind its prompt, and logprobs as parallel lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from paceline.output import Delta
from paceline.request import TokenLogprobs
from paceline.server.render import speculation_of
from paceline.server.responses import CompletionLogprobs, TextChoice, TextResponse
from paceline.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is shown in front of its answers."""

    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TextStyle:
    """What a request wants shown."""

    echoes: Sequence[Echo] | None = None  # one for each prompt
    num_choices: int = 1  # of each prompt
    logprobs: bool = False
    prompt_only: bool = False
    token_names: bool = False  # tokens in logprobs as "token_id:ID"


class TextShape:
    """A `Shape` for one request."""

    id_prefix: ClassVar[str] = "cmpl"
    whole_record: ClassVar[type[msgspec.Struct]] = TextResponse
    chunk_record: ClassVar[type[msgspec.Struct]] = TextResponse

    def __init__(self, tokenizer: Tokenizer, style: TextStyle) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._echoed: set[int] = set()  # choices whose prompt has been shown
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by index, until it is

    def shown(self, delta: Delta) -> Delta:
        """See `Shape`."""
        if not self._style.prompt_only:
            return delta
        return msgspec.structs.replace(
            delta,
            text="",
            token_ids=(),
            logprobs=None if delta.logprobs is None else (),
            text_offsets=None if delta.text_offsets is None else (),
            finish_reason="length" if delta.finish_reason == "stop" else delta.finish_reason,
            stop_reason=None,
        )

    def whole(self, delta: Delta) -> TextChoice:
        """See `Shape`."""
        choice = self.piece(delta)
        assert choice is not None, "a finished choice is always shown"
        return choice

    def opening(self, index: int) -> None:
        """See `Shape`: nothing."""

    def piece(self, delta: Delta) -> TextChoice | None:
        """See `Shape`."""
        echo = self._echo(delta)
        prompt = self._next_prompt(delta, echo) if echo is not None else None
        if echo is not None and prompt is None:
            return None
        if not (prompt is echo is not None or delta.text or delta.logprobs or delta.finish_reason):
            return None
        text, logprobs = delta.text, self._logprobs(delta, 0 if echo is None else len(echo.text))
        if prompt is not None:
            text = prompt.text + text
            if logprobs is not None:
                logprobs = _joined(
                    self._of_prompt(prompt, self._prompt_logprobs.pop(delta.index, [])), logprobs
                )
        return TextChoice(
            delta.index, text, logprobs, delta.finish_reason, delta.stop_reason, speculation_of(delta)
        )

    def _echo(self, delta: Delta) -> Echo | None:
        echoes = self._style.echoes
        return None if echoes is None else echoes[delta.index // self._style.num_choices]

    def _next_prompt(self, delta: Delta, echo: Echo) -> Echo | None:
        """What to show of the prompt now: nothing once it was shown, None until its logprobs are there."""
        if delta.index in self._echoed:
            return Echo("", ())
        if self._style.logprobs:
            found = self._prompt_logprobs.setdefault(delta.index, [])
            found += delta.prompt_logprobs or ()
            if len(found) < len(echo.token_ids) - 1 and delta.finish_reason is None:
                return None
        self._echoed.add(delta.index)
        return echo

    def _logprobs(self, delta: Delta, prompt_chars: int) -> CompletionLogprobs | None:
        if not self._style.logprobs:
            return None
        positions = list(zip(delta.token_ids, delta.logprobs or (), strict=True))
        return CompletionLogprobs(
            text_offset=[prompt_chars + offset for offset in delta.text_offsets or ()],
            token_logprobs=[position.logprob for _, position in positions],
            tokens=[self._text(token_id) for token_id, _ in positions],
            top_logprobs=[self._top(token_id, position) for token_id, position in positions],
        )

    def _of_prompt(self, echo: Echo, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The prompt's part: its first token follows nothing and has no logprob."""
        if not echo.token_ids:
            return CompletionLogprobs([], [], [], [])
        reading, offsets, num_chars = IncrementalDetokenizer(self._tokenizer), list[int](), 0
        for token_id in echo.token_ids:
            offsets.append(num_chars)
            num_chars += len(reading.push([token_id]))
        rest = list(zip(echo.token_ids[1:], logprobs, strict=True))
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None, *(position.logprob for _, position in rest)],
            tokens=[self._text(token_id) for token_id in echo.token_ids],
            top_logprobs=[None, *(self._top(token_id, position) for token_id, position in rest)],
        )

    def _top(self, token_id: int, position: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that was; of several with the same text the likeliest."""
        top: dict[str, float] = {}
        for other, logprob in zip(position.top_ids, position.top_logprobs, strict=True):
            top.setdefault(self._text(other), logprob)
        top.setdefault(self._text(token_id), position.logprob)
        return top

    def _text(self, token_id: int) -> str:
        if self._style.token_names:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _joined(prompt: CompletionLogprobs, answer: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        prompt.text_offset + answer.text_offset,
        prompt.token_logprobs + answer.token_logprobs,
        prompt.tokens + answer.tokens,
        prompt.top_logprobs + answer.top_logprobs,
    )
