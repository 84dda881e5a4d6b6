"""How many tokens a second the HTTP server delivers on one core, and what it adds to their latency.

The real server in its process, pinned to one core, streams real server-sent events over loopback to this
process, which only counts, on another core beside a fake engine (`front_engine`) that offers a token a
stream a step. A token is late by the time from its step in the engine to its arrival here.

    python benchmarks/front.py [--streams 256] [--seconds 4] [--offered N ...] [--dry]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import FOLDER, Bar, Results, Row
from front_engine import TEXT, Pace

SERVER_CORE, OTHER_CORE = 0, 1
BAR = 20_000  # tokens a second
OFFERED = (10_000, 21_000, 30_000)  # tokens a second; the second is the one that the bar is for
NUM_SAMPLED = 16  # streams whose every token is timed
_EVENT = re.compile(rb'"(?:text|content)":"((?:[^"\\]|\\.)*)"')
_SERVE = """
import os, sys
os.sched_setaffinity(0, {%d})
from paceline.config import EngineConfig, ServerConfig
from paceline.server.main import run
run(EngineConfig(), ServerConfig(port=0, log_level="warning"), engine_factory="front_engine:build",
    on_ready=lambda address: print(address.url, flush=True))
"""


@dataclass(slots=True)
class Stream:
    """One connection: how much came, and for sampled ones when."""

    is_sampled: bool
    num_events: int = 0
    num_bytes: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)


def serve(pace: Pace) -> subprocess.Popen[str]:
    """The server's process; its first line is its address."""
    environment = os.environ | pace.to_environment() | {"PYTHONPATH": str(FOLDER)}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE % SERVER_CORE], stdout=subprocess.PIPE, text=True, env=environment
    )


def request(host: str, path: str, num_tokens: int) -> bytes:
    """A whole HTTP request for one stream."""
    body: dict[str, object] = {"max_tokens": num_tokens, "stream": True}
    if path.endswith("/chat/completions"):
        body["messages"] = [{"role": "user", "content": "Go on."}]
    else:
        body["prompt"] = "Go on."
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content


def drive(address: str, path: str, pace: Pace, num_tokens: int) -> list[Stream]:
    """Open all streams and read them to their ends."""
    host, port = address.removeprefix("http://").split(":")
    selector = selectors.DefaultSelector()
    streams = []
    for i in range(pace.num_streams):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(request(host, path, num_tokens))
        connection.setblocking(False)
        streams.append(Stream(is_sampled=i % (pace.num_streams // NUM_SAMPLED or 1) == 0))
        selector.register(connection, selectors.EVENT_READ, streams[-1])
    num_open = len(streams)
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(65536)  # type: ignore[union-attr]
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                num_open -= 1
                continue
            stream: Stream = key.data
            stream.num_events += data.count(b"data: {")
            stream.num_bytes += len(data)
            if stream.is_sampled:
                stream.pieces.append((time.monotonic(), data))
    return streams


def latencies(streams: list[Stream], times: list[float], texts: list[str]) -> list[float]:
    """Seconds by which each token of the sampled streams was late."""
    late = []
    for stream in streams:
        num_tokens = 0
        for received, data in stream.pieces:
            for event in data.split(b"data: ")[1:]:
                match = _EVENT.search(event)
                if match is None or not match[1]:
                    continue
                num_tokens += tokens_in(match[1].decode(), texts, num_tokens)
                late.append(received - times[num_tokens - 1])
    return late


def tokens_in(text: str, texts: list[str], begin: int) -> int:
    """How many tokens, from the `begin`-th of the cycle, the text is made of."""
    num = 0
    while text:
        piece = texts[(begin + num) % len(texts)]
        if not text.startswith(piece):
            raise RuntimeError(f"expected {piece!r} at the beginning of {text!r}")
        text = text[len(piece) :]
        num += 1
    return num


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def token_texts() -> list[str]:
    """The texts of the tokens that the engine sends, one cycle."""
    from paceline.models.hub import resolve_model
    from paceline.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(resolve_model("smollm2-135m-instruct", None))
    return [tokenizer.token_bytes(t).decode() for t in tokenizer.encode(TEXT, add_special_tokens=False)]


def measure(path: str, offered: int, num_streams: int, seconds: float, texts: list[str]) -> Row:
    """One run at one pace."""
    num_tokens = max(20, round(offered / num_streams * seconds))
    with tempfile.TemporaryDirectory() as folder:
        times_file = Path(folder) / "times.json"
        pace = Pace(num_streams, offered / num_streams, OTHER_CORE, str(times_file))
        process = serve(pace)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            before = cpu_seconds(process.pid)
            streams = drive(address, path, pace, num_tokens)
            ended = time.monotonic()
            used = cpu_seconds(process.pid) - before
        finally:
            process.terminate()
            process.wait(timeout=30)
        times = json.loads(times_file.read_text(encoding="utf-8"))
    late = sorted(latencies(streams, times, texts))
    total = num_tokens * num_streams
    num_chunks = sum(s.num_events for s in streams) - (num_streams if "chat" in path else 0)
    return {
        "path": path,
        "streams": num_streams,
        "offered_tokens_per_second": offered,
        "engine_tokens_per_second": round(total / (times[-1] - times[0])),
        "tokens_per_second": round(total / (ended - times[0])),
        "tokens_per_chunk": round(total / num_chunks, 3),
        "tokens_per_cpu_second": round(total / used),
        "bytes_per_token": round(sum(s.num_bytes for s in streams) / total, 1),
        "latency_ms": {
            name: round(1000 * late[min(len(late) - 1, int(q * len(late)))], 2)
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        },
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--offered", type=int, nargs="*", default=list(OFFERED))
    parser.add_argument("--dry", action="store_true", help="write no results")
    args = parser.parse_args()
    results = Results("front", ["uvicorn", "uvloop", "httptools", "starlette", "msgspec", "pyzmq"])
    os.sched_setaffinity(0, {OTHER_CORE})
    texts = token_texts()
    parts = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        for offered in args.offered:
            parts.append(f"{path} at {offered}")
            row = measure(path, offered, args.streams, args.seconds, texts)
            results.put(parts[-1], row)
            print(json.dumps(row))
    if args.dry:
        return
    results.write(parts, bars(results), table(results, parts))


def bars(results: Results) -> list[Bar]:
    """Whether both endpoints deliver what was asked for, token by token."""
    bars = []
    for path in ("/v1/completions", "/v1/chat/completions"):
        row = results.row(f"{path} at {OFFERED[1]}")
        rate = None if row is None else row["tokens_per_second"]
        bars.append(Bar(f"{path}: tokens per second on one core", rate, ">=", BAR))
    return bars


def table(results: Results, parts: list[str]) -> str:
    """For people."""
    lines = [
        "| path | offered, tok/s | delivered, tok/s | tokens a chunk | tokens a CPU second | "
        "added latency p50 / p99, ms |",
        "|---|---|---|---|---|---|",
    ]
    for part in parts:
        row = results.row(part)
        if row is not None:
            cells = [row[name] for name in ("path", "offered_tokens_per_second", "tokens_per_second")]
            cells += [row["tokens_per_chunk"], row["tokens_per_cpu_second"]]
            late = row["latency_ms"]
            lines.append(f"| {' | '.join(map(str, cells))} | {late['p50']} / {late['p99']} |")
    lines += ["", *(f"- {bar.name}: {bar.value} {bar.show()}" for bar in bars(results)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
