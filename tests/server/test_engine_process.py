"""How the engine's process starts, fails, dies and ends, seen from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from processes import is_running
from served import HERE, Served, eventually
from tiny_model import write_tiny_model

BODY = {"prompt": "ab", "max_tokens": 4}


def start_and_fail(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "serve_fake.py"), "--model", str(model), "--port", "0", *flags],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def ctrl_c(pid: int) -> None:
    """As a terminal does it: to the whole process group."""
    os.killpg(pid, signal.SIGINT)


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize("end", [ctrl_c, terminate])
def test_signals_end_everything_quickly_and_cleanly(
    serve: Callable[..., Served], end: Callable[[int], None]
) -> None:
    served = serve("--drain-seconds", "0", own_group=True)
    engine = served.engine_pid()
    body = {"prompt": "<|slow|>a", "max_tokens": 3000, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        end(served.process.pid)
        rest = [line for line in lines if line]
    assert "the server is shutting down" in rest[-2]
    assert rest[-1] == "data: [DONE]"
    code, stderr = served.stop()
    assert code == 0
    assert "Traceback" not in stderr
    assert not is_running(engine)


@pytest.mark.parametrize("end", [ctrl_c, terminate])
def test_signals_while_loading_end_cleanly(tmp_path: Path, end: Callable[[int], None]) -> None:
    model = write_tiny_model(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START, str(model)],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stderr is not None
    assert "loading" in process.stderr.readline()
    assert eventually(lambda: psutil.Process(process.pid).children() != [])
    end(process.pid)  # the engine has hardly begun to start
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in stderr


SLOW_START = """
import sys
from paceline.config import EngineConfig, ServerConfig
from paceline.server.main import run
run(EngineConfig(model=sys.argv[1]), ServerConfig(port=0), on_ready=print, engine_factory="fake_engine:never")
"""


def test_no_engine_outlives_a_killed_server(serve: Callable[..., Served]) -> None:
    served = serve()
    engine = served.engine_pid()
    served.process.kill()
    assert eventually(lambda: not is_running(engine))


def test_full_collections_leave_out_what_starting_left(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.client.post("/v1/completions", json=BODY).status_code == 200
    frozen = [line.split() for line in served.journal() if " frozen " in line]
    assert [process for process, _, _ in frozen] == ["front", "engine"]
    assert all(int(num) > 10_000 for _, _, num in frozen)


def test_the_engine_ignores_ctrl_c(serve: Callable[..., Served]) -> None:
    served = serve()
    os.kill(served.engine_pid(), signal.SIGINT)
    assert served.client.post("/v1/completions", json=BODY).status_code == 200


def test_an_engine_that_dies_is_told_to_everybody(serve: Callable[..., Served]) -> None:
    served = serve()
    reason = "the engine process died (exit code 3)"
    with served.client.stream(
        "POST", "/v1/completions", json={"prompt": "<|slow|>a", "max_tokens": 3000, "stream": True}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        whole = served.client.post("/v1/completions", json={"prompt": "<|die|>", "max_tokens": 9})
        rest = [line for line in lines if line]
    assert whole.status_code == 503
    assert whole.json()["error"]["message"] == reason
    assert reason in rest[-2]
    assert rest[-1] == "data: [DONE]"
    refused = served.client.post("/v1/completions", json=BODY)  # the next engine is still starting
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    health = served.client.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, reason)
    assert eventually(lambda: served.client.get("/health").status_code == 200)
    assert served.client.post("/v1/completions", json=BODY).status_code == 200
    code, stderr = served.stop()
    assert code == 0
    assert "Traceback" not in stderr


def test_an_engine_killed_from_outside(serve: Callable[..., Served]) -> None:
    served = serve()
    os.kill(served.engine_pid(), signal.SIGKILL)
    assert eventually(lambda: "killed by SIGKILL" in served.client.get("/health").text)
    assert eventually(lambda: served.client.get("/health").status_code == 200)


def test_a_step_that_fails_answers_its_requests_and_ends_the_engine(serve: Callable[..., Served]) -> None:
    served = serve()
    engine = served.engine_pid()
    response = served.client.post("/v1/completions", json={"prompt": "<|raise|>", "max_tokens": 9})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "boom")
    assert eventually(lambda: "the engine failed: RuntimeError: boom" in served.client.get("/health").text)
    assert eventually(lambda: not is_running(engine))
    assert eventually(lambda: served.client.get("/health").status_code == 200)


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    (model / "refuse").touch()
    ended = start_and_fail(model)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"paceline: error: {model}: tensor lm_head.weight is missing"
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_a_taken_port_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = start_and_fail(write_tiny_model(tmp_path), "--port", port)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"paceline: error: port {port} is taken: choose another with --port, or 0 for any free one"
    ]


def test_the_socket_and_its_folder_are_removed(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)  # too long for a socket's address
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    served = serve()
    options = "".join(psutil.Process(served.engine_pid()).cmdline())
    folder = Path(options.partition("ipc://")[2].partition('"')[0]).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    served.stop()
    assert not folder.exists()
    assert list(long.iterdir()) == []


IMPORTS = """
import json, os, signal, sys, threading, urllib.request
from paceline.config import EngineConfig, ServerConfig
from paceline.server.main import run

def ask(address):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(address.url + "/v1/chat/completions", body, headers)).read()
    heavy = {"torch", "numba", "transformers", "tqdm.auto", "pandas", "scipy"}
    print(sorted(heavy & set(sys.modules)), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

run(EngineConfig(model=sys.argv[1]), ServerConfig(port=0), engine_factory="fake_engine:build",
    on_ready=lambda address: threading.Thread(target=ask, args=(address,)).start())
"""


def test_a_live_server_has_imported_nothing_heavy(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(write_tiny_model(tmp_path))],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_curl_line_works_as_printed(served: Served) -> None:
    [curl] = [line for line in served.greeting.splitlines() if "curl" in line]
    ended = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30)
    assert '"finish_reason"' in ended.stdout


def test_requests_after_the_end_are_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    url = served.url
    served.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
