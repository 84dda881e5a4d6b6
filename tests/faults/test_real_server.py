"""The scenarios in small, on the real server and the real model. `make test-long` has the large numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import scenarios
from fault_server import Server, real, running

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server, to be left alive and clean."""
    with running(real("--max-num-seqs", "4", "--max-queue", "16", "--quick-death-seconds", "0")) as server:
        yield server
        assert "Traceback" not in "".join(server.log)


def test_clients_that_crash(server: Server) -> None:
    scenarios.hard_closes(server, 8, at_once=8)


@pytest.mark.parametrize("streams", [True, False])
def test_clients_that_leave_before_the_end(server: Server, streams: bool) -> None:
    scenarios.leaves(server, 2, streams)


def test_a_full_queue(server: Server) -> None:
    scenarios.full_queue(server, num_open=20, num_refused=3)


def test_an_engine_killed_under_load(server: Server) -> None:
    scenarios.engine_kills(server, 1, streams=True, num_threads=4)


def test_a_drain(server: Server) -> None:
    scenarios.drain(server, 3)  # the last one: it ends the server


def test_a_pool_of_three_pages() -> None:
    with running(real("--kv-cache-tokens", "48", "--max-num-seqs", "4", "--max-model-len", "48")) as server:
        scenarios.tiny_pool(server, 12)
