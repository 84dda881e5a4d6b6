"""The EAGLE-3 head as it is trained: one decoder layer over (embedding, features) pairs.

Pair t is (x_{t+1}, g_t): the token that followed and the target's features at t; it predicts x_{t+2}.
Parameters are named as in SpecForge's checkpoints (Li et al. 2025, "EAGLE-3", arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, silu

from paceline.models.config import ModelConfig
from paceline.models.layers import rms_norm, rotate
from paceline.models.rope import rope_tables
from paceline.train.attention import causal_with_diagonals


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes that are not the target's."""

    draft_vocab_size: int
    intermediate_size: int
    num_features: int = 3


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        inner = config.num_heads * config.head_dim
        self.q_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config.hidden_size, intermediate_size)
        self.input_layernorm = _Norm(config.hidden_size)
        self.hidden_norm = _Norm(config.hidden_size)
        self.post_attention_layernorm = _Norm(config.hidden_size)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class TrainableHead(nn.Module):
    """Weights fp32; matrix products in `compute_dtype`.

    Args:
        draft_ids: int64 [draft_vocab_size], the target ids that the head can say, ascending.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: ModelConfig, shape: HeadShape, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.midlayer = _Layer(config, shape.intermediate_size)
        self.fc = nn.Linear(shape.num_features * config.hidden_size, config.hidden_size, bias=False)
        self.norm = _Norm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids), device=draft_ids.device))
        known = torch.zeros(config.vocab_size, dtype=torch.bool, device=draft_ids.device)
        known[draft_ids] = True
        self.register_buffer("t2d", known)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def draft_ids(self) -> torch.Tensor:
        """The target ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """h of each position from the target's features [.., 3 hidden]."""
        return linear(features, self.fc.weight.to(features.dtype))

    def chain(self, embeddings: torch.Tensor, features: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
        """The training-time test: chains of `num_steps` drafts from every position, given the true tokens.

        Args:
            embeddings: [B, L + num_steps, hidden], the target's embeddings of x_1 onwards.
            features: [B, L, 3 hidden], g_0 .. g_{L-1}.

        Returns:
            `num_steps` tensors [B, L, hidden]: the layer's output at step j, which predicts x_{t+2+j}.
        """
        length = features.shape[1]
        cos, sin = (t.to(features.device) for t in rope_tables(self.config, length + num_steps))
        h = self.fuse(features)
        chain_k: list[torch.Tensor] = []
        chain_v: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        k = v = torch.empty(0)
        for step in range(num_steps):
            turns = (cos[step : step + length], sin[step : step + length])
            q, new_k, new_v = self._project(embeddings[:, step : step + length], h, turns)
            if step == 0:
                k, v = new_k, new_v
            else:
                chain_k.append(new_k)
                chain_v.append(new_v)
            earlier = [torch.stack(t) if t else q.new_empty(0, *q.shape) for t in (chain_k, chain_v)]
            mixed = causal_with_diagonals(q, k, v, *earlier)
            h = self._finish(h, mixed)
            outputs.append(h)
        return outputs

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Over the draft vocabulary, for outputs of `chain`."""
        return linear(self._normed(h, self.norm), self.lm_head.weight.to(h.dtype))

    def _normed(self, x: torch.Tensor, norm: _Norm) -> torch.Tensor:
        return rms_norm(x.float(), norm.weight, self.config.rms_norm_eps).to(x.dtype)

    def _project(
        self, embeddings: torch.Tensor, h: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, and k and v repeated for the query heads that share them: [B, H, L, D] each."""
        c, layer = self.config, self.midlayer
        pair = torch.cat(
            (self._normed(embeddings, layer.input_layernorm), self._normed(h, layer.hidden_norm)), dim=-1
        )

        def heads(projection: nn.Linear) -> torch.Tensor:
            rows = linear(pair, projection.weight.to(pair.dtype))
            return rows.view(*rows.shape[:-1], -1, c.head_dim)

        q, k, v = (heads(p) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj))
        q, k = (rotate(x.float(), *turns).to(x.dtype) for x in (q, k))
        group = c.num_heads // c.num_kv_heads
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _finish(self, h: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        layer, dtype = self.midlayer, h.dtype
        h = h + linear(mixed.transpose(1, 2).flatten(2), layer.self_attn.o_proj.weight.to(dtype))
        x = self._normed(h, layer.post_attention_layernorm)
        inner = silu(linear(x, layer.mlp.gate_proj.weight.to(dtype))) * linear(
            x, layer.mlp.up_proj.weight.to(dtype)
        )
        return h + linear(inner, layer.mlp.down_proj.weight.to(dtype))
