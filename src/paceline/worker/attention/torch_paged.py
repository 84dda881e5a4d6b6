"""A paged K/V cache in plain torch: any device and dtype, every head size. Not tuned.

Rows that bring the same number of tokens attend together, over keys gathered from their pages and padded
to the longest; a mask hides what a query may not see. The batch's positions are the truth; its segments may
be upper bounds of them. Positions behind a row's last page, where drafts may lie, share the trash page.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.layers import rms_norm, rotate
from paceline.worker.attention.cpu import Norms

_TRASH_PAGE = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with the same q_len: where their queries lie and what they may see."""

    queries: torch.Tensor  # int64 [rows, q_len], index in the flat batch
    keys: torch.Tensor  # int64 [rows, longest], slot in the cache
    mask: torch.Tensor  # bool [rows, 1, q_len, longest]


class TorchAttention:
    """Owns K and V of all layers; arguments as in `CpuAttention`."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        tables: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        norms: Norms,
        dtype: torch.dtype,
    ) -> None:
        shape = (config.num_layers, 2, num_pages * page_size, config.num_kv_heads, config.head_dim)
        self._cache = torch.zeros(shape, dtype=dtype, device=tables.device)
        self._config, self._page_size, self._tables = config, page_size, tables
        self._cos, self._sin = rope
        self._norms = norms
        self._groups: list[_Group] = []
        self._turns = (self._cos[:0], self._sin[:0])
        self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, batch: Batch) -> None:
        """Work out slots and masks, once for all layers."""
        device, segments = self._tables.device, torch.from_numpy(batch.segments)
        positions, rows = batch.positions, segments[:, 3].repeat_interleave(segments[:, 1]).to(device)
        in_table = positions.clamp(max=len(self._cos) - 1)
        self._turns = (self._cos[in_table], self._sin[in_table])
        self._slots = self._slot(rows, positions)
        self._groups = [
            self._group(segments[segments[:, 1] == q_len], int(q_len), positions)
            for q_len in np.unique(batch.segments[:, 1])
        ]

    def _slot(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places, last = positions // self._page_size, self._tables.shape[1] - 1
        pages = self._tables[rows, places.clamp(max=last)].long()
        pages = torch.where(places <= last, pages, _TRASH_PAGE)
        return pages * self._page_size + positions % self._page_size

    def _group(self, segments: torch.Tensor, q_len: int, positions: torch.Tensor) -> _Group:
        device, longest = positions.device, int((segments[:, 1] + segments[:, 2]).max())
        q_begin, rows = segments[:, 0, None].to(device), segments[:, 3, None].to(device)
        queries = q_begin + torch.arange(q_len, device=device)[None]
        seen_from = positions[queries]
        keys = torch.arange(longest, device=device)[None].expand(len(rows), -1)
        mask = keys[:, None] <= seen_from[:, :, None]
        # The mask hides slots past a row's end, but not their NaN: what is gathered there is the row's own.
        known = torch.minimum(keys, seen_from[:, -1:])
        return _Group(queries, self._slot(rows.expand_as(known), known), mask[:, None])

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """[M, (heads + 2 kv_heads) D] to [M, heads D], in qkv's dtype; bias already added."""
        c, (q_norm, k_norm) = self._config, self._norms[layer]
        heads = qkv.view(len(qkv), -1, c.head_dim)
        q, kv = heads[:, : c.num_heads], heads[:, c.num_heads :]
        k, v = kv.chunk(2, dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = (rms_norm(x.float(), w, c.rms_norm_eps) for x, w in ((q, q_norm), (k, k_norm)))
        keys, values = self._cache[layer]
        keys[self._slots] = rotate(k, *self._turns).to(keys.dtype)
        values[self._slots] = v.to(values.dtype)
        q = rotate(q, *self._turns).to(keys.dtype)
        out = torch.empty_like(q)
        for g in self._groups:
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q[g.queries].transpose(1, 2),  # [rows, heads, q_len, D]
                keys[g.keys].transpose(1, 2),
                values[g.keys].transpose(1, 2),
                attn_mask=g.mask,
                enable_gqa=c.num_heads != c.num_kv_heads,
            )
            out[g.queries] = mixed.transpose(1, 2)
        return out.view(len(qkv), -1).to(qkv.dtype)
