"""A tiny target with random weights, a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_folder
from tiny_tokenizers import write_tokenizer_folder

from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights, load_weights
from paceline.tokenizer import Tokenizer, load_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    write_tokenizer_folder(folder, chat_template=CHAT_TEMPLATE, eos_token="<|end|>")
    tokenizer = load_tokenizer(folder)
    write_folder(
        folder,
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=8,
        hidden_size=64,
        intermediate_size=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_ids[0],
    )
    return folder


@pytest.fixture(scope="session")
def target_model(target_folder: Path) -> tuple[ModelConfig, Weights]:
    with open_checkpoint(target_folder) as checkpoint:
        weights = load_weights(checkpoint, dtype=torch.float32, device="cpu", packed=False)
        return checkpoint.config, weights


@pytest.fixture(scope="session")
def tokenizer(target_folder: Path) -> Tokenizer:
    return load_tokenizer(target_folder)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny matrices gain nothing from threads and lose much where the machine is shared."""
    torch.set_num_threads(1)
