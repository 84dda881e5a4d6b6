"""The decoder on the packed CPU kernels: five kernels a layer, prepared once for each number of tokens.

The kernels that a step of M tokens runs, over buffers that all M share, are what a CUDA graph is to the GPU.
Float32, but for the bfloat16 K/V cache and, where `kernels.packed_dot` is used, for what is multiplied by a
matrix, which has 16 bits. Steps of many tokens go through the bfloat16 copies of the matrices (`decoder`)
instead, where the arithmetic units are faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.kernels.packed_gemm import ADD, STORE, SWIGLU
from paceline.kernels.parallel import Phase, Program, Team
from paceline.kernels.rows import copy_rows
from paceline.models.batch import Batch, BindableAttention
from paceline.models.buffers import Buffers
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, captured_layers
from paceline.models.packed import PackedMatrix
from paceline.models.phases import Products, Recent, embed
from paceline.models.weights import Matrix, Weights

_InOut = tuple[torch.Tensor, torch.Tensor, Program]  # buffers to fill and to read, and what runs between


@dataclass(frozen=True, slots=True)
class _Layers:
    """All layers for one number of tokens."""

    residual: torch.Tensor  # fp32 [M, hidden]: in and out
    features: torch.Tensor | None  # fp32 [M, k hidden]
    program: Program


class PackedDecoder:
    """`Decoder` with the packed kernels for steps of up to `max_packed_tokens`.

    Args:
        max_packed_tokens: larger steps use the dense copies; None: there are none, always packed.
        capture: the residual streams for `features`, see `decoder.captured_layers`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: BindableAttention,
        team: Team,
        max_packed_tokens: int | None,
        capture: tuple[int, ...] = (),
    ) -> None:
        self.config = config
        self.max_packed_tokens = max_packed_tokens
        self.capture = capture
        self._features: torch.Tensor | None = None
        self._weights, self._attention, self._team = weights, attention, team
        self._dense = Decoder(config, weights)
        self._products = Products(team, config.rms_norm_eps)
        self._buffers = Buffers()
        self._programs = Recent[_Layers]()
        self._embeds = Recent[_InOut]()
        self._heads = Recent[_InOut]()

    @property
    def features(self) -> torch.Tensor | None:
        """The captured streams of the latest `forward` side by side: fp32 [M, k hidden], valid until the
        next; None without `capture`.
        """
        return self._features

    def prepare(self, num_tokens: int) -> None:
        """Make the programs of steps of up to so many tokens: the first of its size waits no longer for them.

        The largest first, whose buffers the others share.
        """
        for num in range(num_tokens, 0, -1):
            self._programs.get(num, self._program)
            if self._weights.embedding.packed is not None:
                self._embeds.get(num, self._embed_program)
            if self._weights.head.packed is not None:
                self._heads.get(num, self._head_program)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The residual stream after the last layer: fp32 [M, hidden], valid until the next step."""
        self._attention.begin(batch)
        h = self._embed(batch.token_ids)
        if self.max_packed_tokens is not None and len(h) > self.max_packed_tokens:
            h, self._features = captured_layers(self._dense, h, self._attention, self.capture)
            return h
        layers = self._programs.get(len(h), self._program)
        layers.residual.copy_(h)
        self._team.run(layers.program)
        self._features = layers.features
        return layers.residual

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
        matrix = _packed(self._weights.embedding)
        ids = torch.empty(num_tokens, dtype=torch.int64)
        out = self._buffers.get("embeddings", num_tokens, matrix.num_columns)
        return ids, out, Program([embed(matrix, ids, out)])

    def _head_program(self, num_tokens: int) -> _InOut:
        x = self._buffers.get("head", num_tokens, self.config.hidden_size)
        out = self._buffers.get("logits", num_tokens, self.config.vocab_size)
        head, norm = _packed(self._weights.head), self._weights.norm
        return x, out, Program([self._products.gemm(head, x, out, STORE, norm)])

    def _program(self, num_tokens: int) -> _Layers:
        c, gemm, get = self.config, self._products.gemm, self._buffers.get
        h = get("residual", num_tokens, c.hidden_size)
        qkv = get("qkv", num_tokens, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        mixed = get("mixed", num_tokens, c.num_heads * c.head_dim)
        inner = get("inner", num_tokens, c.intermediate_size)
        features = get("features", num_tokens, len(self.capture) * c.hidden_size) if self.capture else None
        phases = self._capturing(-1, h, features)
        for i, layer in enumerate(self._weights.layers):
            phases += [
                gemm(_packed(layer.qkv), h, qkv, STORE, layer.input_norm),
                self._attention.bind(i, qkv, layer.qkv.bias, mixed),
                gemm(_packed(layer.o), mixed, h, ADD),
                gemm(_packed(layer.gate_up), h, inner, SWIGLU, layer.post_norm),
                gemm(_packed(layer.down), inner, h, ADD),
                *self._capturing(i, h, features),
            ]
        return _Layers(h, features, Program(phases))

    def _capturing(self, layer: int, h: torch.Tensor, features: torch.Tensor | None) -> list[Phase]:
        """What puts the stream after `layer` into its columns of `features`, if it is asked for."""
        if features is None or layer not in self.capture:
            return []
        size = self.config.hidden_size
        at = features[:, self.capture.index(layer) * size :]
        return [copy_rows.bind(h, size * 4, at, features.stride(0) * 4, size * 4, num_tasks=len(h))]


def _packed(matrix: Matrix) -> PackedMatrix:
    assert matrix.packed is not None
    return matrix.packed
