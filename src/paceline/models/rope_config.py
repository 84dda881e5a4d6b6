"""Rotary position settings, read from an HF config or from GGUF metadata.

Does not know how the tables are computed (`rope`), and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from paceline.errors import ModelError, UnsupportedModelError

RopeType = Literal["default", "linear", "llama3", "yarn", "factors"]

_DEFAULT_THETA = 10_000.0

# What each type reads, apart from rope_type and rope_theta; anything else in the dict is refused,
# since a scaling parameter that is not applied gives wrong words without a sign.
_KNOWN: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_BETAS = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}  # GGUF's keys and their defaults
_NAMES = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn. Fields that a type does not use keep their defaults.

    `factors` (type "factors", from a GGUF's `rope_freqs.weight`): frequency i is divided by
    `factors[i]`, which is how llama.cpp stores Llama 3's scaling.
    """

    type: RopeType = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


def rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
    """From config.json: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises:
        UnsupportedModelError: an unknown type or parameter, RoPE per layer type, partial rotary.
        ModelError: a parameter that the type needs is missing, or is not a number above 0.
    """
    declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(declared, Mapping):
        raise ModelError(f"rope_parameters (rope_scaling) must be an object, got {declared!r}")
    scaling = dict(declared)
    nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(f"rope_parameters per layer type ({nested[0]}) are not supported")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _KNOWN:
        raise UnsupportedModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(_KNOWN)}")
    for source in (scaling, config):
        partial = source.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported: only 1.0 is")
    values = {key: value for key, value in scaling.items() if key not in _NAMES and value is not None}
    unknown = [key for key in values if key not in _KNOWN[kind] and kind != "default"]
    if unknown:
        raise UnsupportedModelError(f"rope parameter {unknown[0]!r} of type {kind!r} is not supported")
    known = {key: values[key] for key in _KNOWN[kind] if key in values}
    missing = [key for key in _REQUIRED[kind] if key not in known]
    if missing:
        raise ModelError(f"rope parameter {missing[0]!r} is missing, type {kind!r} needs it")
    if "original_max_position_embeddings" in _KNOWN[kind]:
        outside = config.get("original_max_position_embeddings")  # a top-level one wins, as in transformers
        default = known.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        known["original_max_position_embeddings"] = outside or default
    theta = scaling.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA
    _check_numbers({"rope_theta": theta, **known})
    return RopeConfig(type=cast(RopeType, kind), theta=float(theta), **known)


def rope_from_gguf(metadata: Mapping[str, Any], arch: str, factors: tuple[float, ...]) -> RopeConfig:
    """From GGUF metadata. `factors` are the values of `rope_freqs.weight`, empty if there is none.

    Raises:
        UnsupportedModelError: an unknown scaling type, or two kinds of scaling at once.
        ModelError: a value is not a number above 0.
    """
    theta = metadata.get(f"{arch}.rope.freq_base", _DEFAULT_THETA)
    prefix = f"{arch}.rope.scaling."
    legacy = metadata.get(f"{arch}.rope.scale_linear")  # before scaling.type existed
    kind = metadata.get(prefix + "type") or ("linear" if legacy else "none")
    factor = metadata.get(prefix + "factor") or legacy or 1.0
    _check_numbers({f"{arch}.rope.freq_base": theta, prefix + "factor": factor})
    theta, factor = float(theta), float(factor)
    if factors:
        if kind != "none":
            raise UnsupportedModelError(
                f"rope_freqs.weight together with {prefix}type {kind!r} is not supported"
            )
        if min(factors) <= 0:
            raise ModelError(f"rope_freqs.weight must be above 0, got {min(factors)}")
        return RopeConfig(type="factors", theta=theta, factors=factors)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=factor)
    if kind != "yarn":
        raise UnsupportedModelError(f"{prefix}type {kind!r} is not supported; supported: none, linear, yarn")
    unknown = [
        key
        for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier", "attn_factor")
        if metadata.get(prefix + key) not in (None, 1.0, *((0.0,) if key == "yarn_log_multiplier" else ()))
    ]
    if unknown:
        raise UnsupportedModelError(f"{prefix}{unknown[0]} {metadata[prefix + unknown[0]]} is not supported")
    original: Any = metadata.get(prefix + "original_context_length") or metadata.get(f"{arch}.context_length")
    betas = {key: metadata.get(prefix + key, value) for key, value in _YARN_BETAS.items()}
    _check_numbers({prefix + "original_context_length": original, **betas})
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(betas["yarn_beta_fast"]),
        beta_slow=float(betas["yarn_beta_slow"]),
    )


def _check_numbers(values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key == "truncate":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{key} must be a number above 0, got {value!r}")
