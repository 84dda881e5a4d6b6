"""The decoder of the Llama family as plain torch: any device, any number of tokens.

Takes its attention, and so the K/V cache, as an argument. The residual stream is float32 whatever the
weights are; what passes between two matrices has their type.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.models.batch import Attention, Batch, LayerAttention
from paceline.models.config import ModelConfig
from paceline.models.layers import rms_norm, swiglu
from paceline.models.weights import Weights


class Decoder:
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """The residual stream after the last layer, before the final norm: fp32 [M, hidden]."""
        attention.begin(batch)
        return self.layers(self.embed(batch.token_ids), attention)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """fp32 [M, hidden]."""
        table = self._weights.embedding.dense
        assert table is not None
        return torch.nn.functional.embedding(token_ids, table).float()

    def layers(
        self,
        h: torch.Tensor,
        attention: LayerAttention,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """All layers over the residual stream h fp32 [M, hidden]; a new tensor.

        `on_layer(i, h)` is told the stream before each layer i: what a draft head reads.
        """
        eps = self.config.rms_norm_eps
        for i, layer in enumerate(self._weights.layers):
            if on_layer is not None:
                on_layer(i, h)
            h = h + layer.o(attention(i, layer.qkv(rms_norm(h, layer.input_norm, eps))))
            h = h + layer.down(swiglu(layer.gate_up(rms_norm(h, layer.post_norm, eps))))
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """fp32 [P, vocab] for P rows of `forward`'s result."""
        return self._weights.head(rms_norm(h, self._weights.norm, self.config.rms_norm_eps)).float()


def captured(
    decoder: Decoder, batch: Batch, attention: Attention, capture: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Decoder.forward`, and the features that `captured_layers` returns."""
    attention.begin(batch)
    return captured_layers(decoder, decoder.embed(batch.token_ids), attention, capture)


def captured_layers(
    decoder: Decoder, h: torch.Tensor, attention: LayerAttention, capture: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`Decoder.layers`, and the residual streams after the layers of `capture`.

    Args:
        capture: increasing, 0-based; -1 is the embeddings, after the last layer is before the final norm.

    Returns:
        the stream after the last layer, fp32 [M, hidden], and the captured ones side by side, fp32
        [M, k hidden]; None when there are none.
    """
    if not capture:
        return decoder.layers(h, attention), None
    streams: list[torch.Tensor] = []

    def keep(layer: int, h: torch.Tensor) -> None:
        if layer - 1 in capture:
            streams.append(h)

    h = decoder.layers(h, attention, on_layer=keep)
    keep(decoder.config.num_layers, h)
    return h, torch.cat(streams, dim=-1)
