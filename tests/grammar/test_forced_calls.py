"""What the grammars of `tool_choice` and of strict tools let a model write."""

from __future__ import annotations

import pytest

from paceline.errors import RequestError
from paceline.grammar import validate
from paceline.request import Grammar
from paceline.server.tool_text import Form, tool_text
from paceline.server.tools import Function, FunctionName, NamedTool, Tool, ToolChoice, ToolUse
from paceline.tokenizer import Tokenizer
from paceline.worker.grammar import GrammarCompiler

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool(Function("weather", parameters=CITY, strict=True))
CLOCK = Tool(Function("clock"))
FREE = Tool(Function("weather", parameters=CITY))
ONLY_CLOCK = NamedTool(FunctionName("clock"))

W = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
C = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
W3 = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, 272, tokenizer.eos_token_ids)


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    validate(grammar)
    matcher = compiler.matcher(grammar)
    token_ids = tokenizer.encode(text)
    return matcher.advance(token_ids) == len(token_ids) and matcher.may_end


def use(form: Form, choice: ToolChoice, *tools: Tool, parallel: bool = True) -> ToolUse:
    return ToolUse(form, tools or (WEATHER, CLOCK), choice, parallel)


@pytest.mark.parametrize(
    ("tool_use", "text", "taken"),
    [
        (use("hermes", "required"), W, True),
        (use("hermes", "required"), W + "\n" + C, True),
        (use("hermes", "required", parallel=False), W + "\n" + C, False),
        (use("hermes", "required"), "It is sunny.", False),
        (use("hermes", "required"), W.replace('"Rome"', "5"), False),
        (use("hermes", "required"), W.replace("weather", "storm"), False),
        (use("hermes", ONLY_CLOCK), C, True),
        (use("hermes", ONLY_CLOCK), C + "\n" + C, False),
        (use("hermes", ONLY_CLOCK), W, False),
        (use("llama3", "required"), W3, True),
        (use("llama3", "required"), W3 + "; " + W3, False),
        (use("hermes", "auto"), "It is sunny.", True),
        (use("hermes", "auto"), "", True),
        (use("hermes", "auto"), "I look it up.\n" + W, True),
        (use("hermes", "auto"), W + "\n" + C + " done", True),
        (use("hermes", "auto"), "I look it up.\n" + W.replace('"Rome"', "5"), False),
        (use("hermes", "auto"), W + W.replace("weather", "storm"), False),
    ],
)
def test_what_may_be_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, tool_use: ToolUse, text: str, taken: bool
) -> None:
    grammar = tool_use.grammar()
    assert grammar is not None
    assert takes(compiler, tokenizer, grammar, text) == taken


def test_calls_are_free_unless_a_tool_is_strict() -> None:
    assert use("hermes", "auto", FREE, CLOCK).grammar() is None
    with pytest.raises(RequestError, match="strict"):
        use("llama3", "auto").grammar()


@pytest.mark.parametrize(("form", "text"), [("hermes", W), ("llama3", W3)])
def test_what_is_forced_is_read_as_a_call(form: Form, text: str) -> None:
    reader = tool_text(form, {"weather"})
    assert [piece.name for piece in reader.feed(text).calls] == ["weather"]
