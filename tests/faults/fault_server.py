"""`paceline serve` in its own process, and what a hostile world does to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from processes import engine_of

FAKES = Path(__file__).parents[1] / "server"
REAL = ("-m", "paceline", "serve")
TEXT = "/v1/completions"


def eventually(condition: Callable[[], Any], within: float = 10.0, every: float = 0.02) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every)
    return bool(condition())


class Server:
    """A running server. Its log is read all the time, so that it never waits for us."""

    def __init__(self, *command: str, env: dict[str, str] | None = None, key: str | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command, "--port", "0"],
            env=os.environ | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._idle_at = 0.0  # when an engine last said that it has no request and no page is held
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        greeting = self.process.stdout.readline()
        match = re.search(r"http://([\w.]+):(\d+)", greeting)
        if match is None:
            self.wait()
            raise AssertionError(f"the server did not start: {''.join(self.log)}")
        self.url, self.host, self.port = match[0], match[1], int(match[2])
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.Client(base_url=self.url, timeout=300, headers=headers)

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)
            if "SchedulerStats(" in line and self.is_idle():
                self._idle_at = time.monotonic()

    def engine_pid(self) -> int | None:
        """The process id of its engine, if there is one at the moment."""
        return engine_of(self.process.pid)

    def kill_engine(self) -> None:
        """Kill its engine, and wait until there is another one, or the server ends."""
        pid = self.engine_pid()
        assert pid is not None, "there is no engine at the moment"
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: self.process.poll() is not None or self.engine_pid() not in (None, pid))

    def is_healthy(self) -> bool:
        return self.client.get("/health").status_code == 200

    def stats(self) -> dict[str, int]:
        """The engine's last numbers; the server logs them when it is started with --log-level debug."""
        for line in reversed(self.log):
            if "SchedulerStats(" in line:
                return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", line)}
        return {}

    def num_requests(self) -> int:
        """Running and waiting, as the engine last said."""
        stats = self.stats()
        return stats.get("num_running", 0) + stats.get("num_waiting", 0)

    def is_idle(self) -> bool:
        """No request, no page held."""
        stats = self.stats()
        return bool(stats) and not (stats["num_running"] or stats["num_waiting"] or stats["num_pages_used"])

    def seconds_to_idle(self, since: float, within: float = 30.0) -> float:
        """Seconds from `since`, when it was busy, until the engine was idle; it says so at once."""
        assert eventually(lambda: self._idle_at > since, within), self.stats()
        return self._idle_at - since

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait(self, timeout: float = 30) -> int:
        """The exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def stop(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()

    def open_stream(self, **fields: Any) -> socket.socket:
        """A streaming request on a plain socket."""
        body = json.dumps({"max_tokens": 64, "stream": True, "ignore_eos": True, **fields}).encode()
        connection = socket.create_connection((self.host, self.port), timeout=120)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection


def fake(*flags: str, model: Path, **more: Any) -> Server:
    """A server on the fake engine of tests/server."""
    path = os.pathsep.join([str(FAKES), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more.pop("env", {})}
    tiny = ("--model", str(model), "--served-model-name", "tiny", "--draft", "ngram")
    return Server(str(FAKES / "serve_fake.py"), *tiny, *flags, env=env, **more)


def real(*flags: str) -> Server:
    """A server on the real engine and the default model."""
    return Server(*REAL, "--debug", "--log-level", "debug", *flags)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """End the server afterwards."""
    try:
        yield server
    finally:
        server.client.close()
        server.stop()


def close_hard(connection: socket.socket) -> None:
    """Close with a reset, as a client that has crashed does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def events_of(raw: str) -> list[str]:
    """The data of the events of a whole stream."""
    return [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
