"""The nested config.json of speculators, to and from `Eagle3Config`.

Layer ids count the embeddings as 0, so id i is our i - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.draft.config import Eagle3Config
from paceline.draft.fields import (
    LAYER_IDS,
    Overrides,
    capture_layers,
    common_options,
    flag,
    layer_fields,
    read_layer,
)
from paceline.errors import ModelError, UnsupportedModelError
from paceline.models.config import ModelConfig

ARCHITECTURE = "Eagle3DraftModel"
LAYER_PREFIX = "layers.0."
MODEL_TYPE = "speculators_model_type"

_VERSION = "0.9.0"
_LAYER = "transformer_layer_config"
_OFFSET = -1


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a speculators checkpoint says of its target."""

    name: str | None = None  # a path or a Hugging Face id
    architectures: tuple[str, ...] = ()


def read_config(
    raw: Mapping[str, Any], names: Collection[str], target: ModelConfig, overrides: Overrides
) -> Eagle3Config:
    """From config.json and the checkpoint's canonical tensor names.

    Raises:
        UnsupportedModelError, ModelError: see `Eagle3Config` and `fields`.
    """
    if raw[MODEL_TYPE] != "eagle3":
        raise UnsupportedModelError(f"{MODEL_TYPE} {raw[MODEL_TYPE]!r} is not supported: eagle3 is")
    nested = raw.get(_LAYER)
    if not isinstance(nested, Mapping):
        raise ModelError(f"{_LAYER} must be an object, got {nested!r}")
    layer = read_layer(nested, _kind(nested))
    if raw.get("norm_before_residual") is None:
        raise ModelError("norm_before_residual is missing, and engines disagree about its default")
    offset = _OFFSET if overrides.layer_id_offset is None else overrides.layer_id_offset
    return Eagle3Config(
        capture_layer_ids=capture_layers(raw.get(LAYER_IDS), offset, target),
        fc_norm=flag(raw, "fc_norm"),
        input_norm=flag(raw, "norm_before_fc"),
        **common_options(raw, layer, names, overrides),
    )


def _kind(nested: Mapping[str, Any]) -> Literal["llama", "qwen3"]:
    kind = nested.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise UnsupportedModelError(
            f"{_LAYER}.model_type {kind!r} is not supported for a head; supported: llama, qwen3"
        )
    return "qwen3" if kind == "qwen3" else "llama"


def refuse(config: Eagle3Config) -> None:
    """Check that the format can express the head.

    Raises:
        UnsupportedModelError: it has an option that speculators lacks; named.
    """
    if config.fc_bias:
        raise UnsupportedModelError("fc_bias cannot be expressed in speculators' format")
    if config.qkv_bias != config.o_bias:
        raise UnsupportedModelError(
            "qkv_bias without o_bias (or o_bias alone) cannot be expressed in speculators' format"
        )
    if config.mlp_bias and config.qk_norm:
        raise UnsupportedModelError(
            "mlp_bias together with qk_norm cannot be expressed in speculators' format"
        )
    if config.head == "target":
        raise UnsupportedModelError(
            "a head shared with the target cannot be expressed in speculators' format"
        )


def write_config(config: Eagle3Config, dtype: str, verifier: Verifier) -> dict[str, Any]:
    """config.json's content. `dtype` is torch's name of the weights' type.

    Raises:
        UnsupportedModelError: a RoPE type that config.json has no name for.
    """
    other_width = config.target_hidden_size != config.hidden_size
    return {
        "architectures": [ARCHITECTURE],
        MODEL_TYPE: "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        _LAYER: {"model_type": "qwen3" if config.qk_norm else "llama", **layer_fields(config)},
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: [i - _OFFSET for i in config.capture_layer_ids],
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.input_norm,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": config.target_hidden_size if other_width else None,
        "embed_requires_grad": False,
        "tie_word_embeddings": config.head == "embedding",
        "torch_dtype": dtype,
        "dtype": dtype,
    }
