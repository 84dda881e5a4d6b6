"""Tensors still in their file: shape and type at once, bytes when asked for.

Bytes are read with plain reads into fresh memory, not mapped: nothing of the file stays in the
process's own memory (a mapped weight file counts in PSS), a file that shrinks is an error and
not a SIGBUS, and `close()` has nothing to wait for. One tensor is in memory at a time.

Does not know: which tensors a model needs (`schema`) or what kernels want (the packer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Kind = Literal["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# kind -> (weights in a block, bytes in a block)
BLOCKS: dict[Kind, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}

Bytes = npt.NDArray[np.uint8]


class TensorFile:
    """An open weight file. Closing it twice is fine; reading after that is a ValueError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)

    def read(self, offset: int, num_bytes: int) -> Bytes:
        """Bytes [offset, offset + num_bytes) as a new array.

        Raises:
            CheckpointError: the file ends before them.
        """
        out = np.empty(num_bytes, dtype=np.uint8)
        view = out.data
        self._file.seek(offset)
        done = 0
        while done < num_bytes:
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointError(
                    f"{self.path}: truncated: {num_bytes - done} bytes missing at {offset + done}"
                )
            done += count
        return out

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor in a file, under its Hugging Face name and in Hugging Face's row order.

    `interleaved_heads`: the file holds the rows of this many heads with each head's two RoPE
    halves interleaved (llama.cpp's order for q and k); reading puts them back. Rows move whole,
    so quantised blocks stay exactly as they are in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    file: TensorFile
    offset: int
    interleaved_heads: int = 0

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        weights, size = BLOCKS[self.kind]
        return math.prod(self.shape) // weights * size

    @property
    def is_quantized(self) -> bool:
        return BLOCKS[self.kind][0] > 1

    def blocks(self) -> Bytes:
        """The bytes as they are in the file: uint8 [shape[0], bytes per row], a fresh array.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        rows = self.file.read(self.offset, self.num_bytes).reshape(self.shape[0], -1)
        if not self.interleaved_heads:
            return rows
        pairs = rows.reshape(self.interleaved_heads, -1, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def dequantize(self) -> torch.Tensor:
        """The weights: fp32 [shape], exact for the float kinds, by `gguf.dequantize` for the others.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        import torch

        blocks = self.blocks()
        if self.is_quantized:
            import gguf

            weights = gguf.dequantize(blocks, gguf.GGMLQuantizationType[self.kind])
            return torch.from_numpy(weights).view(self.shape)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.kind]
        return torch.from_numpy(blocks).view(-1).view(dtype).view(self.shape).to(torch.float32)
