from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "long.json"
sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "server"), str(ROOT / "benchmarks")]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; run by `make test-long`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests run only when they are asked for by their mark."""
    if "long" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], None]:
    """Keep a passed test's figures in the results file."""
    from common import describe_device

    def keep(figures: dict[str, Any]) -> None:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"name": "long", "rows": []}
        rows = [row for row in results["rows"] if row["part"] != request.node.name]
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        rows.append({"part": request.node.name, **figures, "date": date})
        results = {"name": "long", "device": describe_device(), "command": "make test-long"}
        results["rows"] = sorted(rows, key=lambda row: str(row["part"]))
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")

    return keep
