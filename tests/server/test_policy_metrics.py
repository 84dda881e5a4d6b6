"""What `/metrics` says of the policy; the dashboard and the documents name what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import Served, eventually
from test_http import TEXT, post, text_body

from paceline.engine.stats import PolicyStats
from paceline.policy import Reason
from paceline.server.speculation_metrics import PolicyMetrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
PREFIX = "paceline:"


def samples(served: Served) -> dict[tuple[str, ...], float]:
    """Values by name, without prefix, and labels' values, by the labels' names in order."""
    text = served.client.get("/metrics").text
    return {
        (sample.name.removeprefix(PREFIX), *(v for k, v in sample.labels.items() if k != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_steps_are_counted_where_they_ran(served: Served) -> None:
    name = "spec_decode_num_steps_total"
    before = samples(served)
    assert {key[2] for key in before if key[0] == name} == {reason.value for reason in Reason}
    assert {key[1] for key in before if key[0] == name} == set(map(str, range(9)))
    post(served, TEXT, text_body("abc", max_tokens=12, speculation={"depth": 5}))
    post(served, TEXT, text_body("abc", max_tokens=12))  # at the server's depth
    assert eventually(lambda: samples(served)[(name, "2", "pays")] >= before[(name, "2", "pays")] + 4)
    after = samples(served)
    assert after[(name, "5", "pinned")] == before[(name, "5", "pinned")] + 2
    seconds = "spec_decode_step_seconds_total"
    assert after[(seconds, "pinned")] > before[(seconds, "pinned")]


def test_a_trace_is_written_to_its_end(serve: Callable[..., Served], tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    served = serve("--trace", str(path))
    post(served, TEXT, text_body("abc", max_tokens=12))
    served.stop()  # within the half second after which it would have been written anyway
    header, *steps = map(json.loads, path.read_text().splitlines())
    assert header["kind"] == "steps"
    assert [step["rows"] for step in steps] == [[[0, 2, 2, None, 8]]] * 4


def numbers(metrics: PolicyMetrics, stats: PolicyStats) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("paceline:spec_decode_"), *tuple(sample.labels.values())[1:]): sample.value
        for family in metrics.families(stats, max_depth=2)
        for sample in family.samples
        if sample.value
    }


def test_every_number_has_its_name_and_goes_on_with_another_engine() -> None:
    metrics = PolicyMetrics("m")
    stats = PolicyStats(
        steps={"pays": [0, 0, 7], "guard": [2]},
        seconds={"pays": 0.5},
        num_controls=2,
        num_shadow_steps=3,
        num_shadow_drafts=12,
        predicted_seconds=0.4,
        measured_seconds=0.5,
        plain_seconds=0.75,
        decoding_seconds=0.25,
        num_reentry_rounds=4,
        num_reentry_drafted=8,
        num_reentry_accepted=5,
        reentry_accepted_per_pos=[3, 2],
        num_guard_trips=1,
        error="ValueError: no",
        drift=1.5,
        acceptance=[0.75, 0.5],
    )
    once = {
        ("num_steps_total", "pays", "2"): 7,
        ("num_steps_total", "guard", "0"): 2,
        ("step_seconds_total", "pays"): 0.5,
        ("num_control_steps_total",): 2,
        ("num_shadow_steps_total",): 3,
        ("num_shadow_draft_tokens_total",): 12,
        ("predicted_seconds_total",): 0.4,
        ("measured_seconds_total",): 0.5,
        ("plain_seconds_total",): 0.75,
        ("decoding_seconds_total",): 0.25,
        ("num_reentry_drafts_total",): 4,
        ("num_reentry_draft_tokens_total",): 8,
        ("num_reentry_accepted_tokens_total",): 5,
        ("num_reentry_accepted_tokens_per_pos_total", "0"): 3,
        ("num_reentry_accepted_tokens_per_pos_total", "1"): 2,
        ("num_guard_trips_total",): 1,
        ("policy_failed",): 1,
        ("cost_drift",): 1.5,
        ("believed_acceptance", "0"): 0.75,
        ("believed_acceptance", "1"): 0.5,
    }
    assert numbers(metrics, stats) == once
    assert numbers(metrics, stats) == once
    after = numbers(metrics, PolicyStats(steps={"pays": [0, 0, 1]}, num_guard_trips=0))
    assert after[("num_steps_total", "pays", "2")] == 8
    assert after[("num_guard_trips_total",)] == 1
    assert ("cost_drift",) not in after  # this policy knows no costs


def names(served: Served) -> set[str]:
    text = served.client.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len(families) > 40
    return {sample.name for family in families for sample in family.samples} | {f.name for f in families}


@pytest.fixture(scope="module")
def dashboard() -> list[str]:
    """The queries of all panels."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_there_is(served: Served, dashboard: list[str]) -> None:
    asked = {name for query in dashboard for name in re.findall(r"paceline:\w+", query)}
    assert len(asked) > 20
    assert asked - names(served) == set()


def test_a_counter_is_never_shown_as_it_stands(dashboard: list[str]) -> None:
    for query in dashboard:
        plain = re.sub(r"(rate|increase)\([^()]*\[[^\]]*\]\)", "", query)
        assert "_total" not in plain, query


def test_every_metric_is_described(served: Served) -> None:
    pages = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "speculation.md")
    )
    shown = set(re.findall(r"`(\w+)(?:\{[^}]*\})?`", pages))
    suffixes = ("_bucket", "_sum", "_count", "_created")
    missing = {
        name
        for name in names(served)
        if name.startswith(PREFIX) and not name.endswith(suffixes)
        if not {name.removeprefix(PREFIX), name.removeprefix(PREFIX) + "_total"} & shown
    }
    assert missing == set()
