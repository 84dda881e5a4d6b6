from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_server
import pytest
from fault_server import Server
from tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, for the fake engine."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny_folder_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """Another one, to be damaged."""
    return shutil.copytree(tiny_folder, tmp_path / "copy")


@pytest.fixture
def fake(tiny_folder: Path) -> Iterator[Callable[..., Server]]:
    """Start servers on the fake engine."""
    started: list[Server] = []

    def start(*flags: str, **more: Any) -> Server:
        started.append(fault_server.fake(*flags, model=tiny_folder, **more))
        return started[-1]

    yield start
    for server in started:
        server.client.close()
        server.stop()
