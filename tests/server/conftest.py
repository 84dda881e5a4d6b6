from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tiny_model import tiny_tokenizer, write_tiny_model

from paceline.tokenizer import Tokenizer

HERE = Path(__file__).parent


class Served:
    """A server in its own process, with the fake engine in another."""

    def __init__(self, folder: Path, *flags: str, own_group: bool = False) -> None:
        self._journal = folder / "journal"
        self._journal.touch()
        model = write_tiny_model(folder / "tiny")
        environment = os.environ | {
            "PYTHONPATH": str(HERE),
            "FAKE_JOURNAL": str(self._journal),
            "HF_HUB_OFFLINE": "1",
        }
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(HERE / "serve_fake.py"), "--model", str(model)),
                *("--served-model-name", "tiny", "--port", "0", *flags),
            ],
            env=environment,
            process_group=0 if own_group else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.greeting = self.process.stdout.readline() + self.process.stdout.readline()
        self.greeting += self.process.stdout.readline()
        match = re.search(r"http://[^/ ]+", self.greeting)
        if match is None:
            raise AssertionError(f"the server did not start: {self.process.communicate()[1]}")
        self.url = match[0]
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def engine_pid(self) -> int:
        """The process id of its engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [pid] = (
            int(c) for c in children if b"paceline.engine.process" in Path(f"/proc/{c}/cmdline").read_bytes()
        )
        return pid

    def journal(self) -> list[str]:
        """What the fake engine wrote."""
        return self._journal.read_text().splitlines()

    def stop(self) -> tuple[int, str]:
        """End it as Ctrl-C would; returns the exit code and what it logged."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, stderr = self.process.communicate(timeout=20)
        return self.process.returncode, stderr


def eventually(condition: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it alive."""
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    code, stderr = server.stop()
    assert code == 0, stderr
    assert "Traceback" not in stderr


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers with other flags, or to be killed."""
    started: list[Served] = []

    def start(*flags: str, own_group: bool = False) -> Served:
        started.append(Served(tmp_path, *flags, own_group=own_group))
        return started[-1]

    yield start
    for server in started:
        server.stop()
