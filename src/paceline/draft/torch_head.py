"""A `PagedHead` in plain torch: any device, any dtype, every option of a head. Not tuned.

Keys are gathered from the rows' pages and padded to the longest; a mask hides what a row has not. Does not
know how a head's layers are computed (`eagle3`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from paceline.draft.eagle3 import Eagle3Head
from paceline.draft.protocol import Settled

_TRASH_PAGE = 0


class PagedCache:
    """K and V of one layer in pages, [num_pages * page_size, kv_heads, D] each, with their block tables.

    Args:
        num_pages: page 0, the trash page, included.
        tables: int32 [rows, pages], the target's; read anew at every call, 0 where a row has no page.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        tables: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        shape = (num_pages * page_size, num_kv_heads, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=tables.device)
        self._v = torch.zeros_like(self._k)
        self._page_size, self._tables = page_size, tables

    def write(self, rows: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Place k and v [M, kv_heads, D] at positions int64 [M] of rows int64 [M]."""
        slots = self._slots(rows, positions)
        self._k.index_copy_(0, slots, k.to(self._k.dtype))
        self._v.index_copy_(0, slots, v.to(self._v.dtype))

    def attend(
        self, rows: torch.Tensor, positions: torch.Tensor, q: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Each query over its row's positions up to its own: fp32 [B, heads, D] to the same.

        Args:
            longest: a bound of `positions` + 1, on the host.
        """
        keys = torch.arange(longest, device=positions.device)[None]
        visible = keys <= positions[:, None]
        # The mask hides places behind a query, but not their NaN: what is gathered there is the row's own.
        known = torch.minimum(keys, positions[:, None])
        k, v = self._gather(rows[:, None].expand_as(known), known)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None].to(k.dtype),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=visible[:, None, None],
            enable_gqa=True,
        )
        return mixed[:, :, 0].float()

    def read(self, row: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a row's first positions, [num_positions, kv_heads, D] each; copies."""
        positions = torch.arange(num_positions, device=self._k.device)
        return self._gather(torch.full_like(positions, row), positions)

    def _gather(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self._slots(rows, positions)
        shape = (*slots.shape, *self._k.shape[1:])
        k, v = (x.index_select(0, slots.flatten()).view(shape) for x in (self._k, self._v))
        return k, v

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = positions // self._page_size
        last = self._tables.shape[1] - 1
        pages = self._tables[rows, places.clamp(max=last)].long()
        pages = torch.where(places <= last, pages, _TRASH_PAGE)
        return pages * self._page_size + positions % self._page_size


class TorchHead:
    """`Eagle3Head` over a `PagedCache`.

    Args:
        num_pages, page_size, tables: the target's; see `PagedCache`.
        dtype: of K and V.
    """

    def __init__(
        self, head: Eagle3Head, num_pages: int, page_size: int, tables: torch.Tensor, dtype: torch.dtype
    ) -> None:
        c = head.config
        self.capture = c.capture_layer_ids
        self.vocabulary = head.target_ids(torch.arange(c.draft_vocab_size, device=tables.device))
        self.cache = PagedCache(num_pages, page_size, c.num_kv_heads, c.head_dim, tables, dtype)
        self.h = torch.zeros(len(tables), c.hidden_size, device=tables.device)
        self._h_next = torch.zeros_like(self.h)  # of each row's latest draft step
        self._head = head

    def settle(self, settled: Settled) -> None:
        """See `PagedHead`."""
        batch = settled.batch
        _, q_lens, _, segment_rows = batch.segments.T
        assert settled.features is not None
        h = self._head.fuse(settled.features)
        k, v = self._head.settle(settled.next_ids, h, batch.positions)
        rows = torch.from_numpy(np.repeat(segment_rows, q_lens)).to(h.device)
        self.cache.write(rows, batch.positions, k, v)
        self.h.index_copy_(0, settled.rows, h.index_select(0, settled.last))

    def wait(self) -> None:
        """See `PagedHead`. The device's order of work is all that is needed."""

    def step(
        self, rows: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last: int, goes_on: bool
    ) -> torch.Tensor:
        """See `PagedHead`."""
        attend = partial(self._attend, rows, last + 1)  # the host's: reading positions would halt a device
        h = (self._h_next if goes_on else self.h).index_select(0, rows)
        logits, h = self._head.step(token_ids, h, positions, attend)
        self._h_next.index_copy_(0, rows, h)
        return logits

    def _attend(
        self,
        rows: torch.Tensor,
        longest: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """A `DraftAttention` of these rows."""
        self.cache.write(rows, positions, k, v)
        return self.cache.attend(rows, positions, q, longest)
