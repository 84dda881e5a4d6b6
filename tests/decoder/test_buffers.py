"""The packed decoder's buffers: one set for all sizes of step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny_checkpoints import write_quantized

from paceline.kernels.parallel import Team
from paceline.models.batch import Batch
from paceline.models.buffers import Buffers
from paceline.models.checkpoint import open_checkpoint
from paceline.models.program import PackedDecoder
from paceline.models.rope import rope_tables
from paceline.models.weights import load_weights
from paceline.worker.attention.cpu import CpuAttention


def memory_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of the memory that they look into."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_rows_begin_at_the_same_place_and_grow_by_powers_of_two() -> None:
    buffers = Buffers()
    taken = [buffers.get("a", n, 3) for n in range(1, 101)]
    assert [t.shape for t in taken] == [(n, 3) for n in range(1, 101)]
    assert all(t.is_contiguous() for t in taken)
    assert memory_of(taken) == (1 + 2 + 4 + 8 + 16 + 32 + 64 + 128) * 3 * 4
    assert buffers.get("a", 7, 3).data_ptr() == taken[99].data_ptr() != buffers.get("b", 7, 3).data_ptr()


def test_programs_of_all_sizes_take_little_more_memory_than_the_largest(tmp_path: Path, team: Team) -> None:
    with open_checkpoint(write_quantized(tmp_path / "m.gguf", "llama", lambda name: "Q8_0")) as checkpoint:
        config = checkpoint.config
        weights = load_weights(checkpoint, dtype=torch.bfloat16, device="cpu", packed=True)
    tables = torch.arange(1, 5, dtype=torch.int32)[None]
    norms = [(layer.q_norm, layer.k_norm) for layer in weights.layers]
    attention = CpuAttention(config, 5, 16, tables, rope_tables(config, 64), norms, team)
    decoder = PackedDecoder(config, weights, attention, team, None)
    hidden, logits = [], []
    with torch.inference_mode():
        for num_tokens in range(1, 65):
            ids = torch.zeros(num_tokens, dtype=torch.int64)
            batch = Batch(ids, torch.arange(num_tokens), np.array([[0, num_tokens, 0, 0]], np.int64))
            hidden.append(decoder.forward(batch))
            logits.append(decoder.logits(hidden[-1]))
    assert memory_of(hidden) < 2 * hidden[-1].nbytes
    assert memory_of(logits) < 2 * logits[-1].nbytes
