"""Tiny random models of every architecture: transformers' folders, and quantised GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf_blocks import scaled_blocks
from tiny_models import add_field, gguf_name, hf_config, llama_cpp_permute

from paceline.models.config import ModelConfig, config_from_hf
from paceline.models.schema import expected_shapes
from paceline.models.tensors import Kind

SIZES: dict[str, Any] = {
    "vocab_size": 208,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# name -> transformers' class prefix and what differs from SIZES
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("Llama", {"rope_scaling": LLAMA3}),
    "llama_linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama_yarn": ("Llama", {"rope_scaling": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True}),
    "odd_heads": ("Llama", {"head_dim": 24, "num_key_value_heads": 1}),  # no CPU kernel for these
}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights of a size that keeps activations near 1; biases and norms that cannot be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(noise * 0.3 + (1.0 if bool((parameter == 1).all()) else 0.0))


def write_hf(folder: Path, variant: str) -> Any:
    """Save a variant with `save_pretrained`; returns transformers' model."""
    import transformers

    prefix, changes = VARIANTS[variant]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def quantized_config(arch: str, **changes: Any) -> ModelConfig:
    """What `write_quantized` writes: rows of 256, for K-quants."""
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} | changes
    return config_from_hf(hf_config(architectures=[f"{name}ForCausalLM"], **sizes))


def write_quantized(path: Path, arch: str, kind_of: Callable[[str], Kind], **changes: Any) -> Path:
    """A GGUF whose matrices have the type that `kind_of` gives for their Hugging Face name."""
    config = quantized_config(arch, **changes)
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
    }.items():
        add_field(writer, f"{arch}.{key}", value)
    add_field(writer, "tokenizer.ggml.eos_token_id", 2)
    for seed, (name, shape) in enumerate(expected_shapes(config).items()):
        kind = kind_of(name) if len(shape) == 2 else "F32"
        rows = _random_rows(name, shape, kind, seed)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads and arch == "llama":
            rows = llama_cpp_permute(rows, heads)
        _add(writer, gguf_name(name), kind, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_rows(name: str, shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if len(shape) == 1:
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return (mean + 0.3 * rng.normal(size=shape)).astype(np.float32)
    rms = shape[1] ** -0.5
    if kind in ("F32", "F16", "BF16"):
        return (rms * rng.normal(size=shape)).astype(np.float32)
    return scaled_blocks(kind, *shape, rms, seed)


def _add(writer: gguf.GGUFWriter, name: str, kind: Kind, rows: np.ndarray) -> None:
    if kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(rows))
    elif kind == "F16":
        writer.add_tensor(name, rows.astype(np.float16))
    else:
        blocks = gguf.quantize(rows, GGMLQuantizationType[kind]) if kind == "BF16" else rows
        writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=GGMLQuantizationType[kind])
