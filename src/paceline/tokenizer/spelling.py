"""How token ids turn into text, one token at a time.

`tokenizers` decodes whole sequences; a server has one token at a time and must say what each
contributed. Two decoders cover the model families Paceline runs, and both are simple enough to
follow exactly, so that the streamed pieces always add up to the one-shot decoding:

- byte-level (GPT-2, Llama 3, Qwen, SmolLM): a token is bytes, written in an alphabet of 256
  printable characters; the text is the bytes, each ill-formed sequence shown as U+FFFD;
- SentencePiece with byte fallback (Llama 2, Mistral): a token is text with U+2581 for a space, or
  one byte; a run of byte tokens is text if the whole of it is UTF-8, else U+FFFD for each byte.

Does not know of requests or stop strings.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from paceline.errors import UnsupportedModelError

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_FALLBACK = ["Replace", "ByteFallback", "Fuse"]


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: character -> byte. Printable bytes of Latin-1 stand for
    themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Stream(Protocol):
    """The state of one decoding."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these tokens and was not before."""
        ...

    def flush(self) -> str:
        """The rest, now that no token follows. The stream is then as new."""
        ...


class Spelling(Protocol):
    """What each token of a vocabulary stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; empty for an id outside the vocabulary. Maybe half a character."""
        ...

    def stream(self, skip: frozenset[int], continues: bool) -> Stream:
        """A new stream. Tokens in `skip` give nothing; `continues` keeps a leading space."""
        ...


def spelling(decoder: dict[str, Any] | None, id_to_token: Callable[[int], str | None]) -> Spelling:
    """The spelling that a tokenizer's `decoder` (as in tokenizer.json) describes.

    Raises:
        UnsupportedModelError: a decoder of another kind; named.
    """
    decoder = decoder or {"type": "none"}
    steps: Sequence[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelSpelling(id_to_token)
    strip: dict[str, Any] = (
        steps[3] if kinds == [*_BYTE_FALLBACK, "Strip"] else {"content": " ", "start": 0, "stop": 0}
    )
    if (
        kinds[:3] == _BYTE_FALLBACK
        and len(kinds) <= 4
        and steps[0]["pattern"] == {"String": _SPACE}
        and steps[0]["content"] == " "
        and (strip["content"], strip["stop"]) == (" ", 0)
    ):
        return SentencePieceSpelling(id_to_token, strip["start"])
    raise UnsupportedModelError(
        f"tokenizer decoder {' + '.join(kinds)} is not supported; supported: ByteLevel, "
        f"{' + '.join(_BYTE_FALLBACK)} (+ Strip)"
    )


class ByteLevelSpelling:
    """Tokens are bytes."""

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        self._id_to_token = id_to_token
        self._alphabet = byte_alphabet()
        self._known: dict[int, bytes] = {}  # filled as tokens appear: most of a vocabulary never does

    def token_bytes(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._id_to_token(token_id) or ""
            try:
                known = bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, written as it is
                known = token.encode("utf-8")
            self._known[token_id] = known
        return known

    def stream(self, skip: frozenset[int], continues: bool) -> Stream:
        return _ByteLevelStream(self, skip)


class _ByteLevelStream:
    def __init__(self, spelling: ByteLevelSpelling, skip: frozenset[int]) -> None:
        self._spelling = spelling
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        token_bytes, skip = self._spelling.token_bytes, self._skip
        return self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in skip]))

    def flush(self) -> str:
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


class SentencePieceSpelling:
    """Tokens are text, or one byte. Up to `num_stripped` spaces are taken off the beginning."""

    def __init__(self, id_to_token: Callable[[int], str | None], num_stripped: int) -> None:
        self._id_to_token = id_to_token
        self._num_stripped = num_stripped

    def piece(self, token_id: int) -> str | int | None:
        """The token's text, or its byte as a number, or None for an id outside the vocabulary."""
        token = self._id_to_token(token_id)
        if token is None:
            return None
        match = _BYTE_TOKEN.fullmatch(token)
        return int(match[1], 16) if match else token.replace(_SPACE, " ")

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode("utf-8")

    def stream(self, skip: frozenset[int], continues: bool) -> Stream:
        return _SentencePieceStream(self, skip, 0 if continues else self._num_stripped)


class _SentencePieceStream:
    def __init__(self, spelling: SentencePieceSpelling, skip: frozenset[int], num_stripped: int) -> None:
        self._spelling = spelling
        self._skip = skip
        self._num_stripped = num_stripped
        self._to_strip = num_stripped
        self._run = bytearray()  # byte tokens whose run has not ended: a bad byte later would undo them all

    def push(self, token_ids: Iterable[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in self._skip:
                continue
            piece = self._spelling.piece(token_id)
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                parts += (self._end_run(), piece)
        return self._strip("".join(parts))

    def flush(self) -> str:
        rest = self._strip(self._end_run())
        self._to_strip = self._num_stripped
        return rest

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                self._to_strip -= 1
                text = text[1:]
        return text
