"""Engines that die, hang and come back; how the server ends; readers that do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fault_server import TEXT, Server, close_hard, events_of, eventually

from paceline.server.restarts import Deaths

SLOW = {"prompt": "<|slow|>a", "stream": True}


@pytest.mark.parametrize(
    ("lives", "gives_up"),
    [
        ([0.1, 0.2, 0.3], [False, False, True]),
        ([None, None, None], [False, False, True]),
        ([0.1, 0.2, 99.0, 0.1, None, 9.9], [False, False, False, False, False, True]),
        ([10.0] * 9, [False] * 9),
    ],
)
def test_three_quick_deaths_in_a_row(lives: list[float | None], gives_up: list[bool]) -> None:
    deaths = Deaths(quick_seconds=10.0)
    assert [deaths.note(lived) for lived in lives] == gives_up


def test_three_quick_deaths_end_the_server_with_the_reason(fake: Callable[..., Server]) -> None:
    server = fake()
    with httpx.stream("POST", server.url + TEXT, json={**SLOW, "max_tokens": 3000}) as running:
        lines = running.iter_lines()
        next(lines)
        server.kill_engine()
        assert "killed by SIGKILL" in [line for line in lines if line][-2]
    assert eventually(server.is_healthy)
    server.kill_engine()
    assert eventually(server.is_healthy)
    server.kill_engine()
    assert server.wait() == 1
    assert server.log[-1] == (
        "paceline: error: 3 engines in a row died quickly, the last one so: "
        "the engine process died (killed by SIGKILL)\n"
    )
    assert "Traceback" not in "".join(server.log)


def test_deaths_that_are_not_quick_are_survived(fake: Callable[..., Server]) -> None:
    server = fake("--quick-death-seconds", "0")
    for _ in range(4):
        server.kill_engine()
        assert eventually(server.is_healthy)
    assert server.client.post(TEXT, json={"prompt": "ab"}).status_code == 200


def test_a_model_that_is_gone_when_the_engine_comes_back_ends_the_server(
    fake: Callable[..., Server], tiny_folder_copy: Path
) -> None:
    server = fake("--model", str(tiny_folder_copy))
    (tiny_folder_copy / "refuse").touch()
    server.kill_engine()
    assert server.wait() == 1
    assert "tensor lm_head.weight is missing" in server.log[-1]


def test_a_new_engine_has_its_drafter_again(fake: Callable[..., Server]) -> None:
    server = fake("--quick-death-seconds", "0")

    def speculation() -> str:
        health = server.client.get("/health").json()
        return str(health["speculation"]["status"]) if "speculation" in health else "unknown"

    server.client.post(TEXT, json={"prompt": "<|undraft|>ab"})
    assert eventually(lambda: speculation() == "failed")
    server.kill_engine()
    assert eventually(server.is_healthy)
    assert eventually(lambda: speculation() == "on"), "though nothing has been asked of it yet"
    text = server.client.get("/metrics").text
    assert 'paceline:spec_decode_drafter_failed{model_name="tiny"} 0.0' in text


def test_a_hung_engine_is_noticed(fake: Callable[..., Server]) -> None:
    server = fake("--hang-seconds", "2")
    pid = server.engine_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3)
    assert server.engine_pid() == pid  # it has nothing to do: its silence means nothing
    response = server.client.post(TEXT, json={"prompt": "ab"})
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the engine hangs: no sign of life for 2 s"
    assert eventually(server.is_healthy)
    assert server.engine_pid() != pid


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        super().__init__()
        self._socket = server.open_stream(**SLOW, max_tokens=num_tokens)
        self.raw = self._socket.recv(65536)
        self.start()

    def run(self) -> None:
        while piece := self._socket.recv(65536):
            self.raw += piece

    def events(self) -> list[str]:
        self.join()
        return events_of(self.raw.decode())


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_drain_lets_answers_finish(fake: Callable[..., Server], signum: signal.Signals) -> None:
    server = fake()
    readers = [Reader(server, num_tokens=150) for _ in range(3)]
    server.signal(signum)
    assert eventually(lambda: is_closed(server), within=2)
    for reader in readers:
        *_, last, done = reader.events()
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def is_closed(server: Server) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_a_drain_ends(fake: Callable[..., Server], how: str) -> None:
    server = fake("--drain-seconds", "1" if how == "deadline" else "60")
    reader = Reader(server, num_tokens=3000)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    if how == "second signal":
        time.sleep(0.5)
        server.signal(signal.SIGINT)
    *_, last, done = reader.events()
    assert "the server is shutting down" in last
    assert done == "[DONE]"
    assert server.wait() == 0
    assert time.monotonic() - began < 5


def test_a_drain_does_not_wait_for_somebody_who_does_not_read(fake: Callable[..., Server]) -> None:
    server = fake("--drain-seconds", "0.5")
    unread = server.open_stream(prompt="x" * 8, max_tokens=4000, n=64, logprobs=5)
    assert unread.recv(1)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - began < 10
    unread.close()


def test_a_slow_reader_is_dropped_at_the_bound(fake: Callable[..., Server], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    server = fake("--max-unread-tokens", "2000", env={"FAKE_JOURNAL": str(journal)})
    unread = server.open_stream(prompt="x" * 8, max_tokens=4000, n=64, logprobs=5)

    assert eventually(lambda: "abort" in journal.read_text())
    assert server.client.post(TEXT, json={"prompt": "abc"}).status_code == 200
    raw = b""
    while piece := unread.recv(65536):
        raw += piece
    *texts, last, done = events_of(raw.decode())
    assert json.loads(last)["error"]["code"] == "slow_reader"
    assert "more than 2000 tokens" in last
    assert done == "[DONE]"
    assert all("text" in json.loads(event)["choices"][0] for event in texts)


def test_clients_that_crash_are_forgotten_at_once(fake: Callable[..., Server], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    server = fake(env={"FAKE_JOURNAL": str(journal)})
    connections = [server.open_stream(**SLOW, max_tokens=3000) for _ in range(50)]
    for connection in connections:
        connection.recv(1)
    for connection in connections:
        close_hard(connection)
    assert eventually(lambda: journal.read_text().count("abort") == 50, within=5)
    assert server.client.post(TEXT, json={"prompt": "abc"}).status_code == 200
    assert "Traceback" not in "".join(server.log)
