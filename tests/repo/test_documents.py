"""README and docs: their commands run, their links lead somewhere, their settings are the code's.

Blocks marked `sh` are run as they stand against a live server with the real default model, except that
`make` only says what it would do and `paceline serve` is only checked for its flags; so are blocks
marked `python`, all those of a file in one process. Other blocks are shown, not run.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from paceline.cli import _parser
from paceline.server.protocol import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
DOCUMENTED_ADDRESS = "http://127.0.0.1:8000"

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)

PREAMBLE = """\
set -eu
make() { command make --dry-run "$@"; }
curl() { command curl --fail --silent --show-error "$@"; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line, with continued lines joined."""
        return [shlex.split(line) for line in self.text.replace("\\\n", " ").splitlines()]

    @property
    def is_serve(self) -> bool:
        """Whether it starts a server, which would never end."""
        return any(words[:2] == ["paceline", "serve"] for words in self.commands)


def blocks(language: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(document, line, match[1], match[2]))
    return [block for block in found if block.language == language]


def anchors(document: Path) -> set[str]:
    """The fragments that its headings have on GitHub."""
    headings = _HEADING.findall(document.read_text(encoding="utf-8"))
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target, fragment in _LINK.findall(document.read_text(encoding="utf-8")):
        linked = (document.parent / target).resolve() if target else document
        assert linked.exists(), f"{target} is not there"
        assert not fragment or fragment in anchors(linked), f"{target} has no heading {fragment}"


def test_settings_are_those_of_the_code() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))
    assert page["SETTINGS"].read_text(encoding="utf-8") == page["render"](), "run `make docs`"


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_every_field_of_the_api_is_described(body: type[msgspec.Struct]) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in body.__struct_fields__ if f"`{name}`" not in page] == []


@pytest.mark.parametrize("block", [b for b in blocks("sh") if b.is_serve], ids=str)
def test_serve_commands_have_flags_that_exist(block: Block) -> None:
    for words in block.commands:
        if words[:2] == ["paceline", "serve"]:
            _, unknown = _parser().parse_known_args(words[1:])
            assert unknown == []


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server on a free port, with the default model and every setting at its default."""
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        assert match is not None, f"the server did not start: exit code {process.wait()}"
        yield match[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


@pytest.mark.model
@pytest.mark.parametrize("block", [b for b in blocks("sh") if not b.is_serve], ids=str)
def test_shell_block_runs(block: Block, address: str) -> None:
    for tool in ("curl", "make"):
        if any(words[:1] == [tool] for words in block.commands) and shutil.which(tool) is None:
            pytest.skip(f"there is no {tool} on this machine")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["sh", "-c", PREAMBLE + block.text.replace(DOCUMENTED_ADDRESS, address)],
        cwd=ROOT,
        env=environment | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout or block.text.startswith("export "), "it printed nothing"


@pytest.mark.model
@pytest.mark.parametrize("document", sorted({b.document for b in blocks("python")}), ids=lambda p: p.name)
def test_python_blocks_run(document: Path, tmp_path: Path) -> None:
    script = "\n".join(block.text for block in blocks("python") if block.document == document)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
