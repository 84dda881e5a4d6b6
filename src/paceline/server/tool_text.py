"""Tool calls in a model's text, read as the text comes: what is a call, and what is content.

Two forms are known, by the models that first had them:

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, after any text
             (Hermes, Qwen)
    llama3   {"name": ..., "parameters": {...}} as the whole answer, maybe behind <|python_tag|>, maybe
             several with semicolons between (Llama 3.1 and later)

A call is announced when its name is known; from then on its arguments are passed on as they come, in
the model's own spelling. Text that turns out to be no call is content. How the text was cut into
pieces changes nothing. Knows nothing of tokens, HTTP or response records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

Form: TypeAlias = Literal["hermes", "llama3"]

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Something new of the call `index`; the first piece of a call carries its name."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """What a piece of text came to."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class CallReader:
    """Reads one JSON object, character by character, for its name and the text of its arguments.

    Attributes:
        raw: everything read.
        name: once it is known.
        done: the object is closed.
        broken: it is no JSON object.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.done = self.broken = False
        self._new_arguments: list[str] = []
        self._state: Callable[[str], None] = self._at_start
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """Read up to the end of the object; returns how many characters that were."""
        for i, char in enumerate(text):
            if self.done or self.broken:
                return i
            self.raw += char
            self._state(char)
        return len(text)

    def take_arguments(self) -> str:
        """The text of the arguments that is new since the last call."""
        taken, self._new_arguments = "".join(self._new_arguments), []
        return taken

    def _at_start(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in _WHITESPACE:
            self.broken = True

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin_value(char)
            self._state = self._in_key
        elif char == "}":
            self.done = True
        elif char not in _WHITESPACE + ",":
            self.broken = True

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if self._string_ends(char):
            self._key = self._parsed_value()
            self._state = self._before_value

    def _before_value(self, char: str) -> None:
        if char in _WHITESPACE + ":":
            return
        self._begin_value(char)
        self._state = self._in_value
        self._note_argument(char)

    def _in_value(self, char: str) -> None:
        if not self._in_string and self._depth == 0 and char in _WHITESPACE + ",}":
            self._end_value()  # of a number, true, false or null
            self._before_key(char)
            return
        self._value.append(char)
        self._note_argument(char)
        if self._in_string:
            if self._string_ends(char) and self._depth == 0:
                self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _begin_value(self, char: str) -> None:
        self._value = [char]
        self._in_string, self._escaped = char == '"', False
        self._depth = int(char in "{[")

    def _string_ends(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = self._parsed_value() or None
        self._state = self._before_key

    def _parsed_value(self) -> str:
        try:
            value = json.loads("".join(self._value))
        except ValueError:
            self.broken = True
            return ""
        return value if isinstance(value, str) else ""

    def _note_argument(self, char: str) -> None:
        if self._key in _ARGUMENTS:
            self._new_arguments.append(char)


class _Call:
    """One call on its way, announced or not."""

    def __init__(self, index: int, names: Collection[str] | None) -> None:
        self.reader = CallReader()
        self.announced = False
        self._index = index
        self._names = names  # that may be called; None: any
        self._has_arguments = False

    @property
    def failed(self) -> bool:
        """Whether this is no call: no object, or one without a name that may be called."""
        reader = self.reader
        if self.announced:
            return reader.broken
        strange = self._names is not None and reader.name is not None and reader.name not in self._names
        return reader.broken or strange or (reader.done and reader.name is None)

    def feed(self, text: str, parsed: Parsed) -> int:
        """Read on; returns how many characters belonged to the call."""
        num_read = self.reader.feed(text)
        if self.failed or self.reader.name is None:
            return num_read
        arguments = self.reader.take_arguments()
        self._has_arguments = self._has_arguments or bool(arguments)
        if self.reader.done and not self._has_arguments:
            arguments = "{}"
        if arguments or not self.announced:
            parsed.calls.append(
                CallPiece(self._index, None if self.announced else self.reader.name, arguments)
            )
        self.announced = True
        return num_read


class ToolText(Protocol):
    """One answer's text, read for calls."""

    num_calls: int

    def feed(self, text: str) -> Parsed:
        """What is certain after `text`."""
        ...

    def finish(self) -> Parsed:
        """The rest, now that no text follows."""
        ...


class HermesText:
    """See the module's head."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""  # may be the beginning of a tag, or white space before one
        self._call: _Call | None = None
        self._after_call = False

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._held += text
        while self._held and self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed()
        if self._call is not None and not self._call.announced:
            parsed.content = OPEN + self._call.reader.raw + self._held
        elif self._call is None and not (self.num_calls and self._held.strip(_WHITESPACE) in ("", CLOSE)):
            parsed.content = self._held
        self._held, self._call = "", None
        return parsed

    def _step(self, parsed: Parsed) -> bool:
        """Read on from the held text; whether there is more to do."""
        if self._call is not None:
            self._held = self._held[self._call.feed(self._held, parsed) :]
            if self._call.failed and not self._call.announced:
                parsed.content += OPEN + self._call.reader.raw
                self._call = None
            elif self._call.reader.done or self._call.reader.broken:
                self.num_calls += 1
                self._call, self._after_call = None, True
            return self._call is None
        if self._after_call and (rest := self._without_close()) is not None:
            self._held = rest
            return bool(rest)
        begin = self._held.find(OPEN)
        if begin >= 0:
            parsed.content += self._held[:begin].rstrip(_WHITESPACE)
            self._held = self._held[begin + len(OPEN) :]
            self._call = _Call(self.num_calls, None)
            return True
        end = len(self._held) - _num_held(self._held)
        parsed.content += self._held[:end]
        self._held = self._held[end:]
        self._after_call = self._after_call and not end
        return False

    def _without_close(self) -> str | None:
        """The held text behind the closing tag; "" with the tag incomplete, None without one."""
        stripped = self._held.lstrip(_WHITESPACE)
        if stripped.startswith(CLOSE):
            self._after_call = False
            return stripped[len(CLOSE) :].lstrip(_WHITESPACE)
        return None


def _num_held(text: str) -> int:
    """Characters at the end that may be white space before a tag, or the beginning of one."""
    for tag in (OPEN, CLOSE):
        for num in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:num]):
                return len(text) - len(text[:-num].rstrip(_WHITESPACE))
    return len(text) - len(text.rstrip(_WHITESPACE))


class Llama3Text:
    """See the module's head. `names`: an object that names none of these tools is an answer in JSON."""

    def __init__(self, names: Collection[str]) -> None:
        self.num_calls = 0
        self._names = names
        self._held = ""
        self._call: _Call | None = None
        self._before_call = ""  # white space and the tag, content again should the call be none
        self._plain = False  # from here on all is content

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._held += text
        while self._held and self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        parsed = Parsed()
        if self._call is not None and not self._call.announced:
            parsed.content = self._before_call + self._call.reader.raw
        if not self.num_calls or self._held.strip(_WHITESPACE + ";"):
            parsed.content += self._held
        self._held, self._call = "", None
        return parsed

    def _step(self, parsed: Parsed) -> bool:
        if self._plain:
            parsed.content, self._held = parsed.content + self._held, ""
            return False
        if self._call is not None:
            self._held = self._held[self._call.feed(self._held, parsed) :]
            if self._call.failed and not self._call.announced:
                parsed.content += self._before_call + self._call.reader.raw
                self._call, self._plain = None, True
            elif self._call.reader.done or self._call.reader.broken:
                self.num_calls += 1
                self._call = None
            return self._call is None
        begin = self._held.lstrip(_WHITESPACE + (";" if self.num_calls else ""))
        if not begin or PYTHON_TAG.startswith(begin):
            return False
        begin = begin.removeprefix(PYTHON_TAG).lstrip(_WHITESPACE)
        if begin.startswith("{"):
            self._before_call = self._held[: len(self._held) - len(begin)]
            self._held, self._call = begin, _Call(self.num_calls, self._names)
        elif begin:
            self._plain = True
        return bool(begin)


def tool_text(form: Form, names: Collection[str]) -> ToolText:
    """A reader for one answer of a model that writes its calls in `form`, with tools of these names."""
    return HermesText() if form == "hermes" else Llama3Text(names)
