"""The scenarios of tests/faults in large; their figures go to benchmarks/results/long.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scenarios
from fault_server import real, running

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(1800)]

Record = Callable[[dict[str, Any]], None]


def test_200_connections_closed_hard(record: Record) -> None:
    with running(real()) as server:
        record(scenarios.hard_closes(server, 200))
        assert "Traceback" not in "".join(server.log)


def test_20_engine_kills_under_load(record: Record) -> None:
    with running(real("--quick-death-seconds", "0")) as server:
        record(scenarios.engine_kills(server, 20))
        assert "Traceback" not in "".join(server.log)


def test_three_pages_under_50_requests(record: Record) -> None:
    with running(real("--kv-cache-tokens", "48", "--max-model-len", "48")) as server:
        record(scenarios.tiny_pool(server, 50))


def test_memory_over_5000_short_requests(record: Record) -> None:
    with running(real("--no-debug", "--log-level", "warning")) as server:
        record(scenarios.memory_slope(server, 5000, warm_up=1000))


def test_disconnects_queue_and_drain(record: Record) -> None:
    with running(real("--max-num-seqs", "8", "--max-queue", "32")) as server:
        figures = scenarios.leaves_unstreamed(server, 20)
        figures |= scenarios.full_queue(server, num_open=40, num_refused=50)
        record(figures | scenarios.drain(server, 8))
        assert "Traceback" not in "".join(server.log)
