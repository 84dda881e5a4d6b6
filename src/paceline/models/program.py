"""The decoder on the packed CPU kernels: five kernels a layer, prepared once for each number of tokens.

The kernels that a step of M tokens runs, over buffers allocated for M, are what a CUDA graph is to the GPU.
Float32 throughout, so the only roundings are float32's own and those of the bfloat16 K/V cache. Steps of
many tokens go through the bfloat16 copies of the matrices (`decoder`) instead, where the arithmetic units are
twice as fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from paceline.kernels.packed_gemm import ADD, STORE, SWIGLU, scratch_floats
from paceline.kernels.parallel import Phase, Program, Team
from paceline.kernels.simd import WIDTH
from paceline.models.batch import Batch, BindableAttention
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.weights import Matrix, Weights

_MAX_PROGRAMS = 80
_SHARES = 4  # of a phase for each thread: fewer cost balance, more cost atomics

T = TypeVar("T")
_InOut = tuple[torch.Tensor, torch.Tensor, Program]  # buffers to fill and to read, and what runs between


class _Recent(Generic[T]):
    """The values of the most recently used keys."""

    def __init__(self) -> None:
        self._kept = OrderedDict[int, T]()

    def get(self, key: int, make: Callable[[int], T]) -> T:
        """The value, made when it is not there."""
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = make(key)
            if len(self._kept) > _MAX_PROGRAMS:
                self._kept.popitem(last=False)
        return self._kept[key]


class PackedDecoder:
    """`Decoder` with the packed kernels for steps of up to `max_packed_tokens`.

    Args:
        max_packed_tokens: larger steps use the dense copies; None: there are none, always packed.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: BindableAttention,
        team: Team,
        max_packed_tokens: int | None,
    ) -> None:
        self.config = config
        self.max_packed_tokens = max_packed_tokens
        self._weights, self._attention, self._team = weights, attention, team
        self._dense = Decoder(config, weights)
        self._programs = _Recent[tuple[torch.Tensor, Program]]()
        self._embeds = _Recent[_InOut]()
        self._heads = _Recent[_InOut]()
        self._scratch = torch.empty(0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The residual stream after the last layer: fp32 [M, hidden], valid until the next step."""
        self._attention.begin(batch)
        h = self._embed(batch.token_ids)
        if self.max_packed_tokens is not None and len(h) > self.max_packed_tokens:
            return self._dense.layers(h, self._attention)
        residual, program = self._programs.get(len(h), self._program)
        residual.copy_(h)
        self._team.run(program)
        return residual

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """fp32 [P, vocab] for P rows of `forward`'s result, valid until the next step."""
        if self._weights.head.packed is None:
            return self._dense.logits(h)
        x, out, program = self._heads.get(len(h), self._head_program)
        x.copy_(h)
        self._team.run(program)
        return out

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._weights.embedding.packed is None:
            return self._dense.embed(token_ids)
        ids, out, program = self._embeds.get(len(token_ids), self._embed_program)
        ids.copy_(token_ids)
        self._team.run(program)
        return out

    def _embed_program(self, num_tokens: int) -> _InOut:
        matrix = self._weights.embedding.packed
        assert matrix is not None
        assert matrix.format.embed is not None
        ids, out = torch.empty(num_tokens, dtype=torch.int64), torch.empty(num_tokens, matrix.num_columns)
        phase = matrix.format.embed.bind(
            matrix.codes, matrix.scales, matrix.num_columns, ids, out, num_tasks=num_tokens, step=16
        )
        return ids, out, Program([phase])

    def _head_program(self, num_tokens: int) -> _InOut:
        x = torch.empty(num_tokens, self.config.hidden_size)
        out = torch.empty(num_tokens, self.config.vocab_size)
        return x, out, Program([self._gemm(self._weights.head, x, out, STORE, self._weights.norm)])

    def _program(self, num_tokens: int) -> tuple[torch.Tensor, Program]:
        c = self.config
        h = torch.empty(num_tokens, c.hidden_size)
        qkv = torch.empty(num_tokens, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        mixed = torch.empty(num_tokens, c.num_heads * c.head_dim)
        inner = torch.empty(num_tokens, c.intermediate_size)
        phases: list[Phase] = []
        for i, layer in enumerate(self._weights.layers):
            phases += [
                self._gemm(layer.qkv, h, qkv, STORE, layer.input_norm),
                self._attention.bind(i, qkv, layer.qkv.bias, mixed),
                self._gemm(layer.o, mixed, h, ADD),
                self._gemm(layer.gate_up, h, inner, SWIGLU, layer.post_norm),
                self._gemm(layer.down, inner, h, ADD),
            ]
        return h, Program(phases)

    def _gemm(
        self,
        matrix: Matrix,
        x: torch.Tensor,
        out: torch.Tensor,
        epilogue: int,
        norm: torch.Tensor | None = None,
    ) -> Phase:
        packed = matrix.packed
        assert packed is not None
        num_tokens, per_thread = len(x), scratch_floats(len(x), packed.num_columns)
        if len(self._scratch) < per_thread * self._team.num_threads:
            self._scratch = torch.zeros(per_thread * self._team.num_threads)  # older phases keep theirs
        num_tiles = packed.num_rows // WIDTH // (2 if epilogue == SWIGLU else 1)
        return packed.gemm.bind(
            packed.codes, packed.scales, 0 if norm is None else norm, self.config.rms_norm_eps,
            packed.num_rows, packed.num_columns, epilogue,
            x, out, out.stride(0) * 4, num_tokens, self._scratch, per_thread * 4,
            num_tasks=num_tiles, step=max(1, num_tiles // (self._team.num_threads * _SHARES)),
        )  # fmt: skip
