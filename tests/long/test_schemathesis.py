"""Schemathesis reads the server's own description of its API and tries to make it fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_server import fake, running
from tiny_model import write_tiny_model

NUM_REQUESTS = 2000

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_no_request_makes_the_server_fail(
    record: Callable[[str, dict[str, Any]], None], tmp_path: Path
) -> None:
    events = tmp_path / "events.ndjson"
    with running(fake("--max-body-bytes", "100000", model=write_tiny_model(tmp_path / "tiny"))) as server:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--max-examples", "150", "--checks", "not_a_server_error", "--continue-on-failure"),
                *("--phases", "examples,coverage,fuzzing", "--generation-deterministic", "--no-color"),
                *("--report", "ndjson", "--report-ndjson-path", str(events)),
            ],
            cwd=tmp_path,  # it keeps what it found, and would begin with it the next time
            capture_output=True,
            text=True,
            timeout=1500,
        )
        assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
        assert server.is_healthy()
        assert "Traceback" not in "".join(server.log)
    statuses = Counter(statuses_in(events))
    assert sum(statuses.values()) >= NUM_REQUESTS, statuses
    assert all(status < 500 for status in statuses), statuses
    record(
        "schemathesis",
        {
            "engine": "the fake one of tests/server",
            "num_requests": sum(statuses.values()),
            "num_server_errors": sum(num for status, num in statuses.items() if status >= 500),
            "statuses": {str(status): num for status, num in sorted(statuses.items())},
        },
    )


def statuses_in(events: Path) -> list[int]:
    """The status of every response that the report holds, wherever in an event it stands."""
    found: list[int] = []

    def visit(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("status_code"), int):
                found.append(value["status_code"])
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    for line in events.read_text(encoding="utf-8").splitlines():
        visit(json.loads(line))
    return found
