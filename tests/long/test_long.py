"""The scenarios of tests/faults in large; their figures go to benchmarks/results/long.json."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import scenarios
from fault_server import Server, real, running

pytestmark = [pytest.mark.long, pytest.mark.model, pytest.mark.timeout(1800)]

Record = Callable[[str, dict[str, Any]], None]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server through all that must leave it alive and clean; the last test drains it."""
    with running(
        real(
            "--quick-death-seconds", "0", "--max-num-seqs", "16", "--max-queue", "48", "--drain-seconds", "60"
        )
    ) as server:
        yield server
        assert "Traceback" not in "".join(server.log)


def test_200_connections_closed_hard(server: Server, record: Record) -> None:
    record("hard closes", scenarios.hard_closes(server, 200))


def test_clients_that_leave_a_stream(server: Server, record: Record) -> None:
    figures = scenarios.leaves(server, 30, streams=True)
    assert figures["median_tokens_after"] <= 2, figures
    record("leaving a stream", figures)


def test_clients_that_leave_before_their_answer(server: Server, record: Record) -> None:
    figures = scenarios.leaves(server, 30, streams=False)
    assert figures["median_tokens_after"] <= 2, figures
    record("leaving an answer", figures)


@pytest.mark.parametrize("streams", [True, False])
def test_ten_engine_kills_under_load(server: Server, record: Record, streams: bool) -> None:
    record(
        f"engine kills, {'streams' if streams else 'whole answers'}",
        scenarios.engine_kills(server, 10, streams),
    )


def test_a_full_queue_and_a_drain(server: Server, record: Record) -> None:
    figures = scenarios.full_queue(server, num_open=64, num_refused=50)
    record("queue and drain", figures | scenarios.drain(server, 16))


def test_three_pages_under_50_requests(record: Record) -> None:
    with running(real("--kv-cache-tokens", "48", "--max-model-len", "48")) as server:
        record("three pages", scenarios.tiny_pool(server, 50))


def test_memory_over_5000_short_requests(record: Record) -> None:
    # The warm-up fills the pool and the caches of programs by size, which are bounded and take their time.
    pool = ("--kv-cache-tokens", "2048", "--max-model-len", "1024")
    with running(real("--no-debug", "--log-level", "warning", *pool)) as server:
        record("memory", scenarios.memory_slope(server, 5000, warm_up=3000, most=500))
