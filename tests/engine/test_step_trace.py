"""`--trace`: what is written can be replayed, is bounded, and never stops anything."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine.policies import make_steering
from paceline.engine.steering import Candidate, Steering
from paceline.engine.trace import MAX_KEYS, StepTrace, check_path
from paceline.errors import ConfigError
from paceline.policy import CostModel, Fixed, PolicyError, fixed_depths, read_trace, replay_trace
from paceline.step import RowResult

COSTS = CostModel.prior()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(steering: Steering, num: int, keys: tuple[str, ...] = ("a", "b"), room: int = 4) -> None:
    """Steps in which the first draft is right, at the policy's depth."""
    for i in range(num):
        rows = [Candidate(key, room, None, 50 + i) for key in keys]
        chosen = steering.decide(rows, 0)
        results = {
            key: RowResult(n, depth, (1, 2)[: 1 + depth], num_drafted=depth, num_verified=depth)
            for n, (key, depth) in enumerate(chosen.depths.items())
        }
        steering.observe(chosen.decision, results, 0.01)


def test_what_was_written_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    config = EngineConfig(depth="3", trace=str(path))
    steering = make_steering(config, max_depth=4, costs=None)
    run(steering, 20)
    run(steering, 5, room=1)  # the end of an answer
    assert steering.trace is not None
    steering.trace.close()
    header, *steps = lines(path)
    assert (header["schema"], header["kind"], header["depths"]) == (1, "steps", [0, 1, 2, 3, 4])
    assert steps[0] == {
        "context_len": 100,
        "num_prompt_tokens": 0,
        "seconds": 0.01,
        "reason": "pays",
        "rows": [[0, 3, 1, None, 4], [1, 3, 1, None, 4]],
    }
    trace = read_trace(lines(path))
    as_served = replay_trace(trace, Fixed(3))
    assert (as_served.tokens, as_served.seconds) == (25 * 4, pytest.approx(0.25))
    assert replay_trace(trace, Fixed(0)).tokens == 25 * 2
    assert list(fixed_depths(trace)) == [0, 1, 2, 3]  # nobody knows of the fourth
    with pytest.raises(PolicyError, match="step 1: a row drafts 4 deep, the trace holds 3"):
        replay_trace(trace, Fixed(4))


def test_a_depth_that_the_scheduler_cut_was_all_the_room_there_was(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t", 2**20, 4, COSTS)
    steering = Steering(Fixed(3), trace)
    chosen = steering.decide([Candidate("a", 4, None, 9)], 0)
    got = RowResult(0, 1, (1,), num_drafted=1, num_verified=1)
    steering.observe(chosen.decision, {"a": got}, 0.01)
    trace.close()
    assert lines(tmp_path / "t")[1]["rows"] == [[0, 1, 0, None, 1]]
    assert replay_trace(read_trace(lines(tmp_path / "t")), Fixed(3)).tokens == 1


def test_steps_without_a_time_are_left_out(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t", 2**20, 4, COSTS)
    steering = Steering(Fixed(0), trace)
    decision = steering.decide([Candidate("a", 4, None, 9), Candidate("b", 4, None, 9)], 0).decision
    got = RowResult(0, 0, (1,))
    steering.observe(decision, {"a": got, "b": got}, None)
    steering.observe(decision, {"a": got}, 0.01)
    trace.close()
    assert len(lines(tmp_path / "t")) == 1


def test_it_rotates_and_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = StepTrace(path, 2**16, 4, COSTS)
    steering = Steering(Fixed(1), trace)
    run(steering, 3000)
    trace.close()
    older = path.with_name("trace.jsonl.1")
    assert {p.name for p in tmp_path.iterdir()} == {path.name, older.name}
    assert 2**16 - 200 < older.stat().st_size <= 2**16
    assert path.stat().st_size <= 2**16
    both = [read_trace(lines(p)).steps for p in (older, path)]
    assert both[0][-1].load.context_len + 2 == both[1][0].load.context_len  # no step is lost between them
    assert both[1][-1].load.context_len == 2 * (50 + 2999)


def test_what_is_there_at_the_start_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    died = '{"schema":1,"kind":"steps"}\n{"of an engine that'
    path.write_text(died)
    StepTrace(path, 2**20, 0, COSTS).close()
    assert (tmp_path / "trace.1").read_text() == died
    assert len(lines(path)) == 1


def test_requests_appear_as_numbers_of_which_few_are_kept(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "t", 2**24, 0, COSTS)
    steering = Steering(Fixed(0), trace)
    for i in range(MAX_KEYS + 100):
        run(steering, 1, ("long", f"cmpl-{i}"))
    trace.close()
    rows = [step["rows"] for step in lines(tmp_path / "t")[1:]]
    assert {row[0][0] for row in rows} == {0}
    assert [row[1][0] for row in rows] == list(range(1, MAX_KEYS + 101))
    assert len(trace._numbers) <= MAX_KEYS
    assert "cmpl" not in (tmp_path / "t").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/trace", "there is no folder .*nowhere"),
        (".", "is not a file"),
        ("/dev/null", "/dev/null is not a file"),
    ],
)
def test_a_file_that_cannot_be_is_refused_at_the_start(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_steering(EngineConfig(trace=str(tmp_path / name)), 0, None)


def test_a_file_that_is_no_trace_is_nobody_elses_loss(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("of years")
    with pytest.raises(ConfigError, match="notes is not a trace, and would be replaced"):
        make_steering(EngineConfig(trace=str(notes)), 0, None)
    assert notes.read_text() == "of years"
    for begun in ("", '{"sch'):
        notes.write_text(begun)
        check_path(notes)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="trace_max_bytes must be at least 65536, got 1"):
        EngineConfig(trace_max_bytes=1)
    with pytest.raises(ConfigError, match="trace must not be empty"):
        EngineConfig(trace="")


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk: writing beyond it fails in the same way."""
    script = f"""
        import logging, resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_step_trace import COSTS, Steering, StepTrace, Fixed, run
        logging.basicConfig()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        trace = StepTrace(Path({str(tmp_path / "t")!r}), 2**20, 4, COSTS)
        steering = Steering(Fixed(1), trace)
        for _ in range(3):
            run(steering, 1000)
            trace._thread.join(0.7)
        assert not trace._thread.is_alive()
        run(steering, 1000)
        assert not trace._queue
        print(sum(map(sum, steering.stats().steps.values())))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "4000\n"
    assert done.stderr.count("tracing is off") == 1
    assert done.stderr.count("\n") == 1
    read_trace(lines(tmp_path / "t"))  # no half line


def test_a_slow_disk_costs_steps_of_the_trace_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.engine.trace.MAX_WAITING", 10)
    monkeypatch.setattr("paceline.engine.trace.INTERVAL", 60.0)
    trace = StepTrace(tmp_path / "t", 2**20, 4, COSTS)
    with caplog.at_level(logging.WARNING):
        run(Steering(Fixed(1), trace), 25)
        trace.close()
    assert len(lines(tmp_path / "t")) == 1 + 10
    assert "lacks 15 steps" in caplog.text
