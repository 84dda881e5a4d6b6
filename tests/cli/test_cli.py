"""The command line as its users meet it: a process with arguments, output and an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline import __version__
from paceline.cli_flags import Parser, add_flags
from paceline.cli_settings import load
from paceline.config import EngineConfig, ServerConfig

PACELINE = [sys.executable, "-m", "paceline"]


def paceline(*args: str, stdin: str = "", timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PACELINE, *args], input=stdin, capture_output=True, text=True, timeout=timeout)


def test_version() -> None:
    ended = paceline("--version")
    assert (ended.returncode, ended.stdout) == (0, f"paceline {__version__}\n")


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "models"])
def test_help_has_defaults_and_examples(command: str) -> None:
    ended = paceline(command, "--help")
    assert ended.returncode == 0
    assert f"examples:\n  paceline {command}" in ended.stdout
    if command != "models":
        assert "(default: smollm2-135m-instruct)" in re.sub(r"\s+", " ", ended.stdout)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--prot", "1"], "unrecognized argument: --prot (did you mean --port?)"),
        (["chat", "--temprature=1"], "unrecognized argument: --temprature=1 (did you mean --temperature?)"),
        (["serve", "a", "b"], "unrecognized argument: b"),
        (["serve", "--max-num", "1"], "unrecognized argument: --max-num"),
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["serve", "--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors(args: list[str], words: str) -> None:
    ended = paceline(*args)
    assert ended.returncode == 2
    assert words in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--port", "70000"], "port must be in [0, 65535], got 70000"),
        (["serve", "--page-size", "3"], "page_size must be a power of two, got 3"),
        (["serve", "/no/such/model", "--port", "0"], "/no/such/model"),
        (["chat", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["generate", "--logprobs", "2"], "--logprobs needs --json"),
        (["models", "pull", "nothing"], "nothing"),
    ],
)
def test_errors_are_one_line(args: list[str], words: str) -> None:
    ended = paceline(*args)
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("paceline: error: ")
    assert words in line


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = paceline("serve", "--port", str(port))
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"paceline: error: port {port} is taken")


def test_models_lists_the_default() -> None:
    ended = paceline("models")
    assert ended.stdout == paceline("models", "list").stdout
    assert re.search(r"^smollm2-135m-instruct  98 MB  Apache-2.0  (not )?cached$", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig])
def test_every_setting_is_a_flag_with_its_default(config: type[Any]) -> None:
    parser = Parser()
    add_flags(parser, config)
    settings = load(parser.parse_args([]), {})
    assert (settings.engine, settings.server, settings.origins) == (EngineConfig(), ServerConfig(), {})
    text = re.sub(r"\s+", " ", parser.format_help())
    for field in dataclasses.fields(config):
        assert "--" + field.name.replace("_", "-") in text
        assert field.metadata["help"] in text


def test_flags_reach_their_fields() -> None:
    parser = Parser()
    add_flags(parser, EngineConfig)
    given = parser.parse_args(
        ["--no-prefix-caching", "--reproducible", "--max-model-len", "99", "--device", "cuda"]
    )
    config = load(given, {}).engine
    assert (config.prefix_caching, config.reproducible) == (False, True)
    assert (config.max_model_len, config.device) == (99, "cuda")


def test_generate_says_that_it_waits_for_a_terminal() -> None:
    ours, theirs = pty.openpty()
    # What follows the prompt is refused, so that no model is loaded.
    command = [*PACELINE, "generate", "no-such-model"]
    ended = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert ended.stderr is not None
        assert ended.stderr.readline() == "type the prompt, then Ctrl-D at the beginning of a line\n"
        os.write(ours, b"Hello.\n\x04")
        _, errors = ended.communicate(timeout=60)
        assert "no model 'no-such-model'" in errors
        assert ended.returncode == 1
    finally:
        ended.kill()
        os.close(ours)
        os.close(theirs)


@pytest.mark.model
def test_generate_from_an_argument_and_from_stdin() -> None:
    flags = ("--temperature", "0", "--max-tokens", "8")
    given = paceline("generate", "--prompt", "The capital of France is", *flags)
    assert given.returncode == 0, given.stderr
    assert given.stdout.startswith(" Paris")
    piped = paceline("generate", "--json", "--logprobs", "2", *flags, stdin="The capital of France is")
    result = json.loads(piped.stdout)
    [choice] = result["choices"]
    assert choice["text"] + "\n" == given.stdout
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == 8
    assert len(choice["logprobs"][0]["top_ids"]) == 2


@pytest.mark.model
def test_chat_with_piped_input_prints_answers_only() -> None:
    ended = paceline(
        "chat", "--temperature", "0", "--max-tokens", "5", stdin="Hello.\n\n/unknown\n/exit\nmore\n"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert "> " not in ended.stdout
    assert ended.stderr.splitlines() == ["unknown command /unknown; /help lists them"]


@pytest.mark.model
def test_chat_in_a_terminal_stops_the_answer_on_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PACELINE, "chat", "--seed", "0"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for("> ")
        os.write(ours, b"Write a very long story.\n")
        screen.wait_for("story.\r\n", more=20)  # some of the answer is there
        process.send_signal(signal.SIGINT)
        screen.wait_for(" …")
        screen.wait_for("> ")
        os.write(ours, b"/help\n")
        screen.wait_for("/reset")
        screen.wait_for("\n> ")
        os.write(ours, b"\x04")  # Ctrl-D
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "Traceback" not in screen.text


class Screen:
    """What a terminal shows, read as it comes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""
        self._seen = 0

    def wait_for(self, words: str, more: int = 0) -> None:
        """Read until `words` and `more` characters after them have come since the last wait."""
        deadline = time.monotonic() + 120
        while (at := self.text.find(words, self._seen)) < 0 or len(self.text) < at + len(words) + more:
            assert time.monotonic() < deadline, f"{words!r} did not come: {self.text!r}"
            self.text += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = at + len(words) + more


@pytest.mark.model
def test_serve_answers_the_curl_line_it_prints_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PACELINE, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        greeting = [process.stdout.readline() for _ in range(3)]
        assert "smollm2-135m-instruct" in greeting[0]
        answer = subprocess.run(["bash", "-c", greeting[2]], capture_output=True, text=True, timeout=60)
        reply = json.loads(answer.stdout)
        assert reply["choices"][0]["message"]["content"]
        assert reply["usage"]["completion_tokens"] <= 64
        url = re.search(r"http://\S+?(?=/)", greeting[2])
        assert url is not None
        with urllib.request.urlopen(url[0] + "/health") as health:
            assert health.status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in stderr
