"""The records, what importing costs, and the page that explains it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.policy import Decision, Load, Observation, PolicyError, Reason, RowView

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "policy.md"


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_importing_it_loads_the_standard_library_only() -> None:
    script = """
import sys
before = set(sys.modules)
import paceline.policy
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"paceline"}))
print(*sorted(name for name in sys.modules if name.startswith("paceline.") and "policy" not in name))
"""
    foreign, ours = run_python(script).split("\n")[:2]
    assert foreign == ""
    assert ours == "paceline._version"


def test_the_page_runs_and_says_what_it_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    printed = run_python("\n".join(blocks))
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert printed == "".join(shown)


def test_the_page_names_every_reason_and_module() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [reason for reason in Reason if f"`{reason}`" not in text] == []
    modules = {path.stem for path in (ROOT / "src" / "paceline" / "policy").glob("*.py")} - {"__init__"}
    assert [name for name in sorted(modules) if f"`{name}`" not in text] == []


class TestRecords:
    def test_what_a_decision_says(self) -> None:
        rows = (RowView("a", 4), RowView("b", 4))
        decision = Decision(Load(2, 9), rows, (3, 0), Reason.PAYS, predicted_tokens=4.0)
        assert (decision.depth, decision.num_tokens, decision.predicted_gain) == (3, 5, None)
        gain = Decision(Load(2, 9), rows, (3, 0), Reason.PAYS, (), 0, False, 4.0, 0.02, 0.015).predicted_gain
        assert gain == pytest.approx(1.5)
        assert Decision(Load(0, 0), (), (), Reason.CAPACITY).depth == 0

    @pytest.mark.parametrize("name", ["accepted", "verified", "drafted"])
    def test_an_observation_is_of_all_rows(self, name: str) -> None:
        decision = Decision(Load(1, 9), (RowView("a", 4),), (1,), Reason.PAYS)
        values: dict[str, tuple[int, ...]] = {"accepted": (0,)} | {name: (0, 0)}
        with pytest.raises(PolicyError, match=f"{name} has 2 entries"):
            Observation(decision, seconds=0.1, **values)  # type: ignore[arg-type]

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
    def test_time_is_positive(self, seconds: float) -> None:
        decision = Decision(Load(0, 0), (), (), Reason.CAPACITY)
        with pytest.raises(PolicyError, match="seconds"):
            Observation(decision, (), seconds)
