"""Cross entropy against soft targets, keeping only what its backward pass needs."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def soft_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """sum over rows of - sum_v p_v log softmax(logits)_v, for [N, D] each.

    `targets` may hold less than a whole distribution: the part of it that the draft vocabulary covers.
    """
    loss: torch.Tensor = _SoftCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Any) -> torch.Tensor:
        total = torch.logsumexp(logits.float(), dim=-1)
        mass = targets.sum(dim=-1, dtype=torch.float32)
        ctx.save_for_backward(logits, targets, total, mass)
        inner = (logits.float() * targets.float()).sum(dim=-1)
        loss: torch.Tensor = (mass * total - inner).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, total, mass = ctx.saved_tensors
        softmax = (logits.float() - total[:, None]).exp() * mass[:, None]
        return ((softmax - targets.float()) * grad).to(logits.dtype), None
