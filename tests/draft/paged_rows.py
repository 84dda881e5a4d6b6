"""Rows in pages that are out of order, and the target's steps over them as a drafter is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from draft_cases import head_of

from paceline.draft.checkpoint import Draft
from paceline.draft.config import Eagle3Config
from paceline.draft.protocol import Settled
from paceline.draft.torch_head import TorchHead
from paceline.models.batch import Batch

PAGE_SIZE, NUM_ROWS, PAGES_PER_ROW = 4, 3, 5
MAX_LEN = PAGE_SIZE * PAGES_PER_ROW


def shuffled_tables() -> torch.Tensor:
    """int32 [NUM_ROWS, PAGES_PER_ROW]: every page but 0 once, in no order."""
    pages = torch.randperm(NUM_ROWS * PAGES_PER_ROW, generator=torch.Generator().manual_seed(3)) + 1
    return pages.view(NUM_ROWS, PAGES_PER_ROW).int()


def paged_head(draft: Draft, tables: torch.Tensor) -> TorchHead:
    """A head with K/V of its own under these tables."""
    return TorchHead(head_of(draft), NUM_ROWS * PAGES_PER_ROW + 1, PAGE_SIZE, tables, torch.float32)


@dataclass(frozen=True)
class Piece:
    """What a row brings to a step: places from `start` on, the last `num_junk` of them rejected drafts."""

    row: int
    start: int
    num_settled: int
    num_junk: int = 0


class Texts:
    """Known tokens [NUM_ROWS, MAX_LEN + 1] and features [NUM_ROWS, MAX_LEN, k T] of every row."""

    def __init__(self, config: Eagle3Config, seed: int = 7) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocab_size = config.vocab_size
        self.token_ids = self._tokens(NUM_ROWS, MAX_LEN + 1)
        self.features = self._noise(NUM_ROWS, MAX_LEN, config.feature_size)

    def _tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(self._vocab_size, shape, generator=self._generator)

    def _noise(self, *shape: int) -> torch.Tensor:
        return 3 * torch.randn(shape, generator=self._generator)

    def settled(self, pieces: Sequence[Piece]) -> Settled:
        """The target's step over these pieces."""
        token_ids, next_ids, positions, features, segments = [], [], [], [], []
        begin = 0
        for p in pieces:
            known = slice(p.start, p.start + p.num_settled)
            known_next = slice(known.start + 1, known.stop + 1)
            token_ids += [self.token_ids[p.row, known], self._tokens(p.num_junk)]
            next_ids += [self.token_ids[p.row, known_next], self._tokens(p.num_junk)]
            features += [self.features[p.row, known], self._noise(p.num_junk, self.features.shape[-1])]
            q_len = p.num_settled + p.num_junk
            positions.append(p.start + torch.arange(q_len))
            segments.append((begin, q_len, p.start, p.row))
            begin += q_len
        return Settled(
            batch=Batch(torch.cat(token_ids), torch.cat(positions), np.array(segments, np.int64)),
            next_ids=torch.cat(next_ids),
            features=torch.cat(features),
            rows=torch.tensor([p.row for p in pieces]),
            last=torch.tensor([s[0] + p.num_settled - 1 for s, p in zip(segments, pieces, strict=True)]),
        )
