"""From deltas to the responses of one request: the same id, time and model in all of them, and the counts.

Chat and text completions differ in their `Shape` (`chat_shape`, `text_shape`), and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from paceline.output import Delta
from paceline.server.responses import PromptTokensDetails, Usage
from paceline.server.speculation import Speculation


class Shape(Protocol):
    """How one endpoint shows the choices of one request; may keep state from piece to piece."""

    id_prefix: ClassVar[str]
    whole_record: ClassVar[type[msgspec.Struct]]
    chunk_record: ClassVar[type[msgspec.Struct]]

    def shown(self, delta: Delta) -> Delta:
        """The delta as far as the client asked for it; what is cut off is not counted either."""
        ...

    def whole(self, delta: Delta) -> msgspec.Struct:
        """A finished choice."""
        ...

    def opening(self, index: int) -> msgspec.Struct | None:
        """What a stream says of a choice before its first token."""
        ...

    def piece(self, delta: Delta) -> msgspec.Struct | None:
        """One choice in one chunk; None while there is nothing to show."""
        ...


def speculation_of(delta: Delta) -> Speculation | UnsetType:
    """What drafting did for a choice, in its last piece, when that was asked for."""
    if delta.speculation is None or delta.finish_reason is None:
        return UNSET
    return Speculation.of(delta.speculation)


class Renderer:
    """Makes the responses of one request."""

    def __init__(
        self, response_id: str, model: str, num_prompt_tokens: int, shape: Shape, usage_always: bool = False
    ) -> None:
        self._id = response_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._shape = shape
        self._usage_always = usage_always
        self._created = int(time.time())
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}  # by index of each prompt's first choice

    def whole(self, deltas: Sequence[Delta]) -> msgspec.Struct:
        """The answer to a request that does not stream; one finished delta per choice."""
        shown = self._counted(deltas)
        return self._record(
            self._shape.whole_record, choices=[self._shape.whole(d) for d in shown], usage=self._usage()
        )

    def openings(self, num_choices: int) -> list[msgspec.Struct]:
        """The chunks before the first token."""
        openings = (self._shape.opening(index) for index in range(num_choices))
        return [self._chunk([opening]) for opening in openings if opening is not None]

    def chunks(self, deltas: Sequence[Delta]) -> list[msgspec.Struct]:
        """One chunk per choice that has something to show."""
        pieces = (self._shape.piece(d) for d in self._counted(deltas))
        return [self._chunk([piece]) for piece in pieces if piece is not None]

    def usage_chunk(self) -> msgspec.Struct:
        """The last chunk, for `include_usage`: counts of everything rendered so far."""
        return self._record(self._shape.chunk_record, choices=[], usage=self._usage())

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._num_cached_tokens.values())),
        )

    def _counted(self, deltas: Sequence[Delta]) -> list[Delta]:
        shown = [self._shape.shown(delta) for delta in deltas]
        for delta in shown:
            self._num_completion_tokens += len(delta.token_ids)
            # Later choices find the prompt that the first one computed; only what the first found was saved.
            if delta.choice == 0:
                self._num_cached_tokens[delta.index] = delta.num_cached_tokens
        return shown

    def _chunk(self, choices: list[msgspec.Struct]) -> msgspec.Struct:
        usage = self._usage() if self._usage_always else None
        return self._record(self._shape.chunk_record, choices=choices, usage=usage)

    def _record(self, kind: type[msgspec.Struct], **fields: Any) -> msgspec.Struct:
        return kind(id=self._id, created=self._created, model=self._model, **fields)
