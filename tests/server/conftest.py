from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from served import Served
from tiny_model import tiny_tokenizer

from paceline.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it alive."""
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    code, stderr = server.stop()
    assert code == 0, stderr
    assert "Traceback" not in stderr


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers with other flags, or to be killed."""
    started: list[Served] = []

    def start(*flags: str, own_group: bool = False) -> Served:
        started.append(Served(tmp_path, *flags, own_group=own_group))
        return started[-1]

    yield start
    for server in started:
        server.stop()
