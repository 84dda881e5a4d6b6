"""Flags made from the settings' dataclasses, and errors that suggest the flag one meant."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

SHORTEST_COLUMN = 28


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults, except where the help text tells them; leaves the examples' line ends alone."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=SHORTEST_COLUMN)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_value = bool(action.option_strings) and action.nargs != 0
        if not has_value or action.default in (None, argparse.SUPPRESS, []):
            return action.help
        return f"{action.help} (default: {'%(default)s'})"


class Parser(argparse.ArgumentParser):
    """Abbreviations are refused, and an unknown flag is answered with the nearest known one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **settings)

    def refuse(self, unknown: list[str]) -> NoReturn:
        """End with a usage error about the first argument that nobody took."""
        flag = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self.error(f"unrecognized argument: {unknown[0]}{hint}")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may hold."""

    type: type  # bool, int, float or str
    optional: bool  # or None


def kinds_of(config: type[Any]) -> dict[str, Kind]:
    """The fields of a settings' dataclass, in order, and what they may hold."""
    hints = typing.get_type_hints(config)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(config)}


def flag_of(name: str) -> str:
    """How the command line writes a setting."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def add_flags(
    parser: argparse.ArgumentParser,
    config: type[Any],
    *,
    but: Collection[str] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """One flag per field of the dataclass `config`: `max_queue: int` becomes `--max-queue N`.

    A bool becomes `--x` and `--no-x`. Help texts and choices are the fields' own. A flag that is not
    given leaves no attribute behind: another source may have the value.

    Args:
        but: fields that get none.
        defaults: what to say of those whose default is another one here.
    """
    kinds = kinds_of(config)
    group = parser.add_argument_group(_title(config))
    for field in dataclasses.fields(config):
        if field.name in but:
            continue
        kind = kinds[field.name].type
        settings: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": help_of(field, defaults.get(field.name)),
        }
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= {"type": kind, "choices": field.metadata.get("choices")}
            if not settings["choices"]:
                plain = {int: "N", float: "X", str: "TEXT"}[kind]
                settings["metavar"] = field.metadata.get("metavar", plain)
        group.add_argument("--" + field.name.replace("_", "-"), **settings)


def help_of(field: dataclasses.Field[Any], default: str | None = None) -> str:
    """A field's help text for argparse, with its default, or with what is said instead."""
    text: str = field.metadata["help"]
    if default is not None or field.default is not None:
        text += f" (default: {field.default if default is None else default})"
    return text.replace("%", "%%")


def _kind(hint: Any) -> Kind:
    """The plain type of a field: `int` of `int | None`, `str` of a Literal of strings."""
    optional = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    if optional:
        [hint] = (t for t in typing.get_args(hint) if t is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        hint = type(typing.get_args(hint)[0])
    assert isinstance(hint, type)
    return Kind(hint, optional)


def _title(config: type[Any]) -> str:
    return {"EngineConfig": "engine", "ServerConfig": "server"}[config.__name__]
