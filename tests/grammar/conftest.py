from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import SIZES, randomise
from tiny_model import write_tiny_model

from paceline.tokenizer import Tokenizer, load_tokenizer

VOCAB_SIZE = 272  # more rows than the tokenizer has tokens, as in many models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte-level tokenizer: any text is as likely as any other."""
    import transformers

    made = tmp_path_factory.mktemp("grammar_model")
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "max_position_embeddings": 512}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | {"eos_token_id": 257}))).eval()
    randomise(model)
    model.save_pretrained(made)
    write_tiny_model(made / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (made / "tokenizer" / name).rename(made / name)
    torch.set_num_threads(1)
    return made


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)
