"""Scripts: what is put before the target, and where it is asked to go on by itself.

A script is a list of *segments*: tokens that are forced, then a turn that the target generates up to its
end-of-turn token. An `ask` turn is the user's side (written by the target, not learned from), an `answer`
turn is the assistant's.

Knows the chat template only through the text that it puts around the turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from paceline.errors import ModelError
from paceline.tokenizer import Tokenizer


class Turn(IntEnum):
    """Who speaks after a segment's forced tokens."""

    ASK = 1
    ANSWER = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """Forced tokens, and the turn that the target then makes."""

    token_ids: tuple[int, ...]
    turn: Turn


@dataclass(frozen=True, slots=True)
class Script:
    """The segments of one conversation, and the kind of task it is."""

    kind: str
    segments: tuple[Segment, ...]


class Template:
    """The tokens around turns, cut out of what the tokenizer's chat template renders.

    Raises:
        ModelError: the template does not render turns verbatim and in order.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        marks = ("QQFIRSTQQ", "QQSECONDQQ", "QQTHIRDQQ")
        messages = [
            {"role": role, "content": mark}
            for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        parts: list[str] = []
        for mark in marks:
            before, found, text = text.partition(mark)
            if not found:
                raise ModelError("the chat template does not render a conversation's turns in order")
            parts.append(before)
        self.opening, self.to_answer, self._to_user, self._closing = (self._encode(p) for p in (*parts, text))
        ends = [t for t in self._to_user[:1] if t in tokenizer.eos_token_ids]
        # The target ends its turns itself, so what follows an answer starts behind its end token.
        self.to_user = self._to_user[len(ends) :]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def task(self, kind: str, prompts: Iterable[str]) -> Script:
        """A conversation whose user turns are given."""
        segments = []
        for i, prompt in enumerate(prompts):
            before = self.to_user if i else self.opening
            segments.append(Segment(before + self._encode(prompt) + self.to_answer, Turn.ANSWER))
        return Script(kind, tuple(segments))

    def open_chat(self, num_turns: int) -> Script:
        """A conversation in which the target writes both sides."""
        segments = []
        for i in range(num_turns):
            before = self.to_user if i else self.opening
            segments.append(Segment(before, Turn.ASK))
            segments.append(Segment(self._after_ask(), Turn.ANSWER))
        return Script("chat", tuple(segments))

    def _after_ask(self) -> tuple[int, ...]:
        """`to_answer` without the end token, which the user's side has written itself."""
        ends = [t for t in self.to_answer[:1] if t in self._tokenizer.eos_token_ids]
        return self.to_answer[len(ends) :]


def decode_answers(tokenizer: Tokenizer, token_ids: Sequence[int], answer: Sequence[bool]) -> list[str]:
    """The text of each run of answer tokens."""
    texts: list[str] = []
    run: list[int] = []
    for token_id, is_answer in zip([*token_ids, 0], [*answer, False], strict=True):
        if is_answer:
            run.append(token_id)
        elif run:
            texts.append(tokenizer.decode(run).strip())
            run = []
    return texts
