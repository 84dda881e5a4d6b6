"""A server as an arm: streams from anything that speaks OpenAI's chat API, and reads its counters.

One thread a client over Python's own HTTP, so that the command needs no further package; a thread that waits
for its stream costs nothing. The number of tokens is the server's (`usage`); when they came is known by
piece, and a piece counts as its share of the answer. Works with vLLM, SGLang, llama.cpp and Paceline.

Knows nothing of tokenizers: prompts go out as messages, and the server's template makes tokens of them.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.window import Sample, Speculation, Trace, sample
from paceline.bench.workload import Job, Work
from paceline.errors import PacelineError

TIMEOUT = 120.0  # seconds without a byte
MAX_BODY = 2**24
_COUNTER = re.compile(r"^(?:\w+:)?(\w+?)(?:_total)?(?:\{(.*)\})? ([\d.eE+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class HttpTarget:
    """One server.

    Args:
        url: without a path, or with the one before `/v1`.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked by `arms.arm_at`"
        self._url, self._path = url, parts.path.rstrip("/")
        self._address = (parts.hostname, parts.port)
        self._is_tls = parts.scheme == "https"
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model: str | None = None  # the first that it serves; None: not asked yet

    def run(self, work: Work) -> Sample:
        """Do the work, as long as every client is busy.

        Raises:
            PacelineError: the server cannot be reached, refuses, or answers in other lengths than asked.
        """
        self.model = self.model or self._first_model()
        before = self._counters()
        run = _Run(self, work)
        traces = run.finish()
        after = self._counters()
        speculation, num_preemptions = None, 0
        if before is not None and after is not None:
            speculation, num_preemptions = _speculation(before, after), _preemptions(before, after)
        return sample(traces, work.column.concurrency, num_preemptions, speculation)

    def stream(self, job: Job, temperature: float, trace: Trace, stop: threading.Event) -> None:
        """Send one request and note when its pieces come; `stop` gives it up."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": job.prompt}],
            "max_tokens": job.answer_len,
            "temperature": temperature,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        times: list[float] = []
        num_tokens = None
        trace.begin = time.perf_counter()
        with self._open("POST", "/v1/chat/completions", body) as response:
            for event in _events(response):
                if stop.is_set():
                    break
                if "error" in event:
                    raise PacelineError(f"{self._url}: {_excerpt(json.dumps(event['error']))}")
                if _has_text(event):
                    times.append(time.perf_counter())
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
        if num_tokens is None and stop.is_set():
            trace.pieces = [(moment, 1.0) for moment in times]  # until the run knows the tokens of a piece
            return
        if num_tokens != job.answer_len or not times:
            raise PacelineError(
                f"{self._url}: {num_tokens or 0} tokens came of {job.answer_len}: for equal work in all arms "
                "the server must honour ignore_eos and send usage with streams"
            )
        trace.pieces = [(moment, num_tokens / len(times)) for moment in times]
        trace.end = times[-1]

    def _first_model(self) -> str:
        found = json.loads(self._get("/v1/models"))
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise PacelineError(f"{self._url}/v1/models names no model") from None

    def _counters(self) -> dict[str, dict[str, float]] | None:
        """The server's Prometheus counters by name and position or depth; None if it shows none."""
        try:
            text = self._get("/metrics")
        except PacelineError:
            return None
        counters: dict[str, dict[str, float]] = {}
        for name, labels, value in _COUNTER.findall(text):
            known: dict[str, str] = dict(_LABEL.findall(labels))
            key = known.get("position", known.get("depth", ""))
            of_name = counters.setdefault(name, {})
            of_name[key] = of_name.get(key, 0.0) + float(value)
        return counters

    def _get(self, path: str) -> str:
        with self._open("GET", path, None) as response:
            return response.read(MAX_BODY).decode("utf-8", errors="replace")

    @contextmanager
    def _open(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200.

        Raises:
            PacelineError: anything else, in one line.
        """
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(*self._address, timeout=self._timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                reason = _excerpt(response.read(2000).decode("utf-8", errors="replace"))
                raise PacelineError(f"{self._url}{path}: status {response.status}: {reason}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise PacelineError(f"{self._url}{path}: {error or type(error).__name__}") from None
        finally:
            connection.close()


class _Run:
    """The clients of one run: threads that take jobs until one finds none left."""

    def __init__(self, target: HttpTarget, work: Work) -> None:
        self._target, self._temperature = target, work.column.temperature
        self._waiting = deque(enumerate(work.jobs))
        self._lock = threading.Lock()
        self._traces = [Trace(0.0) for _ in work.jobs]
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        # Each client begins with its own job, whichever thread runs first.
        firsts = [self._waiting.popleft() for _ in range(work.column.concurrency)]
        self._threads = [threading.Thread(target=self._work, args=(first,), daemon=True) for first in firsts]

    def finish(self) -> list[Trace]:
        """Run to the end of the window; the traces in the order of the jobs."""
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                thread.join()
        finally:
            self._stop.set()
        if self._failures:
            raise self._failures[0]
        self._price_given_up()
        return self._traces

    def _work(self, job: tuple[int, Job] | None) -> None:
        """A client. When one finds no job left, not every client is busy any more: all stop."""
        try:
            while job is not None and not self._stop.is_set():
                place, given = job
                self._target.stream(given, self._temperature, self._traces[place], self._stop)
                job = self._next()
        except Exception as failure:
            self._failures.append(failure)
        self._stop.set()

    def _next(self) -> tuple[int, Job] | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _price_given_up(self) -> None:
        """Answers that were not finished have no count of tokens: their pieces are worth the others' mean."""
        done = [trace for trace in self._traces if trace.end is not None]
        per_piece = sum(trace.num_tokens for trace in done) / max(1, sum(len(trace.pieces) for trace in done))
        for trace in self._traces:
            if trace.end is None:
                trace.pieces = [(moment, per_piece) for moment, _ in trace.pieces]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


def _has_text(event: dict[str, Any]) -> bool:
    """Whether tokens came with it; reasoning, under either name, is text too."""
    return any(
        (choice.get("delta") or {}).get(name)
        for choice in event.get("choices", ())
        for name in ("content", "reasoning_content", "reasoning")
    )


def _speculation(
    before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]
) -> Speculation | None:
    """vLLM's counters, which others show under their own prefixes. None: the server has none."""
    if "spec_decode_num_drafts" not in after:
        return None

    def grown(name: str) -> dict[str, int]:
        now, then = after.get(f"spec_decode_num_{name}", {}), before.get(f"spec_decode_num_{name}", {})
        return {key: round(value - then.get(key, 0.0)) for key, value in now.items()}

    def listed(name: str) -> tuple[int, ...]:
        return tuple(num for _, num in sorted((int(key), num) for key, num in grown(name).items() if key))

    return Speculation(
        num_rounds=sum(grown("drafts").values()),
        num_drafted=sum(grown("draft_tokens").values()),
        num_accepted=sum(grown("accepted_tokens").values()),
        accepted_per_pos=listed("accepted_tokens_per_pos"),
        rounds_by_depth=listed("rounds"),  # Paceline's alone
    )


def _preemptions(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> int:
    now, then = (sum(counters.get("num_preemptions", {}).values()) for counters in (after, before))
    return round(now - then)


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:199] + "…"
