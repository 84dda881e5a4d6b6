"""Random but valid GGUF blocks whose weights have a chosen size, and tensors over them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tiny_models import random_blocks

from paceline.models.tensors import Kind, RawTensor, TensorFile

QUANTIZED: tuple[Kind, ...] = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


def block_len(kind: Kind) -> int:
    """Weights in a block."""
    return int(gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def scaled_blocks(kind: Kind, rows: int, columns: int, rms: float, seed: int = 0) -> np.ndarray:
    """Bytes [rows, bytes per row] of a matrix with any codes and with weights of root mean square `rms`."""
    data = random_blocks(kind, rows, columns, seed)
    blocks = data.reshape(rows, columns // block_len(kind), -1)
    factor = rms / float(np.sqrt(np.square(gguf.dequantize(data, GGMLQuantizationType[kind])).mean()))
    for at in _SCALES[kind]:
        scales = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16).astype(np.float32)
        blocks[:, :, at : at + 2] = (scales * factor).astype(np.float16).view(np.uint8)
    return data


def raw_tensor(path: Path, kind: Kind, blocks: np.ndarray) -> RawTensor:
    """The blocks as a tensor in a file of their own."""
    path.write_bytes(blocks.tobytes())
    weights, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return RawTensor(
        path.stem, (blocks.shape[0], blocks.shape[1] // size * weights), kind, TensorFile(path), 0
    )
