"""The load changes: what is seen of it, on an engine whose costs are known."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from priced_engine import Clock, PricedEngine, Prices, Words, built, prompts

from paceline.bench import load_steps
from paceline.bench.arms import arm_of
from paceline.bench.load_steps import Bin, Phase, Profile, follow, jobs_of, warm_up
from paceline.bench.local import Launched, LocalTarget
from paceline.bench.report import About
from paceline.bench.sweep import Failure
from paceline.bench.workload import Workload
from paceline.config import EngineConfig

PRICES = Prices()
PHASES = (Phase(1, 20.0), Phase(16, 20.0), Phase(1, 20.0))
CHOOSE: dict[str, Callable[[int], int]] = {
    "plain": lambda rows: 0,
    "depth 2": lambda rows: 2,
    "auto": lambda rows: 2 if rows < 8 else 0,
}


def course(name: str) -> list[Bin]:
    clock = Clock()
    engine = PricedEngine(clock, PRICES, CHOOSE[name], 0 if name == "plain" else 4)
    target = LocalTarget(Launched(EngineConfig(), built(engine)), Words(), None, clock)  # type: ignore[arg-type]
    workload = Workload(prompts(), 32, 1)
    warm_up(target, jobs_of(workload, 0.0))
    assert not engine.live
    bins = follow(target, PHASES, jobs_of(workload, 0.0), clock)
    assert not engine.live, "what is open at the end is given up"
    return bins


@pytest.fixture(scope="module")
def courses() -> dict[str, list[Bin]]:
    return {name: course(name) for name in CHOOSE}


def within(bins: list[Bin], begin: float, end: float) -> list[Bin]:
    """Those wholly inside, and behind the requests that a phase left."""
    return [b for b in bins if begin + 3.0 <= b.time <= end]


@pytest.mark.parametrize("name", CHOOSE)
@pytest.mark.parametrize(("begin", "rows"), [(0.0, 1), (20.0, 16), (40.0, 1)])
def test_each_phase_runs_at_its_load(
    courses: dict[str, list[Bin]], name: str, begin: float, rows: int
) -> None:
    bins = within(courses[name], begin, begin + 20.0)
    assert len(bins) > 20
    depth = CHOOSE[name](rows)
    mean = sum(b.rate for b in bins) / len(bins)
    assert mean == pytest.approx(PRICES.rate(rows, depth), rel=0.08)
    for b in bins:
        # Sixteen answers that began together end together: for a step or two few rows decode.
        assert b.mean_depth == pytest.approx(depth, abs=0.05)
        if rows == 1:
            assert b.num_running <= 1  # 0 when an answer ended in the bin's last step
            assert (b.acceptance is None) == (depth == 0)
            assert b.acceptance is None or 0.2 < b.acceptance < 0.6  # (0.5 + 0.25) / 2 of those drafted


def test_requests_under_way_are_finished_when_the_load_falls(courses: dict[str, list[Bin]]) -> None:
    after = [b.num_running for b in courses["plain"] if b.time > 40.0]
    assert after[0] > 1
    assert after[-1] == 1


def test_the_report_of_a_profile(courses: dict[str, list[Bin]]) -> None:
    arms = [arm_of("plain"), arm_of("2"), arm_of("auto"), arm_of("3")]
    about = About(
        "0", {"cpu": "abacus"}, "model", "head", "answers", "paceline sweep --profile step", "today", {}
    )
    failures = [Failure("depth 3", None, "no luck")]
    profile = Profile(about, arms, PHASES, courses, failures, is_complete=False)
    read = json.loads(load_steps.to_json(profile))
    assert read["kind"] == "profile"
    assert len(read["courses"]["auto"]) == len(courses["auto"])
    assert read["courses"]["plain"][0]["acceptance"] is None
    text = load_steps.to_text(profile)
    assert "auto: 1 in flight: " in text
    assert "at depth 2.0; 16 in flight: " in text
    assert text.splitlines()[-2:] == [
        "depth 3 failed: no luck",
        "interrupted: this is what was measured until then",
    ]
    html = load_steps.to_html(profile)
    assert html.count("<svg") == 3
    assert "depth 3 failed: no luck" in html
    assert [chart.title for chart in load_steps.charts(profile)] == ["Depth", "Throughput", "Acceptance"]
