"""What the checkpoint formats' configurations have in common, read with every default made explicit.

Raises for anything that a head would need and Paceline does not compute; nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.draft.config import Eagle3Config, HeadSource
from paceline.draft.schema import EMBEDDING
from paceline.errors import ModelError, UnsupportedModelError
from paceline.models.config import ModelConfig, config_from_hf
from paceline.models.rope_config import RopeConfig, rope_from_hf

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_SMALLEST_WITH_DEFAULT = 7  # layers; below it the default names a layer twice
_OF_THE_LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
    "rope",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a checkpoint does not say reliably, said by its user. None: as the format defines it.

    `layer_id_offset` is added to the file's layer ids to get ids that mean "after layer i", 0-based.
    SGLang's format means that already (0); speculators counts the embeddings as 0 (-1), but heads
    converted to it from SGLang's may have kept theirs (0). The wrong one costs acceptance, nothing else
    shows it.

    `norm_output` says whether the head was trained on its normed output. SGLang and speculators
    store that; SpecForge's training configuration has a flag of the same name and another meaning.
    """

    layer_id_offset: int | None = None
    norm_output: bool | None = None


def flag(config: Mapping[str, Any], name: str) -> bool:
    """A boolean that may be missing or null, both of which are false.

    Raises:
        ModelError: anything else.
    """
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} must be true or false, got {value!r}")
    return bool(value)


def read_layer(config: Mapping[str, Any], kind: Literal["llama", "qwen3"]) -> ModelConfig:
    """The transformer layer's settings, by the rules that a whole model's follow.

    Raises:
        UnsupportedModelError: more than one layer, a sliding window, or what no model may have.
        ModelError: a field is missing or out of range; named.
    """
    num_layers = config.get("num_hidden_layers")
    if num_layers is None:
        raise ModelError("num_hidden_layers is missing from the head's configuration")
    if num_layers != 1:
        raise UnsupportedModelError(
            f"num_hidden_layers {num_layers} is not supported: heads of one layer are"
        )
    if flag(config, "use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedModelError("a head with sliding_attention is not supported")
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
    _check_rope_twins(config)
    return config_from_hf({**config, "architectures": [architecture]})


def _check_rope_twins(config: Mapping[str, Any]) -> None:
    """Exporters write RoPE's settings twice, for old readers and new; they must agree."""
    if not (config.get("rope_parameters") and config.get("rope_scaling")):
        return
    new = rope_from_hf({**config, "rope_scaling": None})
    old = rope_from_hf({"rope_theta": new.theta, **config, "rope_parameters": None})
    if old != new:
        raise ModelError("rope_parameters and rope_scaling contradict each other")


def common_options(
    config: Mapping[str, Any], layer: ModelConfig, names: Collection[str], overrides: Overrides
) -> dict[str, Any]:
    """`Eagle3Config`'s fields that every format's top level holds under the same names.

    Args:
        config: the top level of config.json.
        layer: from `read_layer`.
        names: the checkpoint's canonical tensor names.

    Raises:
        ModelError: `draft_vocab_size` is not there, not even as null; or a flag is no flag.
    """
    if "draft_vocab_size" not in config:
        raise ModelError("draft_vocab_size is missing from the head's configuration")
    pruned, width = config["draft_vocab_size"], config.get("target_hidden_size")
    head: HeadSource = "target" if pruned is None else "own"
    return {
        "target_hidden_size": layer.hidden_size if width is None else width,
        "draft_vocab_size": layer.vocab_size if pruned is None else pruned,
        "embedding": "own" if EMBEDDING in names else "target",
        "head": "embedding" if flag(config, "tie_word_embeddings") else head,
        "norm_before_residual": flag(config, "norm_before_residual"),
        "norm_output": flag(config, "norm_output")
        if overrides.norm_output is None
        else overrides.norm_output,
        **{name: getattr(layer, name) for name in _OF_THE_LAYER},
    }


def capture_layers(ids: object, offset: int, target: ModelConfig) -> tuple[int, ...]:
    """A file's layer ids with our meaning (see `Eagle3Config`).

    Without any, the default that SGLang and speculators share.

    Raises:
        ModelError: not a list of whole numbers, or no default for so small a target.
    """
    if ids is None:
        n = target.num_layers
        if n < _SMALLEST_WITH_DEFAULT:
            raise ModelError(f"{LAYER_IDS} is missing, and has no default for a target of {n} layers")
        return 1, n // 2 - 1, n - 4
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"{LAYER_IDS} must be a list of whole numbers, got {ids!r}")
    return tuple(i + offset for i in ids)


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rope_parameters` for config.json: old readers and new."""
    named: dict[str, tuple[str, ...]] = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate",
        ),
    }  # fmt: skip
    if rope.type not in named:
        raise UnsupportedModelError(f"rope type {rope.type!r} cannot be written to config.json")
    values = {name: getattr(rope, name) for name in named[rope.type] if getattr(rope, name) is not None}
    scaling = {"rope_type": rope.type, **values}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling if values else None,
        "rope_parameters": {**scaling, "rope_theta": rope.theta},
    }


def layer_fields(config: Eagle3Config) -> dict[str, Any]:
    """The transformer layer's part of config.json, the same in every format."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **rope_fields(config.rope),
    }
