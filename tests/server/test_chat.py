"""The terminal conversation over the fake engine: what the model is asked, and what is shown."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams, llm
from paceline.cli_chat import Chat

Talk = Callable[..., list[list[tuple[str, str]]]]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Type lines, get the conversations that reached the model, as (role, content)."""
    monkeypatch.setattr(llm, "build", fake_engine.build)
    made = LLM(str(write_tiny_model(tmp_path)))
    asked: list[list[tuple[str, str]]] = []
    encode = made.chat_prompt

    def spy(messages: Any) -> list[int]:
        asked.append([(m["role"], m["content"]) for m in messages])
        return encode(messages)

    monkeypatch.setattr(made, "chat_prompt", spy)

    def type_in(*lines: str, system: str | None = None) -> list[list[tuple[str, str]]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        Chat(made, SamplingParams(max_tokens=500), system).run()
        return asked

    return type_in


def test_the_conversation_goes_on_until_reset(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    asked = talk("one", "", "two", "/reset", "three", "/exit", "never")
    answer = ("assistant", "user\none")
    assert asked == [
        [("user", "one")],
        [("user", "one"), answer, ("user", "two")],
        [("user", "three")],
    ]
    # The fake says its prompt again up to the first end of turn: always the first turn.
    assert capsys.readouterr().out == "user\none\nuser\none\nuser\nthree\n"


def test_the_system_message_survives_a_reset(talk: Talk) -> None:
    asked = talk("one", "/reset", "two", system="be brief")
    assert asked == [[("system", "be brief"), ("user", text)] for text in ("one", "two")]


def test_commands(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk("/help", "/nope") == []
    shown = capsys.readouterr()
    assert "/reset" in shown.out
    assert shown.err == "unknown command /nope; /help lists them\n"


def test_a_turn_that_does_not_fit_is_refused_and_forgotten(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = talk("one", "x" * 5000, "two")
    assert [turn[-1][1][:3] for turn in asked] == ["one", "xxx", "two"]
    assert len(asked[2]) == 3  # the first turn, its answer, and this one
    assert "context of 4096 tokens" in capsys.readouterr().err
