"""The decoder's small functions, in torch: any device, any dtype. Shapes are in the comments."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, in x's dtype."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, for [.., 2 F] holding gate then up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE, halves paired as in Hugging Face. x [M, heads, D]; cos, sin [M, D/2]."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
