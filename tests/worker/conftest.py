from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "draft"))

from tiny_checkpoints import write_hf, write_quantized


@pytest.fixture(autouse=True)
def _own_threads_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `build_worker` measures and sets stays in the test."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 208 tokens and a context of 256 in float32."""
    folder = tmp_path_factory.mktemp("tiny_folder")
    write_hf(folder, "llama")
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes in Q8_0, with biases."""
    return write_quantized(tmp_path_factory.mktemp("tiny_gguf") / "m.gguf", "qwen2", lambda name: "Q8_0")
