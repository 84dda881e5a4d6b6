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
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from paceline.bench.sweep import ArmGoneError
from paceline.bench.window import Sample, Speculation, Trace, sample
from paceline.bench.workload import Deal, Job, Work
from paceline.errors import PacelineError

TIMEOUT = 120.0  # seconds without a byte
MAX_BODY = 2**24
# What no load brings about: a server that is merely swamped may answer at the next one.
NOBODY_THERE = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)
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
            ArmGoneError: the server cannot be reached.
            PacelineError: it refuses, or answers in other lengths than asked.
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

    def stream(self, job: Job, trace: Trace, stop: threading.Event) -> None:
        """Send one request and note when its pieces come; `stop` gives it up."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": job.prompt}],
            "max_tokens": job.answer_len,
            "temperature": job.temperature,
            "seed": job.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not job.natural_stop:
            body["ignore_eos"] = True  # no field of OpenAI's: left out where it is not needed
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
        self._check_length(job, num_tokens)
        assert num_tokens is not None
        if num_tokens:  # an answer without text still took the time of its last token
            times = times or [time.perf_counter()]
        trace.pieces = [(moment, num_tokens / len(times)) for moment in times]
        trace.end = times[-1] if times else time.perf_counter()

    def _check_length(self, job: Job, num_tokens: int | None) -> None:
        """Raises PacelineError where it cannot be compared with other arms' answers."""
        if num_tokens is None:
            raise PacelineError(f"{self._url}: a stream ended without usage: nobody knows its tokens")
        if num_tokens == job.answer_len or (job.natural_stop and num_tokens < job.answer_len):
            return
        asked = "honour max_tokens" if num_tokens > job.answer_len else "honour ignore_eos"
        raise PacelineError(
            f"{self._url}: {num_tokens} tokens came of {job.answer_len}: for equal work in all arms the "
            f"server must {asked}"
        )

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
            ArmGoneError: nobody listens there.
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
                status = f"status {response.status}" + (f": {reason}" if reason else "")
                raise PacelineError(f"{self._url}{path}: {status}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            kind_of_error = ArmGoneError if isinstance(error, NOBODY_THERE) else PacelineError
            raise kind_of_error(f"{self._url}{path}: {error or type(error).__name__}") from None
        finally:
            connection.close()


class _Run:
    """The clients of one run: threads that take jobs until one finds none left."""

    def __init__(self, target: HttpTarget, work: Work) -> None:
        self._target, self._deal = target, Deal(work)
        self._lock = threading.Lock()
        self._begun: list[tuple[Job, Trace]] = []
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        # Each client begins with its own job, whichever thread runs first.
        firsts = [self._begin(job) for job in self._deal.firsts]
        self._threads = [threading.Thread(target=self._work, args=first, daemon=True) for first in firsts]

    def finish(self) -> list[Trace]:
        """Run to the end of the window; the traces in the order in which they were begun."""
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
        return [trace for _, trace in self._begun]

    def _work(self, job: Job, trace: Trace) -> None:
        """A client. When one finds no job left, not every client is busy any more: all stop."""
        try:
            self._target.stream(job, trace, self._stop)
            while (following := self._next(job)) is not None:
                job, trace = following
                self._target.stream(job, trace, self._stop)
        except Exception as failure:
            self._failures.append(failure)
            self._stop.set()

    def _next(self, job: Job) -> tuple[Job, Trace] | None:
        """What follows a job; None: the run is over, for all."""
        with self._lock:
            if not self._stop.is_set():
                following = self._deal.after(job)
                if following is not None:
                    return self._begin(following)
                self._stop.set()
            return None

    def _begin(self, job: Job) -> tuple[Job, Trace]:
        self._begun.append((job, Trace(0.0)))
        return self._begun[-1]

    def _price_given_up(self) -> None:
        """Answers that were not finished have no count of tokens: their pieces are worth the others' mean.

        Or less, where that would come to more than was asked for: a busy client reads several at once.
        """
        done = [trace for _, trace in self._begun if trace.end is not None]
        per_piece = sum(trace.num_tokens for trace in done) / max(1, sum(len(trace.pieces) for trace in done))
        for job, trace in self._begun:
            if trace.end is None:
                worth = min(per_piece, job.answer_len / max(1, len(trace.pieces)))
                trace.pieces = [(moment, worth) for moment, _ in trace.pieces]


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
