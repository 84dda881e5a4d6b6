from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_hf

from paceline.config import DEFAULT_MODEL
from paceline.kernels.parallel import Team
from paceline.models.hub import resolve_model


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """OpenMP's barriers cost more than tiny matrices do, above all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


@pytest.fixture(scope="session")
def hf_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """hf_models(variant): a variant's folder and transformers' model, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(variant: str) -> tuple[Path, Any]:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            made[variant] = folder, write_hf(folder, variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched into the user's cache the first time."""
    return resolve_model(DEFAULT_MODEL, progress=False)
