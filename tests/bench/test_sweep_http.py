"""Servers as arms: the real HTTP side of Paceline, and servers that misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from served import Served

from paceline.bench.client import HttpTarget, _preemptions, _speculation
from paceline.bench.sweep import ArmGoneError
from paceline.bench.workload import Column, Prompt, Work, Workload
from paceline.errors import PacelineError


def work(concurrency: int, answer_len: int = 30, natural_stop: bool = False) -> Work:
    prompts = [Prompt("Say it again and again."), Prompt("And once more.")]
    workload = Workload(prompts, answer_len, 4 * answer_len, natural_stop=natural_stop)
    return workload.work(Column(0.7, None, concurrency), 0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    code, stderr = server.stop()
    assert code == 0, stderr


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_real_server_is_measured(served: Served, concurrency: int) -> None:
    asked = work(concurrency, 400)  # long enough for all clients to be busy together on a busy machine
    got = HttpTarget(served.url).run(asked)
    assert got.rate > 0
    assert 0 < got.num_tokens <= asked.num_tokens
    assert got.num_tokens == pytest.approx(got.rate * got.seconds)
    assert got.ttft > 0


def test_answers_have_the_lengths_that_were_asked_for(served: Served) -> None:
    before = len([line for line in served.journal() if line.startswith("finish")])
    HttpTarget(served.url).run(work(2))
    finished = [line for line in served.journal() if line.startswith("finish")][before:]
    assert len(finished) >= len(work(2).jobs) - 1, "all but those given up at the end"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_writes_what_there_is(
    served: Served, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "paceline", "sweep", "--url", f"auto={served.url}"]
    flags = ["--concurrency", "2", "--rounds", "10000", "--max-prompt-chars", "99", "--answer-len", "200"]
    with subprocess.Popen(
        [*command, *flags, "--out", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round 3/" in line:
                process.send_signal(number)
                break
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "Traceback" not in stderr
    assert "interrupted: this is what was measured until then" in stdout
    read = json.loads((tmp_path / "sweep.json").read_text())
    assert not read["is_complete"]
    assert len(read["measurements"]) >= 3
    assert read["arms"] == [{"name": "auto", "role": "adaptive", "url": served.url}]
    assert read["model"] == "tiny", "the server's, not one of this machine's"
    assert "<svg" in (tmp_path / "sweep.html").read_text()


def test_the_benchmark_passes_a_signal_on_and_waits(served: Served, tmp_path: Path) -> None:
    flags = ["--url", f"auto={served.url}", "--concurrency", "2", "--rounds", "10000", "--answer-len", "200"]
    flags += ["--max-prompt-chars", "99", "--out", str(tmp_path)]
    code = f"import sweep; print('ended with', sweep._sweep({flags!r}))"
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[2] / "benchmarks")}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | paths,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "round 2/" in line:
                process.terminate()
                break
        stdout, stderr = process.communicate(timeout=60)
    assert stdout.splitlines()[-1] == "ended with 143", stderr
    assert not json.loads((tmp_path / "sweep.json").read_text())["is_complete"]


class Odd(BaseHTTPRequestHandler):
    """A server whose behaviour is in its path: /short/v1/…, /models/v1/…, and so on."""

    protocol_version = "HTTP/1.1"
    num_scrapes = 0

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("/metrics"):
            type(self).num_scrapes += 1
            self._send(
                200, METRICS.format(n=type(self).num_scrapes) if self.path.startswith("/counting") else "x"
            )
        elif self.path == "/nothing/v1/models":
            self._send(200, '{"data": []}')
        else:
            self._send(200, '{"data": [{"id": "odd"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body.get("ignore_eos") is (None if self.path.startswith("/ending") else True)
        if self.path.startswith("/refusing"):
            self._send(400, '{"error": {"message": "no\\n such field"}}')
            return
        num = body["max_tokens"] + {"short": -1, "long": 1}.get(self.path.split("/")[1], 0)
        if self.path.startswith("/ending"):
            num = min(num, 1 + body["seed"] % 7)
        events = [{"choices": [{"delta": {"content": "ab"}}]} for _ in range(num // 2)]
        if self.path.startswith("/failing"):
            events.append({"error": {"message": "the engine is gone"}})
        if not self.path.startswith("/untold"):
            events.append({"choices": [], "usage": {"completion_tokens": num}})
        texts = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        if not self.path.endswith("/slow/v1/chat/completions"):
            self._send(200, "".join(texts))
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        for text in texts:
            time.sleep(0.002)
            self.wfile.write(text.encode())

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="odd"}} {n}00.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="odd"}} {n}e2
vllm:spec_decode_num_draft_tokens_total{{engine="1",model_name="odd"}} {n}00
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {n}80
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {n}20
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {n}60
vllm:num_preemptions_total{{engine="0"}} {n}
"""


class Quiet(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A client that gives up in the middle of its stream is as it should be."""


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    server = Quiet(("127.0.0.1", 0), Odd)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/short", r"29 tokens came of 30: .*ignore_eos"),
        ("/long", r"31 tokens came of 30: .*max_tokens"),
        ("/untold", "a stream ended without usage"),
        ("/refusing", r"/v1/chat/completions: status 400: .*no.* such field"),
        ("/failing", "the engine is gone"),
        ("/nothing", "names no model"),
    ],
)
def test_a_server_that_cannot_be_compared_says_why(odd: str, path: str, words: str) -> None:
    with pytest.raises(PacelineError, match=words) as caught:
        HttpTarget(odd + path).run(work(1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_answers_may_end_where_the_model_ends_them(odd: str, concurrency: int) -> None:
    asked = work(concurrency, natural_stop=True)  # of 1 to 7 tokens, two a piece: some come without text
    got = HttpTarget(odd + "/ending/slow").run(asked)
    assert got.rate == pytest.approx(got.num_tokens / got.seconds)
    most = [min(job.answer_len, 1 + job.seed % 7) for job in asked.jobs]
    assert 0 < got.num_tokens <= sum(most) + 1e-9


def test_nobody_there() -> None:
    with pytest.raises(ArmGoneError, match=r"http://127\.0\.0\.1:9/v1/models: .*[Rr]efused"):
        HttpTarget("http://127.0.0.1:9").run(work(1))


def test_counters_in_vllms_names_are_read(odd: str) -> None:
    target = HttpTarget(odd + "/counting")
    before, after = target._counters(), target._counters()
    assert before is not None
    assert after is not None
    got = _speculation(before, after)
    assert got is not None
    assert (got.num_rounds, got.num_drafted, got.num_accepted) == (100, 200, 100)
    assert got.accepted_per_pos == (100, 100)
    assert _preemptions(before, after) == 1


def test_a_server_without_counters_is_measured_without_them(odd: str) -> None:
    got = HttpTarget(odd + "/slow").run(work(2))
    assert got.rate > 0
    assert (got.speculation, got.num_preemptions) == (None, 0)
