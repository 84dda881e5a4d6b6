from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("draft", "engine"))

from speculation_target import Target
from tiny_targets import float_config, packed_config, write_float, write_head, write_packed


@pytest.fixture(autouse=True, scope="session")
def _own_threads_and_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `build_worker` measures and sets stays here; one thread, for a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in float32."""
    return write_float(tmp_path_factory.mktemp("float"))


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for it."""
    return write_head(tmp_path_factory.mktemp("head") / "head", float_config())


@pytest.fixture(scope="session")
def target(folder: Path, head: Path) -> Target:
    """Exact, with its head in torch, many rows and small pages."""
    settings = {"max_num_seqs": 160, "max_num_batched_tokens": 1024, "page_size": 4, "kv_cache_tokens": 8192}
    return Target(folder, head, exact=True, precision="fp32", max_queue=20_000, **settings)


@pytest.fixture(scope="session")
def packed_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised model and a head for it, both for the kernels."""
    made = tmp_path_factory.mktemp("packed")
    return write_packed(made), write_head(made / "head", packed_config(), head_dim=32)
