"""Calibrations on disk: one file for each combination of settings, with what it was measured on inside.

The settings that a user changes to and fro name the file. What a measurement must be made anew for is in it,
and is compared: software, processor, the files of model and draft head. Files are replaced whole, so that
two processes at once leave one of theirs.

Knows nothing of how things are measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from paceline.policy import CostModel, PolicyError

Facts: TypeAlias = Mapping[str, str]

_FILES = ("*.gguf", "*.safetensors", "*.bin", "*.json")


class RefusedError(Exception):
    """What is stored is not used; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a calibration holds for.

    Attributes:
        settings: name the file; `model` and `draft` must be among them.
        facts: must be the same when it is read.
    """

    settings: Facts
    facts: Facts

    def path(self, folder: Path) -> Path:
        """The file in `folder`."""
        digest = hashlib.sha256(json.dumps(sorted(self.settings.items())).encode()).hexdigest()[:12]
        return folder / "calibrations" / f"{_short(self.settings['model'])}-{digest}.json"


def _short(name: str) -> str:
    """A model's name as part of a file's."""
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", Path(name).name)[:60]


def identity_of_files(path: Path) -> str:
    """Names, sizes and times of the files of a model or a draft head, as a short hash.

    Raises:
        OSError: they cannot be looked at.
    """
    files = [path] if path.is_file() else sorted({f for pattern in _FILES for f in path.glob(pattern)})
    found = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


class Stored(NamedTuple):
    """What a file holds for an identity."""

    costs: CostModel
    spread: float | None  # of repeated timings, relative; None: not known


def read(path: Path, identity: Identity) -> Stored | None:
    """What is stored for this identity; None: nothing.

    Raises:
        RefusedError: the file is damaged, or was measured on something else.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}") from None
    try:
        stored = json.loads(text)
        settings, facts, costs = stored["settings"], stored["facts"], stored["costs"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RefusedError(f"{path} is damaged") from None
    for known, wanted in ((settings, identity.settings), (facts, identity.facts)):
        if not isinstance(known, dict):
            raise RefusedError(f"{path} is damaged")
        for name in sorted({*known, *wanted}):
            if known.get(name) != wanted.get(name):
                raise RefusedError(
                    f"{path} is for another {name}: {known.get(name)}, this is {wanted.get(name)}"
                )
    try:
        spread = stored.get("spread")
        if spread is not None and not 0 <= spread < float("inf"):
            raise PolicyError(f"spread must be at least 0, got {spread!r}")
        return Stored(CostModel.from_dict(costs), None if spread is None else float(spread))
    except (PolicyError, TypeError) as error:  # a TypeError: the spread is no number
        raise RefusedError(f"{path} is damaged: {error}") from None


def write(path: Path, identity: Identity, costs: CostModel, spread: float) -> None:
    """Store a calibration in place of what there is.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    content = {
        "settings": identity.settings,
        "facts": identity.facts,
        "spread": spread,
        "costs": costs.to_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".calibration-")
    try:
        with open(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
