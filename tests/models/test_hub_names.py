"""Names to paths: local ones, and Hugging Face ids against a fake hub and a hand-laid cache.

`huggingface_hub` reads its settings when it is imported, so each scene runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from paceline.models.hub import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOS: dict[str, dict[str, bytes]] = {
    "tiny/model": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "consolidated.safetensors": b"the same again",
        "original/model.safetensors": b"another format",
        "pytorch_model.bin": b"pickle",
        "README.md": b"words",
    },
    "tiny/files": {"model-q4.gguf": b"GGUF", "model-q8.gguf": b"GGUF"},
    "tiny/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
}
REFUSED = {"tiny/gated": (403, "GatedRepo"), "tiny/private": (401, "RepoNotFound"), "tiny/broken": (500, "")}


class FakeHub(BaseHTTPRequestHandler):
    """The few routes that the client asks for: a model's commit, its tree, and its files."""

    seen: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.split("?")[0].removeprefix("/api/models").strip("/")
        self.seen.append((path, self.headers.get("Authorization")))
        repo, _, rest = ("/".join(path.split("/")[:2]), None, path.split("/")[2:])
        if repo in REFUSED:
            status, code = REFUSED[repo]
            return self.reply(status, b"", {"X-Error-Code": code})
        files = REPOS.get(repo)
        if files is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        if rest[1:2] and rest[1] not in ("main", SHA):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in files.items()
            ]
            return self.reply(200, json.dumps(entries).encode(), {}, with_body)
        if rest[:1] == ["resolve"]:
            body = files.get("/".join(rest[2:]))
            if body is None:
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            headers = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
            return self.reply(200, body, headers, with_body)
        info = {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
        return self.reply(200, json.dumps(info).encode(), {}, with_body)

    def reply(self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True) -> None:
        self.send_response(status)
        for key, value in ({"Content-Type": "application/json"} | headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    FakeHub.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import json, sys
from paceline.errors import PacelineError
from paceline.models.hub import resolve_model
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        answer = {"path": str(resolve_model(name, revision or None, progress=False))}
    except PacelineError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
"""


def resolve_elsewhere(cache: Path, *names: str, **environment: str) -> list[dict[str, str]]:
    """Resolve `names` (`name` or `name@revision`) in a fresh process with its own cache and settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_against_a_fake_hub(hub: str, tmp_path: Path) -> None:
    names = ["tiny/model", "tiny/files:model-q8.gguf", "tiny/files", "tiny/files:no.gguf", "tiny/pickled"]
    names += ["tiny/absent", "tiny/gated", "tiny/private", "tiny/broken", "tiny/model@v9", "tiny/model@main"]
    found = dict(
        zip(names, resolve_elsewhere(tmp_path, *names, HF_ENDPOINT=hub, HF_TOKEN="hf_secret"), strict=True)
    )
    errors = {name: answer.get("error", "") for name, answer in found.items()}

    folder = Path(found["tiny/model"]["path"])
    assert sorted(p.name for p in folder.rglob("*")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert found["tiny/model@main"] == found["tiny/model"]
    assert Path(found["tiny/files:model-q8.gguf"]["path"]).name == "model-q8.gguf"
    assert all(token == "Bearer hf_secret" for _, token in FakeHub.seen)

    for name, kind, words in [
        ("tiny/files", "ModelNotFoundError", "2 GGUF files; name one: tiny/files:model-q4.gguf"),
        ("tiny/files:no.gguf", "ModelNotFoundError", "no such file in this repository"),
        ("tiny/pickled", "UnsupportedModelError", "pickled weights"),
        ("tiny/absent", "ModelNotFoundError", "not found at http://127.0.0.1"),
        ("tiny/gated", "ModelNotFoundError", "gated: accept its terms"),
        ("tiny/private", "ModelNotFoundError", "or private: check the name, or set HF_TOKEN"),
        ("tiny/broken", "ModelNotFoundError", "cannot be reached"),
        ("tiny/model@v9", "ModelNotFoundError", "at revision 'v9': no such revision"),
    ]:
        assert errors[name].startswith(kind), (name, errors[name])
        assert words in errors[name], (name, errors[name])
    assert all("\n" not in error for error in errors.values())


def test_without_a_network(tmp_path: Path) -> None:
    """Port 9 of this machine (discard) refuses connections."""
    (answer,) = resolve_elsewhere(tmp_path, "tiny/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert "not complete in the cache, and http://127.0.0.1:9 cannot be reached" in answer["error"]
    assert "\n" not in answer["error"]


def test_offline_with_a_hand_laid_cache(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--tiny--model"
    snapshot = repo / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SHA)
    for name, body in {"config.json": b"{}", "model.safetensors": b"weights"}.items():
        (snapshot / name).write_bytes(body)
    names = ["tiny/model", f"tiny/model@{SHA}", "tiny/other", "tiny/model@v9", "tiny/model:x.gguf"]
    answers = resolve_elsewhere(tmp_path, *names, HF_HUB_OFFLINE="1")
    assert answers[0] == answers[1] == {"path": str(snapshot)}
    for answer in answers[2:]:
        assert "not complete in the cache, and HF_HUB_OFFLINE is set" in answer["error"]


def test_local_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert resolve_model(str(folder)) == folder
    first = folder / "a.gguf"
    first.touch()
    assert resolve_model(str(folder)) == first
    assert resolve_model(str(first)) == first
    (folder / "b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files .*a\.gguf, b\.gguf"):
        resolve_model(str(folder))
    (folder / "config.json").touch()
    assert resolve_model(str(folder)) == folder
    with pytest.raises(UnsupportedModelError, match=r"config\.json: a model file must be a \.gguf"):
        resolve_model(str(folder / "config.json"))
    with pytest.raises(ModelError, match="revision 'main' needs a Hugging Face id"):
        resolve_model(str(folder), revision="main")


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny" / "model").mkdir(parents=True)
    assert resolve_model("tiny/model") == Path("tiny/model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m", "did you mean smollm2-135m-instruct?"),
        ("SmolLM2-135M-Instruct-", "did you mean smollm2-135m-instruct?"),
        ("zzz", "built-in models: smollm2-135m-instruct"),
        ("./nothing", "./nothing: no such file or folder"),
        ("/no/such/folder", "no such file or folder"),
        ("here/model.gguf", "here/model.gguf: no such file or folder"),
        ("a/b/c", "a/b/c: no such file or folder"),
        ("", "no model ''"),
    ],
)
def test_names_of_nothing(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert words in str(caught.value)
