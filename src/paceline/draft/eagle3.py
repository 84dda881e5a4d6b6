"""The EAGLE-3 head as plain torch: one layer that drafts a token from a token and the target's features.

Known tokens are x_0..x_n. Pair t is (x_{t+1}, g_t): a token and the target's features one position
before it, at RoPE position t. A pair's K and V depend on nothing else, so `settle` makes them for
any set of positions without attention; `step` drafts from one pair and what the cache holds.

Takes attention, and so the draft's K/V cache, as an argument. Does not know pages, rows, sampling,
or how a checkpoint is read. The hidden state is float32 whatever the matrices are, as in the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.draft.config import Eagle3Config
from paceline.models.layers import rms_norm, rotate, swiglu
from paceline.models.rope import rope_frequencies
from paceline.models.weights import Matrix

Embed = Callable[[torch.Tensor], torch.Tensor]
"""Token ids int64 [M] to fp32 [M, H]."""
Project = Callable[[torch.Tensor], torch.Tensor]
"""fp32 [M, H] to logits [M, draft_vocab] of any float type; no norm inside."""


@dataclass(frozen=True, slots=True)
class Eagle3Weights:
    """A head's tensors as `Eagle3Head` multiplies by them. Norm weights are fp32.

    `kv` is the K and V rows of `qkv` (the same memory). `embed` and `head` may be the target's.
    """

    embed: Embed
    input_norm: torch.Tensor | None  # [k T]
    fc_norm: tuple[torch.Tensor, ...]  # k times [T], or none
    fc: Matrix  # [H, k T]
    token_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor  # [H]
    qkv: Matrix  # [(heads + 2 kv_heads) D, 2 H]
    kv: Matrix  # [2 kv_heads D, 2 H]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: Matrix  # [H, heads D]
    post_norm: torch.Tensor  # [H]
    gate_up: Matrix  # [2 inner, H]
    down: Matrix  # [H, inner]
    norm: torch.Tensor  # [H]
    head: Project
    vocabulary: torch.Tensor  # int64 [draft_vocab]: the target's id of each draft token


class DraftAttention(Protocol):
    """Owns the draft's K/V cache."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Write each row's k and v at its position, then attend over that row's positions up to it.

        Args:
            q: fp32 [B, heads, D], rotated.
            k, v: fp32 [B, kv_heads, D]; k rotated.
            positions: int64 [B].

        Returns:
            fp32 [B, heads, D]: softmax(q k / sqrt(D)) v.
        """
        ...


class Eagle3Head:
    """The head's arithmetic. Holds no state: the caller keeps caches, features and drafted tokens."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.config = config
        self._weights = weights
        frequencies, self._attention_factor = rope_frequencies(config.rope, config.head_dim)
        self._frequencies = frequencies.to(weights.norm.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Captured features [M, k T], any float type, to the hidden state fp32 [M, H] of their pairs."""
        c, w = self.config, self._weights
        x = features.float()
        if w.input_norm is not None:
            x = rms_norm(x, w.input_norm, c.rms_norm_eps)
        if w.fc_norm:
            chunks = x.chunk(len(w.fc_norm), dim=-1)
            x = torch.cat(
                [rms_norm(part, norm, c.rms_norm_eps) for part, norm in zip(chunks, w.fc_norm, strict=True)],
                -1,
            )
        return w.fc(x).float()

    def settle(
        self, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of settled pairs: no attention, any positions in any order.

        Args:
            token_ids: int64 [M]; x_{t+1} for the pair at position t.
            h: fp32 [M, H]; `fuse` of the features g_t.
            positions: int64 [M]; t.

        Returns:
            k (rotated) and v, fp32 [M, kv_heads, D] each.
        """
        x, _ = self._pair(token_ids, h)
        k, v = self._heads(self._weights.kv(x)).chunk(2, dim=1)
        return self._turned(k, self._weights.k_norm, self._turns(positions)), v

    def step(
        self, token_ids: torch.Tensor, h: torch.Tensor, positions: torch.Tensor, attend: DraftAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: a token for each row.

        The first step of a round has token x_n, `fuse(g_{n-1})` and position n - 1, and predicts
        x_{n+1}; the next has the drafted token, the returned h and position n.

        Args:
            token_ids: int64 [B], target ids.
            h: fp32 [B, H].
            positions: int64 [B].
            attend: the draft's cache.

        Returns:
            logits fp32 [B, draft_vocab] and the next step's h fp32 [B, H].
        """
        c, w = self.config, self._weights
        x, residual = self._pair(token_ids, h)
        turns = self._turns(positions)
        q, k, v = torch.split(self._heads(w.qkv(x)), [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        mixed = attend(self._turned(q, w.q_norm, turns), self._turned(k, w.k_norm, turns), v, positions)
        return self._finish(residual, mixed)

    def forward_full(
        self, token_ids: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain forward over whole sequences, as a head is trained: what `settle` and `step` must equal.

        Args:
            token_ids: int64 [B, L + 1]; the first token of each row has no pair.
            features: [B, L, k T] at positions 0..L-1.

        Returns:
            logits fp32 [B, L, draft_vocab], where [:, t] predicts x_{t+2}, and h fp32 [B, L, H].
        """
        num_rows, length = features.shape[:2]
        positions = torch.arange(length, device=features.device).repeat(num_rows)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> torch.Tensor:
            q, k, v = (t.reshape(num_rows, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return mixed.transpose(1, 2).flatten(0, 1)

        h = self.fuse(features.flatten(0, 1))
        logits, h = self.step(token_ids[:, 1:].flatten(), h, positions, attend)
        return logits.view(num_rows, length, -1), h.view(num_rows, length, -1)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft token ids int64 [..] to the target's."""
        return self._weights.vocabulary[draft_ids]

    def _pair(self, token_ids: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input [M, 2 H] and its residual stream [M, H]."""
        c, w = self.config, self._weights
        normed = rms_norm(h, w.hidden_norm, c.rms_norm_eps)
        token = rms_norm(w.embed(token_ids), w.token_norm, c.rms_norm_eps)
        return torch.cat((token, normed), dim=-1), normed if c.norm_before_residual else h

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        dim = self.config.head_dim
        return x.float().view(len(x), x.shape[-1] // dim, dim)  # -1 is ambiguous where nothing is settled yet

    def _turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [M, D / 2]. No table: drafting may go beyond any context."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor

    def _turned(
        self, x: torch.Tensor, norm: torch.Tensor | None, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        if norm is not None:
            x = rms_norm(x, norm, self.config.rms_norm_eps)
        return rotate(x, *turns)

    def _finish(self, residual: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From the attention's result [M, heads, D] to logits and the next h."""
        c, w = self.config, self._weights
        h = residual + w.o(mixed.flatten(1))
        h = h + w.down(swiglu(w.gate_up(rms_norm(h, w.post_norm, c.rms_norm_eps))))
        normed = rms_norm(h, w.norm, c.rms_norm_eps)
        return w.head(normed).float(), normed if c.norm_output else h
