"""Peak memory of `paceline serve` under a load that fills its rows and its K/V pool at the same time.

Starts the server as a user does, drives it over HTTP from plain threads, and watches its processes from
outside. Imports no torch: this process must not share the pages that it counts (see `process_memory`).
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from common import PromptCutter, Row
from process_memory import MemoryWatcher, Moment

POOL_TOKENS = 24_576
REPLY_SECONDS = 300  # longest wait for one read
_ADDRESS = re.compile(r" at http://(?P<host>[\w.]+):(?P<port>\d+) ")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are all open at once; prompts in the order of submission."""

    prompt_lens: tuple[int, ...]
    answer_len: int

    @property
    def num_tokens(self) -> int:
        """K/V that it needs when every answer is complete."""
        return sum(self.prompt_lens) + self.answer_len * len(self.prompt_lens)


# All 64 rows of the default settings, and 24,320 of 24,576 tokens in whole pages. The long prompts come
# first, and their answers take more steps than the processing of all the others: they still run at its end.
FULL_LOAD = Load(prompt_lens=(1856,) * 8 + (96,) * 56, answer_len=64)
QUICK_LOAD = Load(prompt_lens=(256,) * 4, answer_len=16)


@dataclass(frozen=True, slots=True)
class Reply:
    """When a streamed answer began and ended (time.monotonic), and the tokens counted by the server."""

    began: float
    ended: float
    num_tokens: int  # prompt and answer


def measure(cutter: PromptCutter, model: str, load: Load = FULL_LOAD) -> Row:
    """Serve, load, and report the greatest PSS of all processes together, in bytes, and its split.

    Raises:
        RuntimeError: the server did not start or did not answer as asked, or the requests did not
            all run at the same time: then the pool was not full.
    """
    prompts = [cutter.cut(length) for length in load.prompt_lens]
    with _serving(model) as process, MemoryWatcher(process.pid) as watcher:
        host, port = _address(process)
        began = watcher.seconds
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [
                pool.submit(_complete, host, port, _body(i, prompt, load)) for i, prompt in enumerate(prompts)
            ]
            replies = [job.result() for job in jobs]
    _check_overlap(replies, load)
    peak = watcher.peak()
    return {
        "pss_bytes": peak.total("Pss"),
        "rss_bytes": peak.total("Rss"),
        "pss_bytes_under_load": watcher.peak(since=began).total("Pss"),
        "peak_seconds": round(peak.seconds, 1),  # after the start
        "load_began_seconds": round(began, 1),
        "pool_tokens": POOL_TOKENS,
        "load_tokens": load.num_tokens,
        "num_requests": len(replies),
        "split": _split(peak),
    }


def _split(moment: Moment) -> list[Row]:
    """Per process, largest first, without pids, which differ from run to run."""
    processes = sorted(moment.processes.items(), key=lambda item: -item[1]["Pss"])
    return [{"process": name.partition(" [")[0], **fields} for name, fields in processes]


@contextmanager
def _serving(model: str) -> Iterator[subprocess.Popen[str]]:
    """`paceline serve` on a free port, ended afterwards."""
    command = [sys.executable, "-m", "paceline", "serve", model, "--port", "0", "--log-level", "warning"]
    command += ["--kv-cache-tokens", str(POOL_TOKENS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _address(process: subprocess.Popen[str]) -> tuple[str, int]:
    """Host and port, from the line that the server prints when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := _ADDRESS.search(line):
            return match["host"], int(match["port"])
    raise RuntimeError(f"the server ended with code {process.wait()} before it was ready")


def _body(index: int, prompt: list[int], load: Load) -> dict[str, Any]:
    """Every other request samples, so that greedy and sampled rows share the steps."""
    return {
        "prompt": prompt,
        "max_tokens": load.answer_len,
        "ignore_eos": True,
        "temperature": 0.8 if index % 2 else 0.0,
        "top_p": 0.95,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _complete(host: str, port: int, body: dict[str, Any]) -> Reply:
    """One streamed completion."""
    connection = http.client.HTTPConnection(host, port, timeout=REPLY_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read().decode()}")
        began, num_tokens = 0.0, 0
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            began = began or time.monotonic()
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"the server gave up: {chunk['error']}")
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["total_tokens"]
        return Reply(began, time.monotonic(), num_tokens)
    finally:
        connection.close()


def _check_overlap(replies: list[Reply], load: Load) -> None:
    """The last request had begun before the first one ended, and every token was computed."""
    overlap = min(reply.ended for reply in replies) - max(reply.began for reply in replies)
    num_tokens = sum(reply.num_tokens for reply in replies)
    if overlap < 0 or num_tokens != load.num_tokens:
        raise RuntimeError(
            f"the load did not fill the pool: the requests overlapped by {overlap:.2f} s, and "
            f"{num_tokens} of {load.num_tokens} tokens came"
        )
