"""GGUF blocks rearranged for the packed kernels: the same codes and scales in another order.

Knows the block formats of 4-, 6- and 8-bit GGUF tensors. Two families of kernels have a layout each:
`kernels.packed_dot`, where the processor has its instructions, and `kernels.packed_gemm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.kernels import packed_dot, packed_gemm
from paceline.kernels.memory import Arena
from paceline.kernels.packed_gemm import BLOCK
from paceline.kernels.packed_planes import BIAS
from paceline.kernels.parallel import Kernel
from paceline.kernels.simd import WIDTH
from paceline.models.tensors import Bytes, Kind, RawTensor

_Part = np.ndarray[tuple[int, int, int], np.dtype[np.generic]]  # codes or scales [N, blocks, items]
_Parts = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Format:
    gemm: Kernel
    embed: Kernel | None
    bits: int
    block: int
    scratch_floats: Callable[[int, int], int]
    dot: bool  # whether codes lie as `packed_dot` has them


_FLOAT_FORMATS = {
    "4": _Format(packed_gemm.gemm_q4, None, 4, 32, packed_gemm.scratch_floats, False),
    "4 wide": _Format(packed_gemm.gemm_q4_wide, None, 4, 32, packed_gemm.scratch_floats, False),
    "8": _Format(packed_gemm.gemm_q8, packed_gemm.embed_q8, 8, 32, packed_gemm.scratch_floats, False),
    "6": _Format(packed_gemm.gemm_q6, packed_gemm.embed_q6, 8, 16, packed_gemm.scratch_floats, False),
}
_DOT_FORMATS = {
    "4": _Format(packed_dot.dot_q4, None, 4, 32, packed_dot.scratch_floats, True),
    "4 wide": _Format(packed_dot.dot_q4_wide, None, 4, 32, packed_dot.scratch_floats, True),
    "8": _Format(packed_dot.dot_q8, packed_dot.embed_q8, 8, 32, packed_dot.scratch_floats, True),
    "6": _Format(
        packed_dot.dot_q6, packed_dot.embed_q6, 8, 16,
        functools.partial(packed_dot.scratch_floats, block=16), True,
    ),
}  # fmt: skip
HAS_DOT = packed_dot.supported()


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight [num_rows, num_columns] in a kernel's layout. Nothing of it was rounded."""

    format: _Format
    num_rows: int
    num_columns: int
    codes: torch.Tensor  # bytes, see the kernels
    scales: torch.Tensor  # float16 or float32 [N/16, K/block, 1 or 2, 16]

    @property
    def gemm(self) -> Kernel:
        """The kernel that multiplies by it."""
        return self.format.gemm

    @property
    def family(self) -> str:
        """Which kernels multiply by it: "dot" or "float"."""
        return "dot" if self.format.dot else "float"

    def scratch_floats(self, num_tokens: int) -> int:
        """Float32 of scratch that one thread needs for a product, zeroed at first."""
        return self.format.scratch_floats(num_tokens, self.num_columns)

    @property
    def num_bytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, begin: int) -> PackedMatrix:
        """The rows from `begin`, a multiple of 16, on: the same memory."""
        tile = begin // WIDTH
        return replace(
            self, num_rows=self.num_rows - begin, codes=self.codes[tile:], scales=self.scales[tile:]
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights [num_rows, num_columns]: exact in float32."""
        codes = self._codes()
        scales = self.scales.float()
        weights = codes.float() * scales[:, :, :1]
        if self.format.bits == 4:
            weights += scales[:, :, 1:]
        return weights.permute(0, 3, 1, 2).reshape(self.num_rows, self.num_columns).to(dtype)

    def _codes(self) -> torch.Tensor:
        """One code a byte, [N/16, K/block, block, 16]."""
        tiles, block, codes = self.num_rows // WIDTH, self.format.block, self.codes
        if self.format.dot:
            codes = codes.view(tiles, self.num_columns // block, -1, WIDTH, 4).transpose(3, 4)
        codes = codes.reshape(tiles, self.num_columns // block, -1, WIDTH)
        if self.format.bits == 4:
            return torch.cat((codes & 15, codes >> 4), dim=2)
        return (codes ^ BIAS if self.format.dot else codes).view(torch.int8)


def packs(tensors: Sequence[RawTensor]) -> bool:
    """Whether `pack` takes these tensors' rows as one matrix: a kernel has their format, they share it, and
    their sizes fill whole vectors.
    """
    kinds = {t.kind for t in tensors}
    return (
        len(kinds) == 1 and kinds <= _UNPACK.keys()
        and all(t.shape[0] % WIDTH == 0 and t.shape[1] % BLOCK == 0 for t in tensors)
    )  # fmt: skip


def pack(tensors: Sequence[RawTensor], arena: Arena, *, dot: bool = HAS_DOT) -> PackedMatrix:
    """One matrix of the tensors' rows, in order, in the arena's memory. They must be what `packs` takes.

    Args:
        dot: for `packed_dot`, which this processor must have the instructions for, or for `packed_gemm`.
    """
    return _place(tensors[0].kind, [t.blocks() for t in tensors], tensors[0].shape[1], arena, dot)


def pack_dense(weight: torch.Tensor, kind: Kind, arena: Arena, *, dot: bool = HAS_DOT) -> PackedMatrix:
    """A weight [N, K] of any float type, N a multiple of 16 and K of 32, rounded to `kind` by gguf.

    Args:
        kind: Q4_0, Q4_1 or Q8_0.
        dot: see `pack`.
    """
    import gguf

    values = weight.float().contiguous().numpy()
    blocks = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    return _place(kind, [blocks], weight.shape[1], arena, dot)


def _place(kind: Kind, rows: Sequence[Bytes], num_columns: int, arena: Arena, dot: bool) -> PackedMatrix:
    """One matrix of several tensors' rows, as their file has them."""
    name, to_parts = _UNPACK[kind]
    fmt = (_DOT_FORMATS if dot else _FLOAT_FORMATS)[name]
    codes, scales = (np.concatenate(p) for p in zip(*(to_parts(blocks) for blocks in rows), strict=True))
    if fmt.dot and fmt.bits == 8:
        codes = codes.view(np.uint8) ^ np.uint8(BIAS)
    placed_codes = arena.copy(_lanes(codes, 4 if fmt.dot else 1))
    placed_scales = arena.copy(_lanes(scales).squeeze(-1))
    return PackedMatrix(fmt, sum(map(len, rows)), num_columns, placed_codes, placed_scales)


def _lanes(rows: _Part, together: int = 1) -> torch.Tensor:
    """[N, blocks, items] as [N/16, blocks, items / together, 16, together]."""
    tiled = rows.reshape(-1, WIDTH, rows.shape[1], rows.shape[2] // together, together)
    return torch.from_numpy(np.ascontiguousarray(tiled.transpose(0, 2, 3, 1, 4)))


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


_UNPACK: dict[str, tuple[str, Callable[[Bytes], _Parts]]] = {
    "Q4_0": ("4", _q4_0),
    "Q4_1": ("4", _q4_1),
    "Q4_K": ("4 wide", _q4_k),
    "Q6_K": ("6", _q6_k),
    "Q8_0": ("8", _q8_0),
}
