"""Reads the JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file.

    Raises:
        CheckpointError: the file holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, got {type(value).__name__}")
    return value
