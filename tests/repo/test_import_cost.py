"""What a fresh interpreter has loaded: the command line answers at once, the HTTP process stays small."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "llvmlite", "transformers", "gguf")


def loaded_after(statement: str, *modules: str) -> list[str]:
    """Which of `modules` a new interpreter has loaded once it has run `statement`."""
    script = f"import sys\n{statement}\nprint(*(m for m in {modules!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def test_the_probe_sees_what_is_loaded() -> None:
    assert loaded_after("import paceline.models.rope", *HEAVY) == ["torch"]


def test_importing_the_package_loads_nothing_of_weight() -> None:
    assert loaded_after("import paceline", *HEAVY, "numpy", "msgspec", "asyncio") == []


def test_the_exports_are_there() -> None:
    assert loaded_after("from paceline import SamplingParams; SamplingParams(temperature=0)", *HEAVY) == []
    assert "torch" not in loaded_after("import paceline; dir(paceline)", "torch")


@pytest.mark.parametrize("flags", [["--help"], ["--version"], ["serve", "--help"], ["models", "list"]])
def test_the_command_line_answers_without_torch(flags: list[str]) -> None:
    run = f"from paceline.cli import main\ntry: main({flags!r})\nexcept SystemExit: pass"
    assert loaded_after(run, *HEAVY, "uvicorn") == []


@pytest.mark.parametrize(
    "module", ["paceline.server.main", "paceline.engine.process", "paceline.engine.scheduler"]
)
def test_server_and_scheduler_load_without_torch(module: str) -> None:
    assert loaded_after(f"import {module}", *HEAVY, "numpy") == []
