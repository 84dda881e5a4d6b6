"""The flat config.json of SGLang and SpecForge, to and from `Eagle3Config`.

Layer ids mean "after layer i", 0-based, as ours do. Embeddings of the target's width are never used
by SGLang: it puts the target's in their place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from paceline.draft.config import EMBEDDINGS, Eagle3Config
from paceline.draft.fields import (
    LAYER_IDS,
    Overrides,
    capture_layers,
    common_options,
    flag,
    layer_fields,
    read_layer,
)
from paceline.draft.schema import EMBEDDING
from paceline.errors import ModelError, UnsupportedModelError
from paceline.models.config import ModelConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYER_PREFIX = "midlayer."

_EAGLE_CONFIG = "eagle_config"
_KNOWN = (LAYER_IDS, "use_aux_hidden_state", "norm_before_fc")


def read_config(
    raw: Mapping[str, Any], names: Collection[str], target: ModelConfig, overrides: Overrides
) -> Eagle3Config:
    """From config.json and the checkpoint's canonical tensor names.

    Raises:
        UnsupportedModelError, ModelError: see `Eagle3Config` and `fields`.
    """
    layer = read_layer(raw, _kind(raw))
    options = common_options(raw, layer, names, overrides)
    if raw.get("qkv_bias") is not None:
        options["qkv_bias"] = flag(raw, "qkv_bias")
    eagle = _eagle_config(raw)
    ids = capture_layers(eagle.get(LAYER_IDS), overrides.layer_id_offset or 0, target)
    num_aux = raw.get("num_aux_hidden_states")
    if num_aux not in (None, len(ids)):
        raise ModelError(f"num_aux_hidden_states is {num_aux}, but features are read after {len(ids)} layers")
    config = Eagle3Config(
        capture_layer_ids=ids,
        fc_bias=flag(raw, "bias"),
        fc_norm=flag(raw, "fc_norm") or flag(raw, "use_aux_norm"),
        input_norm=flag(raw, "norm_before_fc") or flag(eagle, "norm_before_fc"),
        **options,
    )
    _refuse_without_fc(config)
    return config


def _kind(raw: Mapping[str, Any]) -> Literal["llama", "qwen3"]:
    kind = raw.get("model_type") or "llama"
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModelError(
            f"model_type {kind!r} is not supported for a head; supported: llama, qwen3"
        )
    return "qwen3" if kind == "qwen3" else "llama"


def _eagle_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    eagle = raw.get(_EAGLE_CONFIG) or {}
    if not isinstance(eagle, Mapping):
        raise ModelError(f"{_EAGLE_CONFIG} must be an object, got {eagle!r}")
    unknown = [name for name, value in eagle.items() if name not in _KNOWN and value is not None]
    if unknown:
        raise UnsupportedModelError(f"{_EAGLE_CONFIG}.{unknown[0]} is not supported")
    if eagle.get("use_aux_hidden_state") not in (None, True):
        raise UnsupportedModelError(f"{_EAGLE_CONFIG}.use_aux_hidden_state false is not supported")
    if LAYER_IDS in raw:
        raise ModelError(f"{LAYER_IDS} belongs in {_EAGLE_CONFIG} in this format")
    twice = (raw.get("norm_before_fc"), eagle.get("norm_before_fc"))
    if None not in twice and twice[0] != twice[1]:
        raise ModelError(f"norm_before_fc and {_EAGLE_CONFIG}.norm_before_fc contradict each other")
    return eagle


def _refuse_without_fc(config: Eagle3Config) -> None:
    if config.feature_size == config.hidden_size:
        raise UnsupportedModelError(
            f"features as wide as hidden_size ({config.hidden_size}) are not supported in SGLang's format: "
            "it skips fc for them"
        )


def refuse(config: Eagle3Config) -> None:
    """Check that the format can express the head.

    Raises:
        UnsupportedModelError: it has an option that SGLang's head lacks; named.
    """
    for name in ("norm_before_residual", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"):
        if getattr(config, name):
            raise UnsupportedModelError(f"{name} cannot be expressed in SGLang's format")
    if EMBEDDINGS in config.capture_layer_ids:
        raise UnsupportedModelError("features of the embeddings cannot be expressed in SGLang's format")
    if config.embedding == "own" and config.target_hidden_size == config.hidden_size:
        raise UnsupportedModelError(
            f"{EMBEDDING} differs from the target's, which cannot be expressed in SGLang's format"
        )
    _refuse_without_fc(config)


def write_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """config.json's content. `dtype` is torch's name of the weights' type.

    Raises:
        UnsupportedModelError: a RoPE type that config.json has no name for.
    """
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **layer_fields(config),
        "draft_vocab_size": None if config.head == "target" else config.draft_vocab_size,
        "tie_word_embeddings": config.head == "embedding",
        "bias": config.fc_bias,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.input_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(config.capture_layer_ids),
        _EAGLE_CONFIG: {
            LAYER_IDS: list(config.capture_layer_ids),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.input_norm,
        },
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.target_hidden_size != config.hidden_size:  # SGLang takes the key's presence for a difference
        fields["target_hidden_size"] = config.target_hidden_size
    return fields
