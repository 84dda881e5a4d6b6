"""GGUF blocks rearranged for the packed kernels: the same codes and scales in another order.

Knows the block formats of 4-, 6- and 8-bit GGUF tensors; the kernels' layout is `kernels.packed_gemm`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels import packed_gemm as kernels
from paceline.kernels.memory import Arena
from paceline.kernels.packed_gemm import BLOCK
from paceline.kernels.parallel import Kernel
from paceline.kernels.simd import WIDTH
from paceline.models.tensors import Bytes, RawTensor


@dataclass(frozen=True, slots=True)
class _Format:
    gemm: Kernel
    embed: Kernel | None
    bits: int
    block: int


_NARROW = _Format(kernels.gemm_q4, None, 4, 32)
_WIDE = _Format(kernels.gemm_q4_wide, None, 4, 32)
_BYTE = _Format(kernels.gemm_q8, kernels.embed_q8, 8, 32)
_SIX = _Format(kernels.gemm_q6, kernels.embed_q6, 8, 16)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [num_rows, num_columns] in a kernel's layout. Nothing of it was rounded."""

    format: _Format
    num_rows: int
    num_columns: int
    codes: torch.Tensor  # bytes, see kernels.packed_gemm
    scales: torch.Tensor  # float16 or float32 [N/16, K/block, 1 or 2, 16]

    @property
    def gemm(self) -> Kernel:
        """The kernel that multiplies by it."""
        return self.format.gemm

    @property
    def num_bytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights [num_rows, num_columns]: exact in float32."""
        tiles, block = self.num_rows // WIDTH, self.format.block
        if self.format.bits == 4:
            codes = self.codes.view(tiles, -1, 1, 16, WIDTH)
            codes = torch.cat((codes & 15, codes >> 4), dim=2).view(tiles, -1, block, WIDTH)
        else:
            codes = self.codes.view(torch.int8).view(tiles, -1, block, WIDTH)
        scales = self.scales.float()
        weights = codes.float() * scales[:, :, :1]
        if self.format.bits == 4:
            weights += scales[:, :, 1:]
        return weights.permute(0, 3, 1, 2).reshape(self.num_rows, self.num_columns).to(dtype)


def packs(tensors: Sequence[RawTensor]) -> bool:
    """Whether `pack` takes these tensors' rows as one matrix: a kernel has their format, they share it, and
    their sizes fill whole vectors.
    """
    kinds = {t.kind for t in tensors}
    return (
        len(kinds) == 1 and kinds <= _UNPACK.keys()
        and all(t.shape[0] % WIDTH == 0 and t.shape[1] % BLOCK == 0 for t in tensors)
    )  # fmt: skip


def pack(tensors: Sequence[RawTensor], arena: Arena) -> PackedMatrix:
    """One matrix of the tensors' rows, in order, in the arena's memory. They must be what `packs` takes."""
    fmt, to_parts = _UNPACK[tensors[0].kind]
    codes, scales = zip(*(to_parts(t.blocks()) for t in tensors), strict=True)
    num_rows, num_columns = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
    placed = (arena.copy(_lanes(np.concatenate(parts))) for parts in (codes, scales))
    return PackedMatrix(fmt, num_rows, num_columns, *placed)


def _lanes(rows: np.ndarray[tuple[int, int, int], np.dtype[np.generic]]) -> torch.Tensor:
    """[N, blocks, items] as [N/16, blocks, items, 16]."""
    tiled = rows.reshape(-1, WIDTH, *rows.shape[1:]).transpose(0, 2, 3, 1)
    return torch.from_numpy(np.ascontiguousarray(tiled))


_Parts = tuple[np.ndarray[tuple[int, int, int], np.dtype[np.generic]], ...]


def _half(blocks: Bytes, start: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.float16]]:
    """One float16 of each block, [N, blocks, 1]."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def _q4_0(rows: Bytes) -> _Parts:
    blocks = rows.reshape(rows.shape[0], -1, 18)
    d = _half(blocks, 0)
    return blocks[..., 2:], np.concatenate((d, d * np.float16(-8)), axis=-1)  # a power of two: exact


def _q4_1(rows: Bytes) -> _Parts:
    blocks = rows.reshape(rows.shape[0], -1, 20)
    return blocks[..., 4:], np.concatenate((_half(blocks, 0), _half(blocks, 2)), axis=-1)


def _q8_0(rows: Bytes) -> _Parts:
    blocks = rows.reshape(rows.shape[0], -1, 34)
    return blocks[..., 2:].view(np.int8), _half(blocks, 0)


def _q4_k(rows: Bytes) -> _Parts:
    """Super-blocks of 256: two float16, eight 6-bit scales and minima in 12 bytes, 128 bytes of codes."""
    blocks = rows.reshape(rows.shape[0], -1, 144)
    d, d_min = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    low, mid, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=-1)
    minimum = np.concatenate((mid & 63, (high >> 4) | ((mid >> 6) << 4)), axis=-1)
    scales = np.stack((d * scale, -(d_min * minimum)), axis=-1)  # [N, super, 8, 2]
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)  # low nibbles: even block, high: odd
    codes = np.stack((pairs & 15, pairs >> 4), axis=3).reshape(*blocks.shape[:2], 8, 32)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    return packed.reshape(rows.shape[0], -1, 16), scales.reshape(rows.shape[0], -1, 2)


def _q6_k(rows: Bytes) -> _Parts:
    """Super-blocks of 256: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, a float16."""
    blocks = rows.reshape(rows.shape[0], -1, 210)
    shape = blocks.shape[:2]
    low: Bytes = blocks[..., :128].reshape(*shape, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1)
    high: Bytes = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    nibbles = (low & 15).reshape(*shape, 2, 4, 32)
    codes = (nibbles | ((high & 3) << 4)).astype(np.int8) - np.int8(32)
    scales = _half(blocks, 208).astype(np.float32) * blocks[..., 192:208].view(np.int8)
    return codes.reshape(rows.shape[0], -1, 16), scales.reshape(rows.shape[0], -1, 1)


_UNPACK: dict[str, tuple[_Format, Callable[[Bytes], _Parts]]] = {
    "Q4_0": (_NARROW, _q4_0),
    "Q4_1": (_NARROW, _q4_1),
    "Q4_K": (_WIDE, _q4_k),
    "Q6_K": (_SIX, _q6_k),
    "Q8_0": (_BYTE, _q8_0),
}
