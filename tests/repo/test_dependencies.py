"""pyproject.toml asks for what the code imports: nothing more, nothing less."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BEHIND_UVICORN = {"httptools"}  # uvicorn's parser class, which ours derives from, imports it
BEHIND_TRANSFORMERS = {"accelerate"}  # imported there to read GGUF models
TOOLS = {
    "import-linter",
    "mypy",
    "pytest-timeout",
    "ruff",
    "schemathesis",
    "types-pyyaml",
}  # run, or loaded as a plugin
BENCHMARKS_OWN = {"llama-cpp-python", "llama-cpp"}  # one package; the second name where it is absent


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def imported(*folders: str) -> set[str]:
    """Distributions that the code in these folders imports from, our own and Python's left out."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    ours = {"paceline"}
    if folders != ("src",):  # helpers of tests and benchmarks are imported by their bare names
        ours |= {path.stem for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    modules = {module for path in paths for module in imported_modules(path)}
    owners = importlib.metadata.packages_distributions()
    return {
        normal(owners[module][0] if module in owners else module)
        for module in modules - ours - set(sys.stdlib_module_names)
    }


def test_source_imports_exactly_the_dependencies() -> None:
    asked = project()
    wanted = names(asked["dependencies"]) | names(asked["optional-dependencies"]["bench"])
    assert imported("src") | BEHIND_UVICORN == wanted


def test_tests_import_exactly_the_dev_dependencies() -> None:
    runtime = names(project()["dependencies"])
    development = names(project()["optional-dependencies"]["dev"])
    assert imported("tests") - runtime == development - TOOLS - BEHIND_TRANSFORMERS


def test_benchmarks_and_docs_import_nothing_else() -> None:
    asked = project()
    known = names(asked["dependencies"]) | names(asked["optional-dependencies"]["dev"])
    assert imported("benchmarks", "docs") - known <= BENCHMARKS_OWN


@pytest.mark.parametrize("extra", ["dependencies", "bench", "dev"])
def test_no_requirement_has_an_upper_bound(extra: str) -> None:
    """An upper bound would fight with the pins of whatever Paceline is installed beside."""
    asked = project()
    requirements = asked["dependencies"] if extra == "dependencies" else asked["optional-dependencies"][extra]
    assert [r for r in requirements if re.search(r"<|==|~=", r)] == []


def test_the_package_holds_all_its_files() -> None:
    """What is not Python must be named, or a wheel leaves it behind and only a checkout works."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package = ROOT / "src" / "paceline"
    named = {
        path
        for pattern in settings["tool"]["setuptools"]["package-data"]["paceline"]
        for path in package.glob(pattern)
    }
    kept = {
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".py" and not {"__pycache__", ".mypy_cache"} & {*path.parts}
    }
    assert named == kept
