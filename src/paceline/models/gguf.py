"""A GGUF file as a checkpoint: names, row order and configuration turned into Hugging Face's.

Does not know how blocks are decoded (`tensors`) nor how the header is laid out (`gguf_header`).
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.gguf_header import GgufHeader, GgufTensorInfo, read_gguf_header
from paceline.models.config import ModelConfig, config_from_gguf
from paceline.models.tensors import BLOCKS, Kind, RawTensor, TensorFile
from paceline.tokenizer import gguf_eos_token_ids

ROPE_FACTORS = "rope_freqs.weight"

_KIND_OF_TYPE: dict[int, Kind] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    8: "Q8_0",
    12: "Q4_K",
    14: "Q6_K",
    30: "BF16",
}
# ggml's names of the rest, for messages.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_TOP_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, RawTensor], TensorFile]:
    """Open a GGUF file: its configuration, its tensors under HF names, and the file to close.

    Raises:
        CheckpointError: truncated, or not a GGUF file.
        UnsupportedModelError: an architecture, key or tensor type that Paceline does not run.
    """
    header = read_gguf_header(path)
    kinds = {info.name: _kind(header, info) for info in header.tensors}
    _check_size(header, kinds)
    file = TensorFile(path)
    try:
        config = config_from_gguf(
            header.metadata,
            {info.name: info.shape for info in header.tensors},
            _rope_factors(header, kinds, file),
            gguf_eos_token_ids(header.metadata),
        )
        # llama.cpp's converter interleaves q and k for the llama architecture only.
        interleaved: dict[str, int] = {}
        if header.metadata["general.architecture"] == "llama":
            interleaved = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        tensors = [
            _tensor(info, kinds[info.name], file, interleaved)
            for info in header.tensors
            if info.name != ROPE_FACTORS
        ]
    except BaseException:
        file.close()
        raise
    return config, {tensor.name: tensor for tensor in tensors}, file


def _kind(header: GgufHeader, info: GgufTensorInfo) -> Kind:
    kind = _KIND_OF_TYPE.get(info.type_id)
    if kind is None:
        name = _OTHER_TYPES.get(info.type_id, f"number {info.type_id}")
        raise UnsupportedModelError(
            f"{header.path}: tensor {info.name} has type {name}, which is not supported; "
            f"supported: {', '.join(BLOCKS)}"
        )
    weights = BLOCKS[kind][0]
    if not info.shape or math.prod(info.shape) == 0 or info.shape[-1] % weights:
        raise CheckpointError(
            f"{header.path}: tensor {info.name} has shape {info.shape}, "
            f"type {kind} needs rows of a multiple of {weights}"
        )
    return kind


def _num_bytes(info: GgufTensorInfo, kind: Kind) -> int:
    weights, size = BLOCKS[kind]
    return math.prod(info.shape) // weights * size


def _check_size(header: GgufHeader, kinds: dict[str, Kind]) -> None:
    end = max((info.offset + _num_bytes(info, kinds[info.name]) for info in header.tensors), default=0)
    if end > header.file_size:
        raise CheckpointError(
            f"{header.path}: truncated: {header.file_size} bytes, "
            f"{end - header.file_size} of {end} are missing"
        )


def _rope_factors(header: GgufHeader, kinds: dict[str, Kind], file: TensorFile) -> tuple[float, ...]:
    for info in header.tensors:
        if info.name == ROPE_FACTORS:
            tensor = RawTensor(info.name, info.shape, kinds[info.name], file, info.offset)
            return tuple(tensor.dequantize().flatten().tolist())
    return ()


def _tensor(info: GgufTensorInfo, kind: Kind, file: TensorFile, interleaved: dict[str, int]) -> RawTensor:
    """The tensor under its HF name. An unknown name is kept, for the schema check to report."""
    name, heads = info.name, 0
    if match := _LAYER.fullmatch(info.name):
        layer, part, suffix = match.groups()
        name = f"layers.{layer}.{_LAYER_NAMES[part]}.{suffix}" if part in _LAYER_NAMES else info.name
        heads = interleaved.get(part, 0)
    elif (match := _TOP.fullmatch(info.name)) and match[1] in _TOP_NAMES:
        name = f"{_TOP_NAMES[match[1]]}.{match[2]}"
    if heads and info.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{file.path}: tensor {info.name}: {info.shape[0]} rows do not divide into {heads} heads"
        )
    return RawTensor(name, info.shape, kind, file, info.offset, heads)
