"""Torch's paged attention where speculation takes it: loose bounds on the host, positions past all pages."""

from __future__ import annotations

import numpy as np
import torch
from tiny_models import hf_config

from paceline.models.batch import Batch
from paceline.models.config import config_from_hf
from paceline.models.rope import rope_tables
from paceline.worker.attention.torch_paged import TorchAttention

NUM_ROWS, PAGE_SIZE, PAGES_PER_ROW = 2, 4, 3
MAX_LEN = PAGE_SIZE * PAGES_PER_ROW
NUM_DRAFTS = PAGE_SIZE + 2
CONFIG = config_from_hf(hf_config())
WIDTH = (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim


class Layer:
    """One layer's attention over rows whose q, k and v at each position are fixed."""

    def __init__(self, tables: tuple[tuple[int, ...], ...] = ((4, 2, 6), (1, 5, 3))) -> None:
        norms = [(None, None)] * CONFIG.num_layers
        rope = rope_tables(CONFIG, MAX_LEN)
        block_tables = torch.tensor(tables, dtype=torch.int32)
        self._attention = TorchAttention(CONFIG, 7, PAGE_SIZE, block_tables, rope, norms, torch.float32)
        generator = torch.Generator().manual_seed(0)
        self.qkv = torch.randn(NUM_ROWS, MAX_LEN + NUM_DRAFTS, WIDTH, generator=generator)

    def step(self, *pieces: tuple[int, int, int], slack: int = 0) -> list[torch.Tensor]:
        """Rows' (row, start, q_len); the host takes the starts for `slack` more than they are."""
        segments, begin = [], 0
        for row, start, q_len in pieces:
            segments.append((begin, q_len, start + slack, row))
            begin += q_len
        positions = [torch.arange(start, start + q_len) for _, start, q_len in pieces]
        qkv = torch.cat([self.qkv[row, at] for (row, _, _), at in zip(pieces, positions, strict=True)])
        batch = Batch(torch.zeros(begin, dtype=torch.int64), torch.cat(positions), np.array(segments))
        self._attention.begin(batch)
        return list(self._attention(0, qkv).split([q_len for _, _, q_len in pieces]))


def test_positions_are_the_truth_where_the_hosts_bound_is_loose() -> None:
    exact, loose = Layer(), Layer()
    for pieces in (((0, 0, 5), (1, 0, 3)), ((1, 3, 1), (0, 5, 1)), ((0, 6, 3), (1, 4, 1))):
        for expected, got in zip(exact.step(*pieces), loose.step(*pieces, slack=2), strict=True):
            torch.testing.assert_close(got, expected)


def test_drafts_behind_the_last_page_touch_no_row() -> None:
    layer, calm = Layer(), Layer()
    prompts = ((0, 0, MAX_LEN - 1), (1, 0, MAX_LEN - 1))
    layer.step(*prompts)
    calm.step(*prompts)
    drafted = layer.step((0, MAX_LEN - 1, 1 + NUM_DRAFTS))[0]
    (expected,) = calm.step((0, MAX_LEN - 1, 1))
    torch.testing.assert_close(drafted[:1], expected)
    assert drafted.isfinite().all()
    last = ((1, MAX_LEN - 1, 1), (0, MAX_LEN - 1, 1))
    for got, expected in zip(layer.step(*last), calm.step(*last), strict=True):
        torch.testing.assert_close(got, expected)


def test_what_lies_in_the_trash_page_reaches_no_row() -> None:
    """Not even NaN, which a mask alone lets through."""
    tables = ((4, 2, 6), (1, 0, 0))
    layer, calm = Layer(tables), Layer(tables)
    layer.qkv[0, MAX_LEN:] = torch.nan
    for each in (layer, calm):
        each.step((0, 0, MAX_LEN - 1), (1, 0, 3))
    layer.step((0, MAX_LEN - 1, 1 + NUM_DRAFTS))
    together = ((0, MAX_LEN - 1, 1), (1, 3, 1))
    for got, expected in zip(layer.step(*together), calm.step(*together), strict=True):
        torch.testing.assert_close(got, expected)
