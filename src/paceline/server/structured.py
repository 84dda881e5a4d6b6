"""The fields that say what form an answer must have, and the one grammar they come to.

OpenAI's `response_format`, and vLLM's `structured_outputs` and its older `guided_*`. Knows nothing of
compiling or of tokens.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import msgspec

from paceline.errors import RequestError
from paceline.grammar import first_line
from paceline.request import Grammar

MAX_CHOICES = 4096

Schema: TypeAlias = dict[str, Any] | bool | str  # the schema, or its text

_ANY_OBJECT = json.dumps({"type": "object"})


class _Tagged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class TextFormat(_Tagged, frozen=True, tag="text"):
    """Any text."""


class JsonObjectFormat(_Tagged, frozen=True, tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema. `name`, `description` and `strict` change nothing: it is always kept to the letter."""

    name: str
    schema: dict[str, Any] | None = None  # None: any object
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Tagged, frozen=True, tag="json_schema"):
    """What a schema describes."""

    json_schema: NamedSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: one of its fields."""

    json: Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def chosen_grammar(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    guided: dict[str, Any],
) -> tuple[str, Grammar] | None:
    """The grammar that the fields ask for, with the name of the field; None when they ask for nothing.

    Args:
        guided: vLLM's older fields by their names, None where they are absent.

    Raises:
        RequestError: more than one asks, or one is not what it must be.
    """
    found: list[tuple[str, Grammar]] = []
    if isinstance(response_format, JsonObjectFormat):
        found.append(("response_format", Grammar("json", _ANY_OBJECT)))
    elif isinstance(response_format, JsonSchemaFormat):
        found.append(("response_format", _json("response_format", response_format.json_schema.schema)))
    if structured_outputs is not None:
        for name in structured_outputs.__struct_fields__:
            value = getattr(structured_outputs, name)
            if value is not None and (value is not False or name == "json"):
                found.append((param := f"structured_outputs.{name}", _grammar(param, name, value)))
    for param, value in guided.items():
        if value is not None:
            found.append((param, _grammar(param, param.removeprefix("guided_"), value)))
    if len(found) > 1:
        names = ", ".join(param for param, _ in found)
        raise RequestError(found[1][0], f"only one of these may be given: {names}")
    return found[0] if found else None


def _grammar(param: str, kind: str, value: Any) -> Grammar:
    match kind:
        case "json":
            return _json(param, value)
        case "json_object":
            return Grammar("json", _ANY_OBJECT)
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return _choice(param, value)
    return _lark(param, value)


def _json(param: str, schema: Schema | None) -> Grammar:
    if schema is None:
        return Grammar("json", _ANY_OBJECT)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(param, f"{param} is not valid JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(param, f"{param} must be a JSON schema: an object")
    return Grammar("json", json.dumps(schema, ensure_ascii=False))


def _choice(param: str, choices: list[str]) -> Grammar:
    if not choices or len(choices) > MAX_CHOICES:
        raise RequestError(param, f"{param} must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
    if not all(choices):
        raise RequestError(param, f"{param}: a choice must not be empty")
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar("lark", f"start: {alternatives}\n")


def _lark(param: str, source: str) -> Grammar:
    """Lark as it is; GBNF (`root ::= ...`), which vLLM takes too, as Lark."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar("lark", any_to_lark(source))
    except Exception as error:  # the converter's parser raises plain ones
        raise RequestError(param, f"{param} is neither Lark nor GBNF: {first_line(str(error))}") from None
