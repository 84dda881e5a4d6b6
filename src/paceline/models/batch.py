"""One step's tokens as the model sees them: flat, ragged, grouped by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.kernels.parallel import Phase

Segments = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a step.

    `segments` is int64 [S, 4] on the host: q_begin, q_len, start, row of each row's tokens in the flat
    order.
    """

    token_ids: torch.Tensor  # int64 [M]
    positions: torch.Tensor  # int64 [M]
    segments: Segments

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.token_ids)


class LayerAttention(Protocol):
    """Turns one layer's projections into what its tokens attend to."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[M, (heads + 2 kv_heads) D] before RoPE and q/k norm, of any float type, to [M, heads D] of any."""
        ...


class Attention(LayerAttention, Protocol):
    """Owns the K/V cache: writes the batch's K and V, and attends."""

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers share. Called once a step, before any layer."""
        ...


class BindableAttention(Attention, Protocol):
    """An attention whose work on fixed buffers can be prepared as a phase of a program."""

    def bind(self, layer: int, qkv: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Phase:
        """The phase that does `layer` for the batch of `begin`: fp32 `qkv` + `bias` to fp32 `out`."""
        ...
