"""Sweeps over engines whose costs are known: throughput, crossovers, verdicts must come out as computed."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from priced_bench import CONFIG, LOADS, PRICES, Bench
from priced_engine import Clock, PricedEngine, Words, built, prompts

from paceline.bench import page, report
from paceline.bench.arms import Arm, arm_of
from paceline.bench.local import Engines, Launched, LocalTarget
from paceline.bench.report import About, Report
from paceline.bench.summary import Summary, summarize
from paceline.bench.sweep import Sweep, Target, show_left
from paceline.bench.workload import Column, Work, Workload
from paceline.config import EngineConfig
from paceline.errors import ConfigError, EngineDeadError, UnsupportedModelError

DEPTHS = (("plain", 0), ("depth 0", 0), ("depth 1", 1), ("depth 3", 3))
ALWAYS = Arm("always", "adaptive")  # a bad governor: depth 1, whatever the load


@pytest.fixture(scope="module")
def summary() -> Summary:
    bench = Bench(arm_of("plain"), arm_of("0"), arm_of("1"), arm_of("3"), arm_of("auto"), ALWAYS)
    sweep = bench.sweep()
    sweep.run()
    assert sweep.failures == []
    return summarize(bench.arms, sweep.measurements)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("arm", "depth"), DEPTHS)
def test_throughput_is_the_engines(summary: Summary, load: int, arm: str, depth: int) -> None:
    cell = summary.cell(Column(0.0, None, load), arm)
    assert cell is not None
    # First tokens and last blocks cost a little: an answer of 64 tokens has one of each.
    assert cell.rate.median == pytest.approx(PRICES.rate(load, depth), rel=0.05)
    assert cell.tpot.median == pytest.approx(load / PRICES.rate(load, depth), rel=0.05)


def test_crossovers_are_where_the_formula_has_them(summary: Summary) -> None:
    found = {crossover.arm: crossover.at for crossover in summary.crossovers}
    assert set(found) == {"depth 1", "depth 3"}
    assert PRICES.crossover(1) == pytest.approx(10.0)
    for depth in (1, 3):
        at = found[f"depth {depth}"]
        assert at.low <= at.estimate <= at.high
        assert at.estimate == pytest.approx(PRICES.crossover(depth), rel=0.15)


def test_the_verdict_on_a_good_and_a_bad_governor(summary: Summary) -> None:
    ratios = {(v.arm, v.column.concurrency): v for v in summary.verdicts}
    for load in LOADS:
        assert ratios["auto", load].ratio.estimate == pytest.approx(1.0, abs=0.01)
        best = max(PRICES.rate(load, depth) for depth in (0, 1, 3))
        lost = PRICES.rate(load, 1) / best
        assert ratios["always", load].ratio.estimate == pytest.approx(lost, abs=0.04)
        fastest = {arm for arm, depth in DEPTHS if PRICES.rate(load, depth) == best}
        assert ratios["auto", load].best in fastest
    assert summary.averages["auto"].estimate == pytest.approx(1.0, abs=0.01)
    assert summary.averages["always"].estimate < 0.99


def test_acceptance_and_depth_are_the_engines(summary: Summary) -> None:
    cell = summary.cell(Column(0.0, None, 4), "depth 3")
    assert cell is not None
    assert cell.acceptance_per_pos == pytest.approx([0.5, 0.25, 0.125], abs=0.02)
    assert cell.mean_depth == 3.0
    assert cell.accept_len == pytest.approx(1.875, abs=0.03)
    off = summary.cell(Column(0.0, None, 16), "auto")
    assert off is not None
    assert (off.mean_depth, off.accept_len) == (0.0, None)


def test_arms_take_turns_on_equal_work_and_the_second_pass_goes_backwards() -> None:
    bench = Bench(arm_of("plain"), arm_of("1"), arm_of("2"))
    sweep = bench.sweep(loads=(1, 2), num_rounds=2)
    sweep.run()
    rounds = [bench.runs[i : i + 3] for i in range(0, len(bench.runs), 3)]
    assert len(rounds) == 2 * (1 + 2 + 2)
    for turns in rounds:
        assert {name for name, _ in turns} == {"plain", "depth 1", "depth 2"}
        assert len({work for _, work in turns}) == 1
    loads = [turns[0][1].column.concurrency for turns in rounds]
    assert loads == [1, 1, 1, 2, 2, 2, 2, 2, 1, 1]
    first, second = rounds[1], rounds[-2]  # round 1 of one request in both passes
    assert [name for name, _ in second] == [name for name, _ in first][::-1]
    prompts_seen = {turns[0][1].jobs[0].seed for turns in rounds}
    assert len(prompts_seen) == len({m.round_id for m in sweep.measurements}) * 2 + 1
    assert {m.round_id for m in sweep.measurements} == {1, 2}, "the warm-up is not among them"


def test_a_model_or_head_that_cannot_be_loaded_stops_the_sweep() -> None:
    class Unloadable(Bench):
        def open(self, arm: Arm) -> Target:
            if arm.role != "plain":
                raise UnsupportedModelError("no such head")
            return super().open(arm)

    bench = Unloadable(arm_of("plain"), arm_of("1"))
    with pytest.raises(UnsupportedModelError, match="no such head"):
        bench.sweep().run()
    assert bench.runs == []


def test_a_failing_arm_does_not_stop_the_rest() -> None:
    class Broken(Bench):
        def open(self, arm: Arm) -> Target:
            if arm.name == "depth 2":
                raise ConfigError("no drafter at all")
            engine = PricedEngine(self.clock, PRICES, lambda _: 0, 4, 2 if arm.name == "depth 1" else None)
            return LocalTarget(Launched(CONFIG, built(engine)), Words(), arm.depth, self.clock)  # type: ignore[arg-type]

    bench = Broken(arm_of("plain"), arm_of("1"), arm_of("2"))
    sweep = bench.sweep(loads=(1, 2, 4))
    sweep.run()
    assert sweep.is_complete
    [launch, load] = sweep.failures
    assert (launch.arm, launch.column, launch.reason) == ("depth 2", None, "no drafter at all")
    assert (load.arm, load.column) == ("depth 1", Column(0.0, None, 2))
    assert load.reason == "RuntimeError: out of luck"
    measured = {(m.arm, m.column.concurrency) for m in sweep.measurements}
    assert measured == {("plain", 1), ("plain", 2), ("plain", 4), ("depth 1", 1), ("depth 1", 4)}
    assert "depth 2 failed: no drafter at all" in bench.said


def test_a_dead_engine_is_not_asked_again() -> None:
    class Dead:
        num_runs = 0

        def run(self, work: Work):  # type: ignore[no-untyped-def]
            Dead.num_runs += 1
            raise EngineDeadError("it is gone")

    bench = Bench(arm_of("plain"), arm_of("1"))
    sweep = bench.sweep(loads=(1, 2))
    alive = sweep._open_target
    sweep._open_target = lambda arm: Dead() if arm.name == "depth 1" else alive(arm)
    sweep.run()
    assert Dead.num_runs == 1
    assert {m.arm for m in sweep.measurements} == {"plain"}


def test_ctrl_c_leaves_what_was_measured() -> None:
    bench = Bench(arm_of("plain"), arm_of("1"), arm_of("auto"))
    sweep = bench.sweep(loads=(1, 4))
    inner = sweep._pause
    num_turns = 0

    def interrupt(seconds: float) -> None:
        nonlocal num_turns
        num_turns += 1
        if num_turns == 20:
            raise KeyboardInterrupt
        inner(seconds)

    sweep._pause = interrupt
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert not sweep.is_complete
    found = summarize(bench.arms, sweep.measurements)
    assert found.cells
    assert found.verdicts == [], "pass 2 was never reached"
    assert report.INTERRUPTED in report.to_text(_report(bench, sweep))


def test_a_limit_in_time_drops_rounds_but_keeps_two() -> None:
    arms = (arm_of("plain"), arm_of("1"))
    whole = Bench(*arms)
    whole.sweep(num_rounds=8).run()
    for share in (0.5, 0.01):
        bench = Bench(*arms)
        limit = share * whole.clock.now
        sweep = bench.sweep(num_rounds=8, max_seconds=limit)
        sweep.run()
        rounds = {(m.column, m.pass_id, m.round_id) for m in sweep.measurements}
        if share == 0.5:
            assert len(rounds) > 2 * 2 * len(LOADS)
            assert bench.clock.now <= 1.05 * limit
        else:
            assert len(rounds) == 2 * 2 * len(LOADS)


@pytest.mark.parametrize("limit", [None, 1.0])
def test_the_time_left_is_nearly_true(limit: float | None) -> None:
    bench = Bench(arm_of("plain"), arm_of("1"))
    sweep = bench.sweep(loads=(4, 8), num_rounds=4, max_seconds=limit)
    left: list[tuple[float, float]] = []
    told = sweep._left
    sweep._left = lambda *args: left.append((bench.clock.now, told(*args))) or left[-1][1]  # type: ignore[method-assign]
    sweep.run()
    end = bench.clock.now
    for i, (now, seconds) in enumerate(left):
        is_known = i >= (3 if limit else 5)  # before that, nobody has seen 8 requests
        assert seconds == pytest.approx(end - now, rel=0.05 if is_known else 0.6, abs=0.5)
    assert left[-1][1] == 0.0
    assert (show_left(0.2), show_left(89), show_left(200)) == (
        "about 1 s left",
        "about 89 s left",
        "about 3 min left",
    )


# Engines.


def test_fixed_depths_share_an_engine_and_plain_has_its_pages() -> None:
    configs: list[EngineConfig] = []

    def factory(config: EngineConfig):  # type: ignore[no-untyped-def]
        configs.append(config)
        return built(PricedEngine(Clock(), PRICES, lambda _: 0, 0 if config.draft == "none" else 8))

    arms = [arm_of(word) for word in ("plain", "auto", "0", "1", "12")]
    engines = Engines(dataclasses.replace(CONFIG, kv_cache_tokens=None), arms, factory)
    launched = [engines.of(arm) for arm in reversed(arms)]
    assert len(configs) == 3
    assert launched[0] is launched[1] is launched[2]
    assert launched[3] is not launched[0], "what fixed depths do would teach the policy"
    drafting, auto, plain = configs
    assert (drafting.depth, auto.depth) == ("0", "auto")
    assert drafting.max_depth == 12
    assert (drafting.kv_cache_tokens, plain.kv_cache_tokens) == (None, 512 * CONFIG.page_size)
    assert plain.draft == "none"
    assert engines.draft == "priced"


def test_arms_that_cannot_be_launched_say_why() -> None:
    def factory(config: EngineConfig):  # type: ignore[no-untyped-def]
        return built(PricedEngine(Clock(), PRICES, lambda _: 0, 0))

    arms = [arm_of("nosuch"), arm_of("1"), arm_of("plain")]
    engines = Engines(CONFIG, arms, factory)
    with pytest.raises(ConfigError, match="nosuch"):
        engines.of(arms[0])
    with pytest.raises(ConfigError, match="has no drafter"):
        engines.of(arms[1])
    assert engines.of(arms[2]).built.ready.max_depth == 0


def test_more_requests_than_rows_are_refused() -> None:
    config = dataclasses.replace(CONFIG, max_num_seqs=2)
    target = LocalTarget(Launched(config, built(PricedEngine(Clock(), PRICES, lambda _: 0))), Words(), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="3 requests need --max-num-seqs"):
        target.run(Workload(prompts(), 8, 8).work(Column(0.0, None, 3), 0))


# The report.


def _report(bench: Bench, sweep: Sweep) -> Report:
    about = About(
        "0",
        {"cpu": "abacus"},
        "m<odel",
        "head",
        "answers of some length",
        "paceline sweep",
        "today",
        {"rounds": 3},
    )
    found = summarize(bench.arms, sweep.measurements)
    return Report(about, bench.arms, sweep.measurements, sweep.failures, found, sweep.is_complete)


@pytest.fixture(scope="module")
def done() -> Report:
    bench = Bench(arm_of("plain"), arm_of("1"), arm_of("3"), arm_of("auto"))
    sweep = bench.sweep()
    sweep.run()
    return _report(bench, sweep)


def test_json_is_strict_and_whole(done: Report) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    read = json.loads(report.to_json(done), parse_constant=refuse)
    assert (read["format"], read["kind"], read["is_complete"]) == (1, "sweep", True)
    assert len(read["measurements"]) == len(done.measurements)
    assert read["arms"][0] == {"name": "plain", "role": "plain", "url": None}
    assert read["summary"]["averages"]["auto"]["estimate"] == pytest.approx(1.0, abs=0.01)
    one = read["measurements"][0]
    assert set(one) == {"column", "arm", "pass_id", "round_id", "begin", "sample"}


def test_infinities_have_their_stand_ins() -> None:
    assert report.finite({"a": [math.inf, -math.inf, 1.23456789]}) == {"a": [None, 0, 1.23457]}


def test_text_has_the_table_the_crossovers_and_the_verdict(done: Report) -> None:
    text = report.to_text(done)
    assert "tok/s at temperature 0 (against plain: median of the rounds' ratios)" in text
    assert re.search(r"depth 1 \(temperature 0\): faster than plain below (9|10)\.\d requests \(", text)
    assert re.search(r"auto / best of plain and fixed depths: (1\.00|0\.99)\d \(", text)
    gain = 100 * (PRICES.rate(1, 3) / PRICES.rate(1, 0) - 1)
    shown = re.search(r"^ +1 .*\(\+(\d+) %\) .*$", text, re.MULTILINE)
    assert shown is not None
    assert float(shown[1]) == pytest.approx(gain, abs=4)
    assert re.search(r"^ +16 .*\(−\d+ %\)", text, re.MULTILINE)


def test_the_page_is_whole_and_asks_for_nothing(done: Report) -> None:
    html = page.to_html(done)
    assert "m&lt;odel" in html
    tags: list[str] = []
    addresses: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            addresses.extend(v or "" for k, v in attrs if k in ("src", "href"))

    Reader().feed(html)
    assert tags.count("svg") == 5
    assert "script" not in tags
    assert addresses == []
    for svg in html.split("<svg")[1:]:
        root = ET.fromstring("<svg" + svg.partition("</svg>")[0] + "</svg>")
        texts = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
        assert "auto" in texts
        for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= page.WIDTH
                assert 0 <= y <= page.HEIGHT


def test_the_picture_is_a_png(done: Report) -> None:
    from PIL import Image

    data = page.to_png(done)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (4 * page.WIDTH, 2 * page.HEIGHT)
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20
