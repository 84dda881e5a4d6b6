"""Tool calls in text: the two forms, whatever the pieces the text comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.tool_text import Form, tool_text

NAMES = ("f", "get_weather")
Calls = list[tuple[str, str]]  # names and arguments


def read(form: Form, text: str, cuts: list[int] | None = None) -> tuple[str, Calls]:
    """The content and the calls, read in pieces that end at `cuts`."""
    reader = tool_text(form, NAMES)
    content, calls = "", list[list[str]]()
    edges = sorted({0, len(text), *(c for c in cuts or () if c < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    for parsed in (*map(reader.feed, pieces), reader.finish()):
        content += parsed.content
        for piece in parsed.calls:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls]


ARGUMENTS = st.dictionaries(
    st.text(max_size=3),
    st.recursive(st.text('<>/{}"\\,: ab', max_size=12) | st.integers() | st.none() | st.booleans(), st.lists),
    max_size=3,
).map(json.dumps)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 400), max_size=40)
SPACE = st.sampled_from(["", "\n", " "])


@given(
    calls=CALLS,
    content=st.text("a <to\n", max_size=12).map(str.strip),
    space=SPACE,
    cuts=CUTS,
    late=st.booleans(),
)
def test_hermes(calls: Calls, content: str, space: str, cuts: list[int], late: bool) -> None:
    text = content + "\n"
    for name, arguments in calls:
        members = [f'"name": "{name}"', f'"arguments": {arguments}']
        body = "{" + ", ".join(reversed(members) if late else members) + "}"
        text += f"<tool_call>{space}{body}{space}</tool_call>{space}"
    assert read("hermes", text, cuts) == (content, calls)


@given(calls=CALLS, tag=st.sampled_from(["", "<|python_tag|>"]), space=SPACE, cuts=CUTS)
def test_llama3(calls: Calls, tag: str, space: str, cuts: list[int]) -> None:
    body = f";{space}".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)
    assert read("llama3", space + tag + body + space, cuts) == ("", calls)


@given(
    text=st.text('<tool_call>/{}"name: f\n', max_size=60),
    cuts=CUTS,
    form=st.sampled_from(["hermes", "llama3"]),
)
def test_any_text_is_read_alike_in_any_pieces(text: str, cuts: list[int], form: Form) -> None:
    assert read(form, text, cuts) == read(form, text)


@given(text=st.text("abc {}<>|\n", max_size=60), cuts=CUTS)
def test_text_without_calls_is_left_as_it_is(text: str, cuts: list[int]) -> None:
    assert read("hermes", text, cuts) == (text, [])
    assert read("llama3", text, cuts) == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>nonsense</tool_call> x"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"na'),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"a": {"name": "f"}} and more'),
        ("llama3", 'See: {"name": "f", "parameters": {}}'),
    ],
)
def test_what_is_no_call_is_content(form: Form, text: str) -> None:
    assert read(form, text) == (text, [])


def test_arguments_that_max_tokens_cut_short_are_given_as_far_as_they_came() -> None:
    assert read("hermes", '<tool_call>{"name": "f", "arguments": {"a') == ("", [("f", '{"a')])


def test_no_arguments_are_an_empty_object() -> None:
    assert read("llama3", '{"name": "f"}') == ("", [("f", "{}")])
