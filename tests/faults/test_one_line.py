"""What the user did wrong, or the machine lacks, is one clear line and a non-zero exit: no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACELINE = [sys.executable, "-m", "paceline"]
WITHOUT_ROOM = """
import builtins, errno, io, os, sys
{patch}
from paceline.cli import main
sys.exit(main(sys.argv[1:]))
"""
FULL_DISK = """
def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]) if args else None)
import tempfile
tempfile.mkdtemp = full
"""


def fails(*command: str, env: dict[str, str] | None = None) -> str:
    """Run it; returns the one line that it says."""
    ended = subprocess.run(command, env=os.environ | (env or {}), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("paceline: error: ")]
    assert lines == ended.stderr.splitlines()[-1:]
    return lines[0].removeprefix("paceline: error: ")


def test_no_room_for_the_engines_socket(tmp_path: Path) -> None:
    from tiny_model import write_tiny_model

    model = str(write_tiny_model(tmp_path))
    code = WITHOUT_ROOM.format(patch=FULL_DISK)
    said = fails(sys.executable, "-c", code, "serve", model, "--port", "0")
    assert said == "no folder for the engine's socket: No space left on device"


def test_no_room_for_a_model(tmp_path: Path) -> None:
    said = fails(
        *(
            sys.executable,
            "-c",
            WITHOUT_ROOM.format(patch=FULL_DISK),
            "models",
            "pull",
            "smollm2-135m-instruct",
        ),
        env={"PACELINE_CACHE": str(tmp_path)},
    )
    assert "cannot store smollm2-135m-instruct" in said
    assert "No space left on device" in said


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = fails(
        *PACELINE, "models", "pull", "smollm2-135m-instruct", env={"PACELINE_CACHE": f"{tmp_path}/file"}
    )
    assert "cannot store smollm2-135m-instruct" in said
    assert "Not a directory" in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("models",), ("serve", "--print-config")])
def test_an_output_that_is_full(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*PACELINE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (ended.returncode, ended.stderr) == (1, "paceline: error: No space left on device\n")


def test_a_config_file_that_is_a_folder(tmp_path: Path) -> None:
    assert fails(*PACELINE, "serve", "--config", str(tmp_path)).endswith("Is a directory")


def test_a_host_that_is_not_this_machine() -> None:
    assert "cannot listen on 192.0.2.1:0" in fails(*PACELINE, "serve", "--host", "192.0.2.1", "--port", "0")
