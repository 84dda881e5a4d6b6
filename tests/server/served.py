"""A server under test, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from processes import engine_of
from tiny_model import write_tiny_model

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
                *("--served-model-name", "tiny", "--port", "0", "--draft", "ngram", "--depth", "2", *flags),
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
        pid = engine_of(self.process.pid)
        assert pid is not None, "there is no engine at the moment"
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
