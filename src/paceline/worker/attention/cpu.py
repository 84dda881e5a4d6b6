"""The paged bfloat16 K/V cache on CPU, and attention through the numba kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.kernels.memory import huge_zeros
from paceline.kernels.paged_attention import (
    SEGMENT_FIELDS,
    paged_attention,
    paged_write,
    scratch_floats,
)
from paceline.kernels.parallel import Phase, Program, Team
from paceline.kernels.simd import WIDTH
from paceline.models.batch import Batch, Segments

_QKV, _OUT = 0, 2  # arguments of the kernel that change from step to step

Norms = Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]


class AttentionShape(Protocol):
    """What the kernel must know of a model, target or draft."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


def fits(config: AttentionShape, page_size: int) -> bool:
    """Whether the kernel takes this model and page size."""
    return config.head_dim % (2 * WIDTH) == 0 and page_size % WIDTH == 0


class CpuAttention:
    """Owns K and V of all layers.

    Args:
        tables: int32 [rows, pages], the block tables; read anew on every step.
        cos, sin: fp32 [max_len, head_dim / 2].
        norms: q and k norm weights, or None where the model has none, for each of the layers.
    """

    def __init__(
        self,
        config: AttentionShape,
        num_pages: int,
        page_size: int,
        tables: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        norms: Norms,
        team: Team,
    ) -> None:
        heads, dim = config.num_kv_heads, config.head_dim
        layers = len(norms)
        k_shape = (layers, num_pages, heads, page_size // WIDTH, dim, WIDTH)
        self._k = huge_zeros(k_shape, torch.bfloat16)
        self._v = huge_zeros((layers, num_pages, heads, page_size, dim), torch.bfloat16)
        self._config, self._page_size, self._team = config, page_size, team
        self._tables, self._rope, self._norms = tables, rope, norms
        self._segments = np.zeros((len(tables), SEGMENT_FIELDS), np.int64)
        self._num_tasks = np.zeros(1, np.int64)
        self._scratch = torch.empty(team.num_threads, scratch_floats(dim))
        empty = torch.empty(0)
        self._phases = [self.bind(i, empty, None, empty) for i in range(layers)]
        self._programs = [Program([phase]) for phase in self._phases]

    def begin(self, batch: Batch) -> None:
        """Take over the batch's segments."""
        self.place(batch.segments)

    def place(self, segments: Segments) -> None:
        """Take over where the tokens to come belong: int64 [S, 4], see `Batch`."""
        self._segments[: len(segments)] = segments
        self._num_tasks[0] = len(segments) * self._config.num_kv_heads

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[M, (heads + 2 kv_heads) D] to fp32 [M, heads D]; bias already added."""
        qkv = qkv.float()
        out = torch.empty(len(qkv), self._config.num_heads * self._config.head_dim)
        phase = self._phases[layer]
        phase.set(_QKV, qkv.data_ptr())
        phase.set(_OUT, out.data_ptr())
        self._team.run(self._programs[layer])
        return out

    def bind(
        self,
        layer: int,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        segments: Segments | None = None,
    ) -> Phase:
        """See `BindableAttention`. With `segments` for those, read anew at every run, not the batch's."""
        c, (cos, sin), (q_norm, k_norm) = self._config, self._rope, self._norms[layer]
        fixed = None if segments is None else len(segments) * c.num_kv_heads
        return paged_attention.bind(
            qkv, 0 if bias is None else bias, out, self._k[layer], self._v[layer],
            cos, sin, 0 if q_norm is None else q_norm, 0 if k_norm is None else k_norm, c.rms_norm_eps,
            self._segments if segments is None else segments, self._tables, self._tables.stride(0) * 4,
            self._page_size, c.num_heads, c.num_kv_heads, c.head_dim,
            self._scratch, self._scratch.stride(0) * 4, num_tasks=self._num_tasks if fixed is None else fixed,
        )  # fmt: skip

    def bind_write(self, layer: int, kv: torch.Tensor, bias: torch.Tensor | None) -> Phase:
        """The phase that writes fp32 `kv` [M, 2 kv_heads D] + `bias`, K before norm and RoPE, and no more."""
        c, (cos, sin), k_norm = self._config, self._rope, self._norms[layer][1]
        return paged_write.bind(
            kv, 0 if bias is None else bias, self._k[layer], self._v[layer],
            cos, sin, 0 if k_norm is None else k_norm, c.rms_norm_eps,
            self._segments, self._tables, self._tables.stride(0) * 4,
            self._page_size, c.num_kv_heads, c.head_dim,
            self._scratch, self._scratch.stride(0) * 4, num_tasks=self._num_tasks,
        )  # fmt: skip
