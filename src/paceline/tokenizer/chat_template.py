"""Renders a model's Jinja chat template, with the same sandbox, filters and globals as transformers.

Templates come from model repositories and are foreign code: they run in Jinja's immutable sandbox
and see plain data only. Does not know of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from paceline.errors import RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """One or more named templates; `tool_use`, where there is one, is for requests with tools.

    `variables` are the special tokens that templates name (`bos_token`, ...).
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._sources = templates
        self._variables = variables
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def source(self) -> str | None:
        """The template for requests without tools, as the model's files have it."""
        return self._sources.get("default")

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        Keys of a message whose value is None are left out, as in transformers: most templates
        would otherwise print "None".

        Raises:
            RequestError: the template is invalid, or refuses these messages; its own words are given.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
            return template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **variables},
            )
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                "messages", f"the model's chat template is invalid, line {error.lineno}: {error.message}"
            ) from None
        except Exception as error:  # foreign code on foreign data can raise anything
            raise RequestError(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from None

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._sources[name])
        return self._compiled[name]


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; when serving, its body is printed as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's `namespace()` without underscore names, which lead to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self` by name, so that namespace(self=...) works
        self, initial = args[0], dict(*args[1:], **kwargs)
        for name in initial:
            _check_attribute(name)
        Namespace.__init__(self, initial)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace attribute must not begin with an underscore: {name!r}"
        )


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models do not expect."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    strftime_now: Callable[[str], str] = lambda layout: datetime.now().strftime(layout)  # noqa: E731
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": strftime_now,
        "dict": _Dict(),
        "namespace": _PlainNamespace,
    }
    return environment
