"""The Makefile, as far as it can be tried without installing anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """make in `folder`, as typed in a new shell: nothing of a make around this test run reaches it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with blanks in its path that holds the Makefile, and no environment yet."""
    folder = tmp_path / "a new clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def fake_python(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_help_lists_every_target(copy: Path) -> None:
    listed = set(re.findall(r"^  ([\w-]+) ", make(copy).stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony[1].split())


def python_without_pip(folder: Path, name: str) -> Path:
    """This Python, except that its environments come without pip: putting it there takes most of the time."""
    script = f'[ "$1 $2" != "-m venv" ] || set -- "$@" --without-pip; exec "{sys.executable}" "$@"'
    return fake_python(folder, name, script)


def test_an_environment_is_made_once(copy: Path) -> None:
    first = make(copy, ".venv/.created", f"PYTHON={python_without_pip(copy, 'python')}")
    assert first.returncode == 0, first.stderr
    assert (copy / ".venv" / "bin" / "python").exists()
    again = make(copy, ".venv/.created", "PYTHON=/nowhere")
    assert (again.returncode, again.stderr) == (0, "")


def test_a_python_that_is_too_old_is_refused(copy: Path) -> None:
    old = fake_python(copy, "old python", "exit 1")
    refused = make(copy, "serve", f"PYTHON={old}")
    assert refused.returncode != 0
    assert f"PYTHON={old} is not a Python of 3.11 or newer" in refused.stderr
    assert not (copy / ".venv").exists()


def test_a_broken_python_is_passed_over(copy: Path) -> None:
    """As with version managers, whose `python3.11` may be a script that only complains."""
    folder = copy / "bin"
    folder.mkdir()
    fake_python(folder, "python3.11", "echo not installed >&2; exit 127")
    python_without_pip(folder, "python3")
    made = make(copy, ".venv/.created", PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert made.returncode == 0, made.stderr
    assert (copy / ".venv" / "bin" / "python").exists()


def test_a_python_without_venv_is_explained(copy: Path) -> None:
    bare = fake_python(copy, "bare", f'[ "$1" = -m ] && exit 1; exec "{sys.executable}" "$@"')
    refused = make(copy, ".venv/.created", f"PYTHON={bare}")
    assert refused.returncode != 0
    assert "python3-venv" in refused.stderr
    assert not (copy / ".venv").exists()


def test_serve_passes_its_variables_on(copy: Path) -> None:
    shown = make(copy, "-n", "serve", "PORT=9001", "MODEL=./my model.gguf", "ARGS=--threads 2").stdout
    assert shown.rstrip().endswith(
        'paceline serve "./my model.gguf" --host "127.0.0.1" --port "9001" --threads 2'
    )
