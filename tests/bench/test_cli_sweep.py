"""The command as its users meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.arms import Arm, arm_at, arm_of, parse_arms
from paceline.errors import ConfigError


def sweep(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", "sweep", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_a_list_is_taken_apart_between_arms_and_not_within_one() -> None:
    arms = parse_arms("plain, table:4=3, 16=1,2,ema , table:2=4,,auto", [])
    names = [arm.name for arm in arms]
    assert names == ["plain", "table:4=3,16=1", "depth 2", "ema", "table:2=4", "auto"]
    assert arms[1].launch == (("policy", "table:4=3,16=1"),)


def test_words_are_arms() -> None:
    assert arm_of("plain") == Arm("plain", "plain", (("draft", "none"),))
    assert arm_of("03") == Arm("depth 3", "fixed", (("depth", "0"),), depth=3)
    assert arm_of("auto").launch == (("depth", "auto"),)
    assert arm_of("batch-table").launch == (("policy", "batch-table"),)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("http://host:8000/v1/", Arm("host:8000", "other", url="http://host:8000")),
        ("plain=https://host", Arm("plain", "plain", url="https://host")),
        ("2=http://host/a", Arm("depth 2", "fixed", url="http://host/a")),
        ("auto=http://host", Arm("auto", "adaptive", url="http://host")),
        ("vLLM table=http://host", Arm("vLLM table", "other", url="http://host")),
        ("http://host/?key=1", Arm("host", "other", url="http://host/?key=1")),
    ],
)
def test_addresses_are_arms(text: str, arm: Arm) -> None:
    assert arm_at(text) == arm


@pytest.mark.parametrize(
    ("words", "urls", "message"),
    [
        ("17", [], "--arms: depth must be at most 16, got 17"),
        ("１", [], "--arms: plain, a depth, auto or the name of a policy, got '１'"),
        ("-1", [], "--arms: plain, a depth, auto or the name of a policy, got '-1'"),
        ("1,01", [], "--arms, --url: depth 1 is there twice"),
        (",", [], "--arms: there is nothing to measure"),
        ("", ["ftp://host"], "--url must be http://… or https://…"),
        ("", ["http://host:99999"], "--url must be http://… or https://…"),
        ("", ["host:8000"], "--url must be http://… or https://…"),
    ],
)
def test_bad_arms(words: str, urls: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arms(words, urls)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--concurrency", "0"], "--concurrency must be in [1, 4096], got 0"),
        (["--concurrency", ""], "--concurrency must be numbers with commas between them, got ''"),
        (["--concurrency", "1,x"], "--concurrency must be numbers with commas between them, got '1,x'"),
        (["--temperature", "nan"], "--temperature must be in [0.0, 100.0], got nan"),
        (["--context", "3"], "--context must be in [16, 1048576], got 3"),
        (["--concurrency", "1,2,1"], "--concurrency: 1 is there twice"),
        (["--temperature", "0,0.80,0.8"], "--temperature: 0.8 is there twice"),
        (["--context", "64,64"], "--context: 64 is there twice"),
        (["--warmup-steps", "-1"], "--warmup-steps must be at least 0, got -1"),
        (["--draft", "nosuch"], "no draft head 'nosuch'"),
        (["--draft", "nosuch", "--profile", "step"], "no draft head 'nosuch'"),
        (["--turn-seconds", "0"], "--turn-seconds must be at least 0.05, got 0.0"),
        (["--arms", "plain,nosuch"], "--arms: policy must be one of governor, ema, table:ROWS=DEPTH"),
        (["--arms", "table:4=3,x=1"], "--arms: plain, a depth, auto or the name of a policy, got 'x=1'"),
        (["--arms", "plain,table:4=99"], "--arms: policy 'table:4=99' cannot be used (depth 99 is more than"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be at least 0.1, got 0.0"),
        (["--answer-len", "2"], "--answer-len must be at least 4, got 2"),
        (["--max-prompt-chars", "0"], "--max-prompt-chars must be at least 1, got 0"),
        (["--step-seconds", "0"], "--step-seconds must be at least 1.0, got 0.0"),
        (["--prompts", "/no/such/file"], "--prompts: cannot read /no/such/file: No such file or directory"),
        (["--out", "/proc/nothing"], "--out: cannot make /proc/nothing"),
        (
            ["--concurrency", "4", "--max-num-seqs", "2"],
            "--concurrency: 4 requests need --max-num-seqs of as many, got 2",
        ),
        (["--profile", "step", "--url", "http://host"], "--profile looks into engines of this process"),
        (["--url", "http://host", "--context", "64"], "--context needs MODEL"),
        (["--url", "http://host", "--warm-prompts"], "--warm-prompts is for engines of this process"),
        (["--profile", "step", "--warm-prompts"], "--warm-prompts does not go with --profile"),
        (["--no-prefix-caching", "--warm-prompts"], "--warm-prompts needs the prefix cache"),
    ],
)
def test_errors_name_the_flag_and_its_limit(tmp_path: Path, args: list[str], words: str) -> None:
    ended = sweep("--out", str(tmp_path / "out"), *args)
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"paceline: error: {words}")


def test_when_every_arm_fails_the_report_says_why(tmp_path: Path) -> None:
    ended = sweep("--url", "a=http://127.0.0.1:9", "--concurrency", "1,2", "--out", str(tmp_path))
    assert ended.returncode == 1
    assert "paceline: error: every arm failed" in ended.stderr
    assert "a failed: http://127.0.0.1:9/v1/models" in ended.stdout
    assert ended.stderr.count("refused") == 1, "nobody there at one load is nobody there at all"
    read = json.loads((tmp_path / "sweep.json").read_text())
    assert [failure["arm"] for failure in read["failures"]] == ["a"]
    assert not (tmp_path / "sweep.html").exists()


@pytest.mark.model
def test_a_head_that_cannot_be_loaded_stops_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    ended = sweep("--draft", str(tmp_path / "head"), "--arms", "plain,1,auto", "--out", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "")
    said = ended.stderr.splitlines()
    assert said[0] == "auto: starting"
    assert said[-1].startswith("paceline: error: ")
    assert "no config.json there" in said[-1]
    assert not any("failed" in line for line in said)


@pytest.mark.model
def test_a_short_sweep_of_the_default_model(tmp_path: Path) -> None:
    ended = sweep(
        *(
            "--draft",
            "ngram",
            "--arms",
            "plain,2",
            "--url",
            "gone=http://127.0.0.1:9",
            "--concurrency",
            "1,2",
        ),
        *("--rounds", "1", "--answer-len", "8", "--min-tokens", "8", "--max-prompt-chars", "60"),
        *("--out", str(tmp_path)),
        timeout=280,
    )
    assert ended.returncode == 1, "an arm failed"
    assert "gone failed" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "paceline: error: gone failed; the report has the rest"
    assert "Where depths stop paying" in ended.stdout
    read = json.loads((tmp_path / "sweep.json").read_text())
    assert read["is_complete"]
    assert {m["arm"] for m in read["measurements"]} == {"plain", "depth 2"}
    assert (tmp_path / "sweep.html").read_text().count("<svg") == 4
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
