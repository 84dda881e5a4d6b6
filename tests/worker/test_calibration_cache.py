"""Calibrations on disk: what is used again, what is refused and in which words, and who writes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import EngineConfig
from paceline.engine import factory
from paceline.models.builtin import cache_dir
from paceline.policy import CostModel, Curve, Governor
from paceline.worker import calibrated
from paceline.worker.build import build_worker
from paceline.worker.calibrated import Calibrated, calibrate
from paceline.worker.calibration import Samples, measure
from paceline.worker.calibration_cache import (
    Identity,
    RefusedError,
    Stored,
    identity_of_files,
    read,
    write,
)

IDENTITY = Identity(
    settings={"model": "owner/some model", "draft": "ngram", "threads": "2"},
    facts={"version": "1", "processor": "fast", "model_files": "abc"},
)


def costs(scale: float = 1.0) -> CostModel:
    return CostModel(tokens=Curve([(1, scale), (8, 2 * scale)]), drafts={"": (Curve([(1, 0.1)]),)})


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = IDENTITY.path(tmp_path)
    write(path, IDENTITY, costs(), 0.04)
    return path


def test_what_was_stored_is_read(stored: Path) -> None:
    assert read(stored, IDENTITY) == Stored(costs(), 0.04)
    assert stored.name.startswith("some-model-")
    assert [p.name for p in stored.parent.iterdir()] == [stored.name]


def test_a_file_that_does_not_say_its_spread_is_good(stored: Path) -> None:
    content = json.loads(stored.read_text())
    del content["spread"]
    stored.write_text(json.dumps(content))
    assert read(stored, IDENTITY) == Stored(costs(), None)


def test_nothing_stored_is_no_refusal(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json", IDENTITY) is None


def test_settings_have_files_of_their_own(tmp_path: Path) -> None:
    paths = {IDENTITY.path(tmp_path)}
    for name in IDENTITY.settings:
        paths.add(replace(IDENTITY, settings={**IDENTITY.settings, name: "other"}).path(tmp_path))
    assert len(paths) == 1 + len(IDENTITY.settings)
    assert replace(IDENTITY, facts={"version": "2"}).path(tmp_path) in paths  # refused, then replaced


@pytest.mark.parametrize("name", list(IDENTITY.facts))
def test_what_was_measured_on_something_else_is_refused(stored: Path, name: str) -> None:
    other = replace(IDENTITY, facts={**IDENTITY.facts, name: "new"})
    with pytest.raises(RefusedError, match=rf"is for another {name}: {IDENTITY.facts[name]}, this is new$"):
        read(stored, other)


def test_a_fact_that_only_one_of_them_has_is_a_difference(stored: Path) -> None:
    more = replace(IDENTITY, facts={**IDENTITY.facts, "kernels": "new"})
    with pytest.raises(RefusedError, match="another kernels: None, this is new"):
        read(stored, more)
    less = replace(IDENTITY, facts={"version": "1", "processor": "fast"})
    with pytest.raises(RefusedError, match="another model_files: abc, this is None"):
        read(stored, less)


def test_a_foreign_file_under_our_name_is_refused(stored: Path) -> None:
    other = replace(IDENTITY, settings={**IDENTITY.settings, "threads": "4"})
    with pytest.raises(RefusedError, match="another threads: 2, this is 4"):
        read(stored, other)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"null", b"[1]", b'"text"', b"{}", b'{"settings": {}}', b"[" * 100_000],
    ids=lambda content: str(content[:12]),
)
def test_a_file_that_is_none_of_ours_is_damaged(stored: Path, content: bytes) -> None:
    stored.write_bytes(content)
    with pytest.raises(RefusedError, match=r"is damaged$"):
        read(stored, IDENTITY)


def _change(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *outer, last = key.split(".")
        for name in outer:
            content = content[name]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_change("settings", 3), "is damaged$"),
        (_change("facts", None), "is damaged$"),
        (_change("costs", []), "not a mapping with a schema"),
        (_change("costs.schema", 99), "schema must be 1, got 99"),
        (_change("costs.tokens", {}), "tokens: a curve has points and stairs"),
        (_change("costs.tokens.points", [[1, float("nan")]]), "a curve's time must be .* got nan"),
        (_change("costs.tokens.points", [[float("inf"), 1]]), "is damaged: .* whole number, got inf"),
        (_change("costs.tokens.points", [[10**30, 1]]), "size must be 0 to .* got one far beyond"),
        (_change("costs.tokens.points", [[1, 0], [2, 1]]), "tokens: a time must be 1e-09 to"),
        (_change("costs.tokens.points", [[1, -1]]), "tokens: a time must be 1e-09 to"),
        (_change("costs.tokens.points", [[1, 1e308]]), "time must be .* got 1e.308"),
        (_change("costs.tokens.points", [[1, 2], [2, 1]]), "tokens: the largest size must not take less"),
        (_change("costs.tokens.points", [[1, "1"]]), "time must be a number, got '1'"),
        (_change("costs.tokens.stairs", ["a"]), "stair must be a whole number, got 'a'"),
        (_change("costs.tokens.stairs", [None]), "stair must be a whole number, got None"),
        (_change("costs.tokens.stairs", [1.5]), "stair must be a whole number, got 1.5"),
        (_change("costs.drafts", {"": [{"points": [[1, -5.0]], "stairs": []}]}), "drafts: a time must be 0"),
        (_change("costs.context_seconds", 1e308), "context_seconds must be 0 to 1e.06"),
        (_change("spread", -1), "spread must be at least 0"),
        (_change("spread", float("nan")), "spread must be at least 0"),
        (_change("costs.tokens.points", [[2, 1], [1, 1]]), "sizes must rise"),
        (_change("costs.drafts", {}), "drafts must hold a curve"),
        (_change("costs.row_seconds", -1), "row_seconds"),
        (_change("spread", "wide"), "is damaged"),
        (_change("spread", []), "is damaged"),
    ],
)
def test_damaged_costs_are_refused(
    stored: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    content = json.loads(stored.read_text())
    change(content)
    stored.write_text(json.dumps(content))
    with pytest.raises(RefusedError, match=reason):
        read(stored, IDENTITY)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="cannot be read: Is a directory"):
        read(tmp_path, IDENTITY)


def _write_often(path: Path, scale: float) -> None:
    for _ in range(200):
        write(path, IDENTITY, costs(scale), 0.04)


def test_two_processes_leave_a_valid_file(stored: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(stored, float(i))) for i in (2, 3)]
    for writer in writers:
        writer.start()
    seen = {1.0, 2.0, 3.0}
    while any(writer.is_alive() for writer in writers):
        found = read(stored, IDENTITY)
        assert found is not None
        assert found.costs.tokens(1) in seen
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [p.name for p in stored.parent.iterdir()] == [stored.name]


def test_a_write_that_fails_leaves_what_was_there(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space"):
        write(stored, IDENTITY, costs(5.0), 0.04)
    monkeypatch.undo()
    assert read(stored, IDENTITY) == Stored(costs(), 0.04)
    assert [p.name for p in stored.parent.iterdir()] == [stored.name]


def test_files_are_known_by_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    (tmp_path / "config.json").write_bytes(b"{}")
    first = identity_of_files(tmp_path)
    (tmp_path / "README.md").write_text("of no interest")
    assert identity_of_files(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"abcd")
    second = identity_of_files(tmp_path)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    third = identity_of_files(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert len({first, second, third, identity_of_files(tmp_path)}) == 4
    assert identity_of_files(tmp_path / "model.safetensors") != identity_of_files(tmp_path / "other.json")


# From here on with a real worker.


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings = {"draft": "ngram", "max_num_seqs": 4, "max_num_batched_tokens": 32, "threads": 1} | changes
    return EngineConfig(model=str(model), **settings)


def run(config: EngineConfig, **options: Any) -> Calibrated:
    worker, info = build_worker(config)
    return calibrate(worker, info, config, 2, budget_seconds=0.2, **options)


def test_it_is_measured_once(tiny_gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_gguf)
    first = run(config)
    assert first.seconds is not None
    assert first.path.is_relative_to(cache_dir())
    with caplog.at_level(logging.INFO, logger="paceline"):
        second = run(config)
    assert (second.seconds, second.costs, second.spread) == (None, first.costs, first.spread)
    assert "timed" not in caplog.text
    third = run(config, force=True)
    assert third.seconds is not None
    assert run(config).costs == third.costs


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"page_size": 32},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 7},
        {"ngram_max": 3},
        {"reproducible": True},
    ],
    ids=str,
)
def test_what_changes_the_times_is_measured_anew(tiny_gguf: Path, changes: dict[str, Any]) -> None:
    paths = {run(config).path for config in (config_of(tiny_gguf), config_of(tiny_gguf, **changes))}
    assert len(paths) == 2


def test_what_does_not_is_known(tiny_gguf: Path) -> None:
    first = run(config_of(tiny_gguf))
    again = run(config_of(tiny_gguf, max_queue=3, prefix_caching=False, debug=True, kv_cache_tokens=8192))
    assert (again.seconds, again.path) == (None, first.path)


def test_a_stale_file_is_measured_again_and_says_why(
    tiny_gguf: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny_gguf)
    first = run(config)
    monkeypatch.setattr(calibrated, "processor", lambda: "another one")
    with caplog.at_level(logging.INFO, logger="paceline"):
        second = run(config)
    assert second.path == first.path
    assert second.seconds is not None
    assert "the model is timed again:" in caplog.text
    assert "is for another processor: " in caplog.text
    assert run(config).seconds is None


@pytest.mark.parametrize(("spread", "is_noisy"), [(0.02, False), (0.4, True)])
def test_a_noisy_calibration_is_kept_with_a_warning(
    spread: float,
    is_noisy: bool,
    tiny_gguf: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def noisy(*args: Any, **kwargs: Any) -> Samples:
        return measure(*args, **kwargs)._replace(spread=spread)

    monkeypatch.setattr(calibrated, "measure", noisy)
    found = run(config_of(tiny_gguf), force=True)
    assert found.spread == spread
    assert run(config_of(tiny_gguf)).spread == spread
    assert ("timings of the same step differ by 40 %" in caplog.text) is is_noisy


def test_where_nothing_can_be_stored_it_says_so_and_goes_on(
    tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    found = run(config_of(tiny_gguf, precision="bf16"))
    assert found.costs.is_measured
    refused, warning = [r.getMessage() for r in caplog.records if str(found.path) in r.getMessage()]
    assert refused.startswith("the model is timed again: ")
    assert warning == (
        f"cannot write {found.path}, so the model is timed again at the next start: Not a directory"
    )


def governors_costs(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> list[CostModel | None]:
    """What the governors of an engine were given."""
    given: list[CostModel | None] = []
    init = Governor.__init__

    def watched(self: Governor, costs: CostModel | None = None, *args: Any, **more: Any) -> None:
        given.append(costs)
        init(self, costs, *args, **more)

    monkeypatch.setattr(Governor, "__init__", watched)
    factory.build(config)
    return given


def test_an_engine_starts_with_measured_costs(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (given,) = governors_costs(config_of(tiny_gguf), monkeypatch)
    assert given is not None
    assert given.is_measured
    assert given.tokens(1) > 0


@pytest.mark.parametrize(
    "changes",
    [{"calibration": False}, {"depth": "2"}, {"policy": "ema"}, {"draft": "none"}, {"max_depth": 0}],
    ids=str,
)
def test_nothing_is_timed_for_nobody(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    given = governors_costs(config_of(tiny_gguf, **changes), monkeypatch)
    assert given == ([None] if "calibration" in changes else [])
    assert not (cache_dir() / "calibrations").exists()


def test_an_engine_starts_all_the_same_if_timing_fails(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr(calibrated, "measure", fail)
    given = governors_costs(config_of(tiny_gguf), monkeypatch)
    assert given == [None]
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.getMessage() == (
        "the model could not be timed, costs are learnt while serving: out of luck"
    )
