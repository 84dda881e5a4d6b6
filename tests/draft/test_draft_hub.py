"""Heads by Hugging Face id: pickled ones are fetched too, and only when there is nothing better.

`huggingface_hub` reads its settings when it is imported, hence the fresh process.
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

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOS: dict[str, dict[str, bytes]] = {
    "tiny/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "optimizer.bin": b"more"},
    "tiny/both": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "model.safetensors": b"weights"},
    "tiny/neither": {"config.json": b"{}", "optimizer.bin": b"more"},
}
SCRIPT = """
import sys
from paceline.errors import PacelineError
from paceline.models.hub import resolve_model
for name in sys.argv[1:]:
    try:
        folder = resolve_model(name, progress=False, allow_pickles=True)
        print(*sorted(p.name for p in folder.iterdir()))
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}")
"""


class Hub(BaseHTTPRequestHandler):
    """A model's commit, its tree and its files."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        parts = self.path.split("?")[0].removeprefix("/api/models").strip("/").split("/")
        files, rest = REPOS["/".join(parts[:2])], parts[2:]
        body, tag = b"", SHA
        if rest[:1] == ["resolve"]:
            body = files[rest[2]]
            tag = hashlib.sha1(body).hexdigest()
        elif rest[:1] == ["tree"]:
            entries = [{"type": "file", "path": n, "size": len(b), "oid": SHA} for n, b in files.items()]
            body = json.dumps(entries).encode()
        else:
            names = [{"rfilename": name} for name in files]
            body = json.dumps({"id": "x", "sha": SHA, "siblings": names}).encode()
        self.send_response(200)
        for key, value in {
            "Content-Type": "application/json",
            "X-Repo-Commit": SHA,
            "ETag": f'"{tag}"',
            "Content-Length": str(len(body)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(cache: Path, *names: str, **environment: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_pickled_heads(hub: str, tmp_path: Path) -> None:
    names = ("tiny/pickled", "tiny/both", "tiny/neither")
    online = resolve(tmp_path, *names, HF_ENDPOINT=hub)
    assert online[:2] == ["config.json pytorch_model.bin", "config.json model.safetensors"]
    assert online[2].startswith("UnsupportedModelError: tiny/neither: only pickled weights")
    assert resolve(tmp_path, *names[:2], HF_HUB_OFFLINE="1") == online[:2]
