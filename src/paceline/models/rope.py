"""Rotary position tables. The arithmetic follows transformers step by step, so tables are equal.

Does not know how they are applied; halves are paired as in Hugging Face (i with i + head_dim/2).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from paceline.models.rope_config import RopeConfig


class Rotated(Protocol):
    """What the tables depend on; a model and a draft head have it."""

    @property
    def rope(self) -> RopeConfig: ...
    @property
    def head_dim(self) -> int: ...


def rope_tables(config: Rotated, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [max_len, head_dim / 2], row t for position t.

    YaRN's attention factor is folded into both, as in transformers.
    """
    frequencies, attention_factor = rope_frequencies(config.rope, config.head_dim)
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position turns each pair, fp32 [head_dim / 2], and the attention factor."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.type == "yarn":
        return _yarn(powers, rope, head_dim), _yarn_attention_factor(rope)
    if rope.type == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32), 1.0
    return plain, 1.0


def _llama3(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > context / low, plain / rope.factor, plain)
    smooth = (context / wavelengths - low) / (high - low)
    between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(between, (1 - smooth) * scaled / rope.factor + smooth * scaled, scaled)


def _yarn(powers: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Pairs that turn often keep their frequency, slow ones are divided by `factor`, with a ramp."""

    def pair_turning(num_rotations: float) -> float:
        """The pair, as a real index, that turns `num_rotations` times in the original context."""
        context = rope.original_max_position_embeddings
        return head_dim * math.log(context / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
