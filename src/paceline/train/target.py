"""The target over whole sequences: features for the head to read, distributions for it to learn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layers import rms_norm, rotate
from paceline.models.rope import rope_tables
from paceline.models.weights import Weights

_LOGIT_ROWS = 8192  # at a time: full-vocabulary logits are large


def default_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers before which features are read: EAGLE-3's low, middle and high."""
    return (2, num_layers // 2, num_layers - 3)


class Target:
    """A frozen model over batches of whole sequences.

    Args:
        capture: layers before which the residual stream is read.
    """

    def __init__(self, config: ModelConfig, weights: Weights, capture: Sequence[int], device: str) -> None:
        self.config, self.capture, self.device = config, tuple(capture), device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._weights, self._decoder = weights, Decoder(config, weights)
        table = weights.embedding.dense
        assert table is not None
        self.embedding = table
        self._draft_head: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cos, self._sin = (t.to(device) for t in rope_tables(config, config.max_position_embeddings))

    @torch.no_grad()
    def read(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, T, len(capture) * hidden] and final hidden states [B, T, hidden] of int64 [B, T].

        Attention is causal, so what stands behind a row's end changes nothing before it.
        """
        batch, length = token_ids.shape
        captured: list[torch.Tensor] = []

        def on_layer(i: int, h: torch.Tensor) -> None:
            captured.extend([h.to(self.dtype)] * self.capture.count(i))

        attention = _WholeSequences(self, batch, length)
        h = self._decoder.layers(self._decoder.embed(token_ids.flatten()), attention, on_layer)
        return torch.cat(captured, dim=-1).view(batch, length, -1), h.view(batch, length, -1)

    @torch.no_grad()
    def distributions(self, h: torch.Tensor, draft_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For hidden states [N, hidden]: probabilities of the draft ids [N, D], and the likeliest id [N]."""
        if self._draft_head is None or self._draft_head[0] is not draft_ids:
            head = self._weights.head.dense
            assert head is not None
            # The draft ids' rows once more: picking their columns out of all logits costs more.
            self._draft_head = (draft_ids, head[draft_ids].contiguous())
        parts = [self._some_distributions(rows, self._draft_head[1]) for rows in torch.split(h, _LOGIT_ROWS)]
        return torch.cat([p for p, _ in parts]), torch.cat([best for _, best in parts])

    def _some_distributions(
        self, h: torch.Tensor, draft_head: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._decoder.logits(h)
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        normed = rms_norm(h, self._weights.norm, self.config.rms_norm_eps).to(draft_head.dtype)
        drafted = torch.nn.functional.linear(normed, draft_head)
        return (drafted - total).exp().to(self.dtype), logits.argmax(dim=-1)


class _WholeSequences:
    """Causal attention over [B, T] sequences from position 0."""

    def __init__(self, target: Target, batch: int, length: int) -> None:
        self._target, self._batch, self._length = target, batch, length
        self._turns = (target._cos[:length].repeat(batch, 1), target._sin[:length].repeat(batch, 1))

    def __call__(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        c, weights = self._target.config, self._target._weights.layers[layer]
        heads = qkv.view(len(qkv), -1, c.head_dim)
        q, k, v = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = (
                rms_norm(x.float(), w, c.rms_norm_eps) for x, w in ((q, weights.q_norm), (k, weights.k_norm))
            )
        q, k = rotate(q, *self._turns), rotate(k, *self._turns)
        q, k, v = (
            x.to(self._target.dtype).view(self._batch, self._length, -1, c.head_dim).transpose(1, 2)
            for x in (q, k, v)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=c.num_heads != c.num_kv_heads
        )
        return mixed.transpose(1, 2).reshape(len(qkv), -1).to(qkv.dtype)
