"""Drives a decoder as the worker does, but hands out every position's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.kernels.parallel import Team
from paceline.models.batch import Batch
from paceline.models.checkpoint import open_checkpoint
from paceline.models.decoder import Decoder, captured
from paceline.models.program import PackedDecoder
from paceline.models.rope import rope_tables
from paceline.models.weights import Weights, load_weights
from paceline.worker.attention.cpu import CpuAttention
from paceline.worker.attention.torch_paged import TorchAttention

NUM_ROWS, MAX_LEN = 6, 256

Features = tuple[torch.Tensor, torch.Tensor | None]  # the last stream, and the captured ones side by side


class Driver:
    """Rows of tokens through a decoder, a few at a time, over pages in no order at all.

    Args:
        weights: dtype of the dense matrices.
        attention: "kernel" (bfloat16 K/V on CPU), or the dtype of torch's.
        team: runs the packed kernels; None keeps to the dense matrices.
        max_packed_tokens: see `PackedDecoder`.
        capture: residual streams that every step leaves in `features`.
    """

    def __init__(
        self,
        path: Path,
        *,
        weights: torch.dtype = torch.float32,
        attention: str | torch.dtype = torch.float32,
        packed: bool = False,
        team: Team | None = None,
        max_packed_tokens: int | None = None,
        page_size: int = 16,
        num_rows: int = NUM_ROWS,
        max_len: int = MAX_LEN,
        capture: tuple[int, ...] = (),
    ) -> None:
        with open_checkpoint(path) as checkpoint:
            self.config = checkpoint.config
            self.weights = load_weights(checkpoint, dtype=weights, device="cpu", packed=packed)
        pages_a_row = -(-max_len // page_size)
        num_pages = num_rows * pages_a_row + 1
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.view(num_rows, pages_a_row).int()
        norms = [(layer.q_norm, layer.k_norm) for layer in self.weights.layers]
        rope = rope_tables(self.config, max_len)
        shared = (self.config, num_pages, page_size, self.tables, rope, norms)
        if attention == "kernel":
            assert team is not None
            own: CpuAttention | TorchAttention = CpuAttention(*shared, team)
        else:
            assert isinstance(attention, torch.dtype)
            own = TorchAttention(*shared, attention)
        self.features: torch.Tensor | None = None  # of the latest step: fp32 [M, k hidden]
        self.packed: PackedDecoder | None = None
        self._capture = capture
        self._forward, self._logits = self._decoder(own, self.weights, packed, team, max_packed_tokens)
        self._lengths = [0] * num_rows

    def _decoder(
        self,
        attention: CpuAttention | TorchAttention,
        weights: Weights,
        packed: bool,
        team: Team | None,
        max_packed_tokens: int | None,
    ) -> tuple[Callable[[Batch], Features], Callable[[torch.Tensor], torch.Tensor]]:
        if packed:
            assert isinstance(attention, CpuAttention)
            assert team is not None
            decoder = PackedDecoder(self.config, weights, attention, team, max_packed_tokens, self._capture)
            self.packed = decoder
            return (lambda batch: (decoder.forward(batch), decoder.features)), decoder.logits
        plain = Decoder(self.config, weights)
        return (lambda batch: captured(plain, batch, attention, self._capture)), plain.logits

    @torch.inference_mode()
    def step(self, *chunks: tuple[int, Sequence[int]]) -> list[torch.Tensor]:
        """One step over (row, token ids) pairs; each chunk's logits [n, vocab]."""
        rows, ids = [row for row, _ in chunks], [list(chunk) for _, chunk in chunks]
        q_lens = np.array([len(chunk) for chunk in ids])
        starts = np.array([self._lengths[row] for row in rows])
        ends = np.cumsum(q_lens)
        segments = np.stack((ends - q_lens, q_lens, starts, np.array(rows)), axis=1).astype(np.int64)
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, q_lens, strict=True)])
        batch = Batch(
            torch.tensor([token for chunk in ids for token in chunk]), torch.from_numpy(positions), segments
        )
        h, features = self._forward(batch)
        self.features = None if features is None else features.clone()
        logits = self._logits(h).clone()
        for row, chunk in zip(rows, ids, strict=True):
            self._lengths[row] += len(chunk)
        return list(logits.split(q_lens.tolist()))

    def whole(self, row: int, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """A row from its beginning, `chunk` tokens at a time: logits [n, vocab]."""
        self._lengths[row] = 0
        size = chunk or len(token_ids)
        parts = [self.step((row, token_ids[i : i + size]))[0] for i in range(0, len(token_ids), size)]
        return torch.cat(parts)

    def ragged(self, sequences: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Rows 0, 1, .. side by side, row i `sizes[i]` tokens a step; each row's logits [n, vocab]."""
        done: list[list[torch.Tensor]] = [[] for _ in sequences]
        for row in range(len(sequences)):
            self._lengths[row] = 0
        while True:
            open_rows = [row for row, ids in enumerate(sequences) if self._lengths[row] < len(ids)]
            if not open_rows:
                return [torch.cat(parts) for parts in done]
            chunks = []
            for row in open_rows:
                at = self._lengths[row]
                chunks.append((row, sequences[row][at : at + sizes[row]]))
            for row, logits in zip(open_rows, self.step(*chunks), strict=True):
                done[row].append(logits)


def random_ids(num_tokens: int, vocab_size: int, seed: int = 0) -> list[int]:
    """A prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
