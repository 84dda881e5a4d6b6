"""The tools of a request: their records, whether this model can be given any, and grammars that force a call.

What a model's template does with tools is found out by rendering it, with and without: templates say
so nowhere else. Knows nothing of tokens, HTTP or of how calls are read from text (`tool_text`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from paceline.errors import RequestError
from paceline.request import Grammar
from paceline.server.tool_text import CLOSE, OPEN, Form, ToolText, tool_text
from paceline.tokenizer import Tokenizer

FormSetting: TypeAlias = Literal["auto", "hermes", "llama3", "none"]

_ARGUMENTS_KEY: dict[Form, str] = {"hermes": "arguments", "llama3": "parameters"}


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: no parameters
    strict: bool | None = None  # arguments must fit the schema; they always do where a call is forced


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """One of `tools`."""

    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a tool."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A `tool_choice` that is one tool."""

    function: FunctionName


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of an earlier turn."""

    name: str
    arguments: str  # JSON


class Called(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """One of an assistant message's `tool_calls`."""

    id: str
    function: CalledFunction
    index: int | None = None  # clients that join a stream's deltas leave it in

    def for_template(self, param: str) -> dict[str, Any]:
        """As chat templates expect it: arguments as an object. Raises RequestError if they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{param}.function.arguments", f"{param}.function.arguments is not the text of a JSON object"
            )
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request wants done with its tools, checked against the model."""

    form: Form
    tools: tuple[Tool, ...]
    choice: ToolChoice  # not "none"
    parallel: bool

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """In OpenAI's shape, as templates take it."""
        shown: list[dict[str, Any]] = []
        for tool in self.tools:
            f = tool.function
            parameters = f.parameters or {"type": "object", "properties": {}}
            described = {} if f.description is None else {"description": f.description}
            shown.append(
                {"type": "function", "function": {"name": f.name, **described, "parameters": parameters}}
            )
        return shown

    def reader(self) -> ToolText:
        """A reader for one answer."""
        return tool_text(self.form, {tool.function.name for tool in self.tools})

    def grammar(self) -> Grammar | None:
        """What forces the calls that are asked for; None when the model is free to call or not."""
        if self.choice == "auto":
            return self._strict_grammar()
        called = self.tools
        if isinstance(self.choice, NamedTool):
            called = tuple(t for t in self.tools if t.function.name == self.choice.function.name)
        body = json.dumps({"anyOf": [self._call_schema(tool) for tool in called]})
        if self.form == "llama3":
            return Grammar("lark", f"%llguidance {{}}\nstart: %json {body}\n")
        several = ' ("\\n" call)*' if self.parallel and self.choice == "required" else ""
        return Grammar(
            "lark",
            f"%llguidance {{}}\nstart: call{several}\n"
            f'call: "{OPEN}\\n" body "\\n{CLOSE}"\n'
            f"body: %json {body}\n",
        )

    def _strict_grammar(self) -> Grammar | None:
        """Any text, but each call must fit its schema; None unless a tool is strict."""
        if not any(tool.function.strict for tool in self.tools):
            return None
        if self.form != "hermes":
            raise RequestError(
                "tools", f"tools: strict needs tool_choice required or a named tool with the {self.form} form"
            )
        body = json.dumps({"anyOf": [self._call_schema(tool) for tool in self.tools]})
        return Grammar(
            "lark",
            "%llguidance {}\nstart: (call)* TEXT\n"
            "TEXT: /(.|\\n)*/\n"
            f'to_call[lazy]: TEXT "{OPEN}"\n'
            f'call: to_call "\\n" body "\\n{CLOSE}"\n'
            f"body: %json {body}\n",
        )

    def _call_schema(self, tool: Tool) -> dict[str, Any]:
        key = _ARGUMENTS_KEY[self.form]
        free = self.choice == "auto" and not tool.function.strict
        empty = (
            {"type": "object"}
            if free
            else {"type": "object", "properties": {}, "additionalProperties": False}
        )
        parameters = {"type": "object"} if free else (tool.function.parameters or empty)
        return {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, key: parameters},
            "required": ["name", key],
            "additionalProperties": False,
        }


class ModelTools:
    """What this model's chat template can do with tools.

    Args:
        setting: how its calls are read; `auto` goes by the template.
    """

    def __init__(self, tokenizer: Tokenizer, setting: FormSetting) -> None:
        plain, with_tools = _probe(tokenizer)
        self._supported = with_tools is not None and with_tools != plain
        self._form: Form | None
        if setting == "auto":
            self._form = _form_of(with_tools or "")
        else:
            self._form = None if setting == "none" else setting

    def use(
        self, tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
    ) -> ToolUse | None:
        """Check a request's tools; None when it has none, or wants none called (they are not shown then).

        Raises:
            RequestError: names the field that is wrong, or says why this model takes no tools.
        """
        if tools is None:
            if choice not in (None, "none"):
                raise RequestError("tool_choice", "tool_choice needs tools")
            if parallel is False:
                raise RequestError("parallel_tool_calls", "parallel_tool_calls needs tools")
            return None
        if not tools:
            raise RequestError("tools", "tools must not be empty")
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise RequestError("tools", "tools: two functions have the same name")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(
                "tool_choice", f"tool_choice names {choice.function.name!r}, which is not among the tools"
            )
        if choice == "none":
            return None
        if not self._supported:
            raise RequestError("tools", "tools: this model's chat template has no place for tools")
        if self._form is None:
            raise RequestError("tools", "tools: how this model writes its calls is not known")
        return ToolUse(self._form, tuple(tools), choice or "auto", parallel is not False)


def _probe(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """The template's text without and with a tool; None where it refuses."""
    tool = {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "probe",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    rendered: list[str | None] = []
    for tools in (None, [tool]):
        try:
            rendered.append(tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools))
        except RequestError:
            rendered.append(None)
    return rendered[0], rendered[1]


def _form_of(with_tools: str) -> Form | None:
    """The form that the template tells its model to write."""
    if OPEN in with_tools:
        return "hermes"
    if '{"name": function name, "parameters"' in with_tools:
        return "llama3"
    return None
