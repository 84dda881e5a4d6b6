"""What is done to the real server on the real model; the numbers are the caller's.

Each returns its figures, for `benchmarks/results/long.json`, and asserts what must be true at any number.
"""

from __future__ import annotations

import json
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from fault_server import TEXT, Server, close_hard, eventually
from processes import resident_bytes

LOADING = 120.0  # seconds that a model may take, on a busy machine


def hard_closes(server: Server, num: int, at_once: int = 20) -> dict[str, Any]:
    """Clients that crash in mid-stream leave nothing behind."""

    def crash(i: int) -> float:
        connection = server.open_stream(prompt=f"Story number {i}:", max_tokens=2000)
        assert connection.recv(1)
        before = time.monotonic()
        close_hard(connection)
        return before

    with ThreadPoolExecutor(at_once) as pool:
        last = max(pool.map(crash, range(num)))
    seconds = server.seconds_to_idle(last)
    check_pages(server)
    return {"num_closed": num, "seconds_to_idle": round(seconds, 3)}


def leaves(server: Server, num: int, streams: bool) -> dict[str, Any]:
    """Clients that hang up, one at a time, in the middle of an answer: how many more tokens it gets.

    Who streams has read all tokens so far; for who waits for the whole answer it is a matter of time.
    """
    tokens_after, seconds = [], []
    for _ in range(num):
        generated = server.stats().get("num_generated_tokens", 0)
        began = time.monotonic()
        connection = server.open_stream(prompt="Once", max_tokens=4000, stream=streams)
        read = b""
        while streams and read.count(b"data: ") < 20:
            read += connection.recv(65536)
        if not streams:
            time.sleep(0.5)
        left = time.monotonic()
        close_hard(connection)
        seconds.append(server.seconds_to_idle(left))
        generated = server.stats()["num_generated_tokens"] - generated
        if streams:
            tokens_after.append(generated - read.count(b"data: "))
        else:
            tokens_after.append(round(generated * seconds[-1] / (left - began + seconds[-1])))
    assert generated < 4000
    check_pages(server)
    return {
        "num_left": num,
        "median_tokens_after": statistics.median(tokens_after),
        "most_tokens_after": max(tokens_after),
        "median_ms_to_idle": round(1000 * statistics.median(seconds), 1),
        "most_ms_to_idle": round(1000 * max(seconds), 1),
    }


def check_pages(server: Server) -> None:
    """With --debug an engine proves its page table when a request leaves it idle, and dies if it is wrong."""
    restarts = sum("starting another engine" in line for line in server.log)
    answer = server.client.post(TEXT, json={"prompt": "The end.", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert eventually(server.is_idle)
    assert server.is_healthy()
    assert sum("starting another engine" in line for line in server.log) == restarts


class Load:
    """Threads that ask for answers all the time, and sort what they get."""

    def __init__(self, server: Server, num_threads: int, streams: bool) -> None:
        self.outcomes: Counter[str] = Counter()
        self._server = server
        self._streams = streams
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for_answers(self) -> None:
        """Until one has come since now: then others are under way, of every age."""
        before = self.outcomes["answered"]
        assert eventually(lambda: self.outcomes["answered"] > before, within=LOADING), self.outcomes

    def _ask(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": self._streams}
        with httpx.Client(base_url=self._server.url, timeout=LOADING) as client:
            while not self._stopping.is_set():
                try:
                    response = client.post(TEXT, json=body)
                except httpx.HTTPError as error:
                    self.outcomes[f"unanswered: {error!r}"] += 1
                    continue
                self.outcomes[_outcome(response, self._streams)] += 1
                if response.status_code == 503:
                    self._stopping.wait(0.5)


def _outcome(response: httpx.Response, streams: bool) -> str:
    if response.status_code == 503 and "retry-after" in response.headers:
        return "503"
    if response.status_code != 200:
        return f"unexpected: {response.status_code} {response.text}"
    if not streams:
        return "answered" if response.json()["usage"]["completion_tokens"] == 60 else "cut short"
    if not response.text.endswith("data: [DONE]\n\n"):
        return "stream without an end"
    last = json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))
    if "error" in last:
        return "error event"
    return "answered" if last["choices"][0]["finish_reason"] == "length" else "cut short"


def engine_kills(server: Server, num: int, streams: bool, num_threads: int = 8) -> dict[str, Any]:
    """Whatever happens to engines, every request is answered, and the last engine is as good as the first."""
    load = Load(server, num_threads, streams)
    recoveries = []
    try:
        for _ in range(num):
            load.wait_for_answers()
            began = time.monotonic()
            server.kill_engine()
            assert eventually(server.is_healthy, within=LOADING, every=0.2)
            recoveries.append(time.monotonic() - began)
        load.wait_for_answers()
    finally:
        load.stop()
    known = {"answered", "error event", "503"}
    assert set(load.outcomes) <= known, load.outcomes
    assert load.outcomes["error event"] + load.outcomes["503"] >= num
    check_pages(server)
    return {
        "num_kills": num,
        "outcomes": dict(load.outcomes),
        "num_unanswered": sum(num for outcome, num in load.outcomes.items() if outcome not in known),
        "slowest_recovery_seconds": round(max(recoveries), 2),
    }


def drain(server: Server, num_streams: int) -> dict[str, Any]:
    """SIGTERM: nobody new, everybody under way to the end, exit 0."""
    connections = [server.open_stream(prompt="Count:", max_tokens=100) for _ in range(num_streams)]
    raw = [connection.recv(100) for connection in connections]
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    assert eventually(lambda: is_refused(server), within=2)
    for i, connection in enumerate(connections):
        while piece := connection.recv(65536):
            raw[i] += piece
    exit_code = server.wait()
    assert exit_code == 0
    assert all(b'"finish_reason":"length"' in r and r.rstrip().endswith(b"0") for r in raw)
    seconds = round(time.monotonic() - began, 2)
    return {"num_streams": num_streams, "exit_code": exit_code, "seconds_to_exit": seconds}


def is_refused(server: Server) -> bool:
    """Whether new connections are."""
    try:
        socket.create_connection((server.host, server.port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def full_queue(server: Server, num_open: int, num_refused: int) -> dict[str, Any]:
    """With `num_open` requests open, which is all there is room for, others get 429 and harm nobody."""
    connections = [server.open_stream(prompt="Go on", max_tokens=1000) for _ in range(num_open)]
    assert eventually(
        lambda: sum(server.stats().get(n, 0) for n in ("num_running", "num_waiting")) == num_open
    )
    for _ in range(num_refused):
        response = server.client.post(TEXT, json={"prompt": "me too"})
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
    for connection in connections:
        connection.close()
    assert eventually(server.is_idle, within=30), server.stats()
    check_pages(server)
    return {"num_refused": num_refused}


def tiny_pool(server: Server, num_requests: int) -> dict[str, Any]:
    """A pool of three pages of 16: requests that need all of it, many at a time, all get their answers."""

    def ask(i: int) -> int:
        body = {"prompt": [100 + i] * 10, "max_tokens": 30, "ignore_eos": True}
        answer = server.client.post(TEXT, json=body)
        assert answer.status_code == 200, answer.text
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(num_requests) as pool:
        assert set(pool.map(ask, range(num_requests))) == {30}
    assert server.stats()["num_pages"] == 3
    assert eventually(server.is_idle)
    check_pages(server)
    return {"num_requests": num_requests, "num_preemptions": server.stats()["num_preemptions"]}


def memory_slope(
    server: Server, num_requests: int, warm_up: int, most: float, at_once: int = 16
) -> dict[str, Any]:
    """Resident memory of both processes over short requests, in bytes a request (least squares)."""
    engine = server.engine_pid()
    assert engine is not None
    pids = {"server": server.process.pid, "engine": engine}
    samples: dict[str, list[tuple[int, int]]] = {name: [] for name in pids}

    def ask(i: int) -> None:
        body = {"prompt": f"{i} is", "max_tokens": 1 + i % 4, "stream": i % 2 == 0}
        assert server.client.post(TEXT, json=body).status_code == 200

    batch = max(at_once, num_requests // 50)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, range(warm_up)))
        for begin in range(0, num_requests, batch):
            list(pool.map(ask, range(begin, begin + batch)))
            for name, pid in pids.items():
                samples[name].append((begin, resident_bytes(pid)))
    slopes = {name: round(slope(points), 1) for name, points in samples.items()}
    assert all(value < most for value in slopes.values()), (slopes, samples)
    return {"num_requests": num_requests} | {f"{name}_bytes_per_request": v for name, v in slopes.items()}


def slope(points: list[tuple[int, int]]) -> float:
    """Of the straight line nearest to the points."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
