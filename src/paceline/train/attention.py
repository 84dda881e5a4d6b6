"""Attention of the training-time test: causal over the settled pairs, plus the drafts of one's own chain.

At test step j, the query of chain t sees the settled pairs 0..t and the chain's own pairs of steps 1..j: a
causal matrix and j diagonals. Both go into one softmax. FlashAttention does the matrix; the diagonals are
elementwise and are merged through the log-sum-exp. Its backward pass takes the output and log-sum-exp of the
whole softmax, from which it recomputes exactly the whole's probabilities, so nothing is approximated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


def causal_with_diagonals(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chain_k: torch.Tensor, chain_v: torch.Tensor
) -> torch.Tensor:
    """softmax over [q k^T (causal), q . chain_k] times the values, scaled by D**-0.5.

    Args:
        q, k, v: [B, H, L, D]; bfloat16 on CUDA.
        chain_k, chain_v: [J, B, H, L, D], a diagonal for each step of the chain so far; J may be 0.

    Returns:
        [B, H, L, D].
    """
    mixed: torch.Tensor = _Merged.apply(q, k, v, chain_k, chain_v)  # type: ignore[no-untyped-call]
    return mixed


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [B, H, L] fp32, and what the backward pass wants besides."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse, ()
    out, lse, *rest = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out, lse, tuple(rest[:6])  # cum_seq_q, cum_seq_k, max_q, max_k, rng state and offset


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    extra: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)  # type: ignore[no-any-return]
    cum_q, cum_k, max_q, max_k, seed, offset = extra
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
    )


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, chain_k: Any, chain_v: Any) -> torch.Tensor:
        out, lse, extra = _flash(q, k, v)
        scores = (q.float() * chain_k.float()).sum(-1) * q.shape[-1] ** -0.5  # [J, B, H, L]
        total = torch.logsumexp(torch.cat((lse[None], scores)), dim=0)
        weights = (scores - total).exp()
        mixed: torch.Tensor = out.float() * (lse - total).exp()[..., None]
        mixed = (mixed + (weights[..., None] * chain_v.float()).sum(0)).to(q.dtype)
        ctx.save_for_backward(q, k, v, chain_k, chain_v, mixed, total, weights)
        ctx.extra = extra
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, chain_k, chain_v, out, total, weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k, v, out, total.contiguous(), ctx.extra)
        wide, scale = grad.float(), q.shape[-1] ** -0.5
        delta = (wide * out.float()).sum(-1)
        grad_scores = weights * ((wide * chain_v.float()).sum(-1) - delta) * scale
        grad_q = grad_q.float() + (grad_scores[..., None] * chain_k.float()).sum(0)
        grad_chain_k = (grad_scores[..., None] * q.float()).to(chain_k.dtype)
        grad_chain_v = (weights[..., None] * wide).to(chain_v.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_chain_k, grad_chain_v
