"""Where settings come from: flags, then `PACELINE_*` variables, then a YAML file, then the defaults.

An unknown key is refused wherever it stands, with the nearest known name; a value of the wrong type is
refused by its setting's name. The result is one frozen `Settings`, and `show` writes it as a file that
`--config` reads. Does not know what any setting means, or how flags are parsed (`cli_flags`).
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from paceline.cli_flags import Kind, flag_of, kinds_of
from paceline.config import TYPE_NAMES, EngineConfig, ServerConfig, Settings
from paceline.errors import ConfigError

T = TypeVar("T")

PREFIX = "PACELINE_"
CONFIG = PREFIX + "CONFIG"  # the variable that stands for --config
OTHER_VARIABLES = frozenset({CONFIG, PREFIX + "CACHE"})  # known, but no settings

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def load(flags: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """The settings of a command. `flags` has an attribute for every flag that was given, and no other.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range, an unreadable file.
    """
    kinds = {**kinds_of(EngineConfig), **kinds_of(ServerConfig)}
    path = getattr(flags, "config", None) or environment.get(CONFIG)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}

    def put(found: Mapping[str, Any], origin_of: Mapping[str, str]) -> None:
        values.update(found)
        origins.update({name: origin_of[name] for name in found})

    if path:
        from_file = _from_file(Path(path), kinds)
        put(from_file, dict.fromkeys(from_file, str(path)))
    put(_from_environment(environment, kinds), {name: _variable(name) for name in kinds})
    given = {name: getattr(flags, name) for name in kinds if hasattr(flags, name)}
    put(given, {name: flag_of(name) for name in kinds})
    return Settings(
        engine=_make(EngineConfig, values, origins),
        server=_make(ServerConfig, values, origins),
        origins=origins,
    )


def show(settings: Settings) -> str:
    """The settings as a YAML file, with the origin of each value beside it. Secrets stay out."""
    lines = []
    for config in (settings.engine, settings.server):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            line = f"{field.name}: {_scalar(value)}"
            if field.metadata.get("secret") and value is not None:
                line = f"# {field.name}: not shown"
            lines.append((line, settings.origins.get(field.name, "default")))
    width = min(48, max(len(line) for line, _ in lines))
    return "\n".join(f"{line:<{width}}  # {origin}" for line, origin in lines) + "\n"


def _scalar(value: object) -> str:
    """A value on one line of YAML."""
    # Only the double-quoted style writes line breaks as escapes.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text: str = yaml.safe_dump(value, allow_unicode=True, width=10**9, default_style=style)
    return text.splitlines()[0]


def _make(config: type[T], values: Mapping[str, Any], origins: Mapping[str, str]) -> T:
    names = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    try:
        return config(**{name: values[name] for name in names if name in values})
    except ConfigError as error:
        # The range check knows the field; where its value was written is what the user has to find.
        origin = origins.get(str(error).split(" ", 1)[0])
        if origin is None or origin.startswith("--") or origin == "MODEL":
            raise
        raise ConfigError(f"{error} ({origin})") from None


def _from_environment(environment: Mapping[str, str], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    names = {_variable(name): name for name in kinds}
    values = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in names:
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, [*names, *OTHER_VARIABLES])}")
        values[names[variable]] = _from_text(variable, text, kinds[names[variable]])
    return values


def _from_text(variable: str, text: str, kind: Kind) -> Any:
    """A variable's value."""
    if not text:
        raise ConfigError(f"{variable} is empty: give it a value or unset it")
    try:
        if kind.type is bool:
            return _WORDS[text.lower()]
        return kind.type(text)
    except (KeyError, ValueError):
        hint = ""
        if text.startswith("tcp://"):
            hint = " (Kubernetes sets it for a service named paceline: set enableServiceLinks to false)"
        raise ConfigError(f"{variable} must be {TYPE_NAMES[kind.type]}, got {text!r}{hint}") from None


def _from_file(path: Path, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ConfigError(f"{path}: unknown key {key!r}{_nearest(name, kinds)}")
        if name in values:
            raise ConfigError(f"{path}: {name} is there twice")
        if not _fits(value, kinds[name]):
            raise ConfigError(f"{path}: {name} must be {TYPE_NAMES[kinds[name].type]}, got {value!r}")
        values[name] = float(value) if kinds[name].type is float and value is not None else value
    return values


def _read(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected settings as 'name: value' lines, got {type(content).__name__}")
    return content


class _Loader(yaml.SafeLoader):
    """The safe loader, which would let the last of two equal keys win; this one refuses them."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is there twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _fits(value: object, kind: Kind) -> bool:
    """Whether YAML read a value of this kind: true is no number, 1 is no text, and a number may be whole."""
    if value is None:
        return kind.optional
    if isinstance(value, bool):
        return kind.type is bool
    return isinstance(value, (int, float) if kind.type is float else kind.type)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
