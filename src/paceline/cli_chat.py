"""A conversation in the terminal, with the model in this process.

With a terminal on standard input there is a prompt and line editing; without one, every line is a
turn and only the answers are printed. Knows nothing of flags.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.request import SamplingParams

HELP = """\
/reset  forget the conversation
/help   this list
/exit   leave (Ctrl-D does too)
Ctrl-C  stop the answer"""


class Chat:
    """The conversation so far, and how to go on with it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    def run(self) -> None:
        """Talk until the input ends or `/exit`."""
        for line in _lines():
            text = line.strip()
            if text == "/exit":
                return
            if text == "/help":
                print(HELP)
            elif text == "/reset":
                self._messages = list(self._opening)
            elif text.startswith("/") and " " not in text:
                print(f"unknown command {text}; /help lists them", file=sys.stderr)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        """Ask, and print the answer as it comes. An answer that was stopped stays in the conversation."""
        asked = [*self._messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            for delta in self._llm.stream(self._llm.chat_prompt(asked), self._params):
                answer.append(delta.text)
                print(delta.text, end="", flush=True)
        except RequestError as error:
            print(f"{error} (/reset starts over)", file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(" …", end="")
        print()
        self._messages = [*asked, {"role": "assistant", "content": "".join(answer)}]


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
        except EOFError:
            print()
            return
