"""Writes tiny models to disk: HF folders through safetensors, GGUF files through GGUFWriter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from paceline.models.config import ModelConfig, config_from_hf
from paceline.models.schema import expected_shapes

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """HF_CONFIG with `changes`; a value of ... leaves the key out."""
    return {key: value for key, value in (HF_CONFIG | changes).items() if value is not ...}


def random_weights(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Under HF's full names."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_shapes(config).items():
        full_name = name if name.startswith("lm_head") else f"model.{name}"
        weights[full_name] = torch.randn(shape, generator=generator).to(dtype)
    return weights


def write_folder(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, num_files: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    """An HF folder; `num_files` > 1 shards it with an index. Returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    if weights is None:
        weights = random_weights(config_from_hf(config))
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return weights
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        part = dict(list(weights.items())[i::num_files])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weights


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    *head, suffix = name.split(".")
    if head[0] == "layers":
        return f"blk.{head[1]}.{GGUF_NAMES['.'.join(head[2:])]}.{suffix}"
    return f"{GGUF_NAMES['.'.join(head)]}.{suffix}"


def llama_cpp_permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: each head's halves are interleaved."""
    half = weights.shape[0] // num_heads // 2
    return weights.reshape(num_heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid random bytes of a matrix: any bits, but finite scales."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale_bytes = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208], "F16": [0]}.get(
        kind, []
    )
    for at in scale_bytes:
        scales = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales[..., None].view(np.uint8)
    if kind in ("F32", "BF16"):
        values = rng.normal(size=(rows, columns)).astype(np.float32)
        return gguf.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    kind: str = "F32",
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    hidden: int = 64,
    tied: bool = True,
) -> dict[str, np.ndarray]:
    """A two-layer GGUF whose matrices are `kind`. Returns the bytes of every tensor, in HF's order and names.

    `metadata` values of None leave a key out; `drop` and `extra` are tensors under GGUF names.
    """
    config = config_from_hf(
        hf_config(
            architectures=[{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch] + "ForCausalLM"],
            hidden_size=hidden,
            intermediate_size=hidden,
            head_dim=hidden // 4,
            tie_word_embeddings=tied,
        )
    )
    fields = {
        f"{arch}.block_count": 2,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": hidden,
        f"{arch}.feed_forward_length": hidden,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.eos_token_id": 2,
    } | (metadata or {})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        add_field(writer, key, value)
    written = {}
    for seed, (name, shape) in enumerate(expected_shapes(config).items()):
        tensor_kind = kind if len(shape) == 2 else "F32"
        rows = random_blocks(tensor_kind, *(shape if len(shape) == 2 else (shape[0], 1)), seed)
        written[name] = rows
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2]) if arch == "llama" else None
        stored = llama_cpp_permute(rows, heads) if heads else rows
        if gguf_name(name) not in drop:
            _add_tensor(writer, gguf_name(name), stored, tensor_kind, shape)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, rows: np.ndarray, kind: str, shape: tuple[int, ...]
) -> None:
    rows = np.ascontiguousarray(rows)
    if kind == "F32":
        writer.add_tensor(name, rows.view(np.float32).reshape(shape))
    elif kind == "F16":
        writer.add_tensor(name, rows.view(np.float16).reshape(shape))
    else:
        writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
