"""Tiny random models and draft heads on disk, byte-level tokenizer included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draft_cases import random_draft
from tiny_checkpoints import SIZES, quantized_config, randomise, write_quantized
from tiny_model import write_tiny_model

from paceline.draft.checkpoint import export_draft
from paceline.draft.config import Eagle3Config
from paceline.models.config import ModelConfig, config_from_hf

VOCAB_SIZE, EOS = 272, 257
_SMALL: dict[str, Any] = SIZES | {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS,
}


def write_float(folder: Path) -> Path:
    """A Llama in float32 with a tokenizer of a token a byte: any text is as likely as any other."""
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL)).eval()
    randomise(model)
    model.save_pretrained(folder)
    write_tiny_model(folder / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).rename(folder / name)
    return folder


def float_config() -> ModelConfig:
    """What `write_float` writes."""
    return config_from_hf({**_SMALL, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"})


def write_packed(folder: Path) -> Path:
    """A Qwen2 in Q8_0 of 208 tokens."""
    return write_quantized(folder / "m.gguf", "qwen2", lambda name: "Q8_0")


def packed_config() -> ModelConfig:
    """What `write_packed` writes."""
    return quantized_config("qwen2")


def write_head(folder: Path, target: ModelConfig, **changes: Any) -> Path:
    """A random head for a target; it reads the streams after the first and the last layer."""
    config = Eagle3Config(
        **{
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": 96,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "rms_norm_eps": target.rms_norm_eps,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": 128,
            "max_position_embeddings": target.max_position_embeddings,
            "rope": target.rope,
            "capture_layer_ids": (0, target.num_layers - 1),
            **changes,
        }
    )
    export_draft(random_draft(config), folder)
    return folder
