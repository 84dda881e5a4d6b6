"""The recorded traces: they can be replayed, and the committed result is what comes out."""

from __future__ import annotations

import json

import pytest

import replay
from common import RESULTS, Results


@pytest.fixture(scope="module")
def results() -> Results:
    made = Results("replay", [], is_fresh=True)
    for name in replay.TRACES:
        made.put(name, replay.measure(name))
    return made


def test_the_governor_loses_little_on_any(results: Results) -> None:
    assert [bar.name for bar in replay.bars(results) if not bar.is_met] == []


def test_the_committed_result_is_of_this_code(results: Results) -> None:
    """Nothing in it depends on the machine: after a change of a policy, run benchmarks/replay.py."""
    committed = json.loads((RESULTS / "replay.json").read_text(encoding="utf-8"))
    for row in committed["rows"]:
        now = results.row(row["part"])
        assert now is not None
        for spec, shown in row["policies"].items():
            assert now["policies"][spec]["steps_by_reason"] == shown["steps_by_reason"]
            assert now["policies"][spec]["tokens_per_second"] == pytest.approx(
                shown["tokens_per_second"], 1e-3
            )
