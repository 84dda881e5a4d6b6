"""What a model is: one frozen record for every architecture and both file formats.

Made from an HF config.json or from GGUF metadata. Anything that would change the words and that
Paceline does not compute is refused by name here, before a weight is read.

Does not know: where the files are (`checkpoint`), tensor names (`schema`), or the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError, ModelError, UnsupportedModelError
from paceline.models.rope_config import RopeConfig, rope_from_gguf, rope_from_hf

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]

_HF_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_GGUF_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# Fields of config.json that change the result, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0, 1),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
}
# Beyond any model; they keep a damaged file from allocating without bound.
_MAX_DIM = 1 << 24
_MAX_LAYERS = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder of the Llama family: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Sliding windows. `sliding_window` is the number of positions, its own included, that a token
    may attend to, or None where every layer attends to everything. Paceline computes full
    attention only; the two are the same up to a context of `sliding_window` tokens, so a model
    with a window is accepted up to that context and refused by name beyond (`context_length`).

    `max_position_embeddings` is the context the model was made for, scaling included: for YaRN
    that is `factor` times the original context, as vLLM counts it.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            high = _MAX_LAYERS if name == "num_layers" else _MAX_DIM
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ModelError(f"{name} must be a whole number in [1, {high}], got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not self.rms_norm_eps > 0:
            raise ModelError(f"rms_norm_eps must be above 0, got {self.rms_norm_eps!r}")
        if self.rope.factors and len(self.rope.factors) != self.head_dim // 2:
            raise ModelError(
                f"rope factors: {len(self.rope.factors)} values, {self.head_dim // 2} are needed"
            )

    def context_length(self, requested: int | None = None) -> int:
        """The context to run with, in tokens: `requested`, or the model's own limit.

        Raises:
            ConfigError: `requested` is more than the model was made for.
            UnsupportedModelError: a sliding window is smaller than the context.
        """
        limit = self.max_position_embeddings
        if requested is not None and requested > limit:
            raise ConfigError(f"max_model_len must be at most {limit} for this model, got {requested}")
        length = requested or limit
        if self.sliding_window is not None and self.sliding_window < length:
            raise UnsupportedModelError(
                f"sliding_window {self.sliding_window} is smaller than the context of {length} tokens, and "
                f"windows are not supported; max_model_len {self.sliding_window} or less runs it exactly"
            )
        return length


def config_from_hf(config: Mapping[str, Any], eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """From config.json's content. `eos_token_ids` come from `paceline.tokenizer.hf_eos_token_ids`.

    Raises:
        UnsupportedModelError: an architecture or a field that Paceline does not run; named.
        ModelError: a field is missing or out of range; named.
    """
    architecture = _hf_architecture(config)
    for field, neutral in _NEUTRAL.items():
        if field in config and config[field] not in neutral:
            value = config[field]
            shown = value.get("quant_method", "set") if isinstance(value, Mapping) else value
            raise UnsupportedModelError(f"config.json: {field} {shown!r} is not supported")
    num_heads = _integer(config, "num_attention_heads")
    hidden_size = _integer(config, "hidden_size")
    head_dim = config.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_heads)
    # Only Llama and Qwen3 read attention_bias, and only Llama mlp_bias, in transformers.
    attention_bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    rope = rope_from_hf(config)
    max_len = _integer(config, "max_position_embeddings")
    if rope.type == "yarn":
        max_len = max(max_len, int(rope.original_max_position_embeddings * rope.factor))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps"),
        max_position_embeddings=max_len,
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        sliding_window=_hf_sliding_window(config, architecture),
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_factors: tuple[float, ...] = (),
    eos_token_ids: tuple[int, ...] = (),
) -> ModelConfig:
    """From GGUF metadata, with what GGUF leaves to the tensors read off `shapes`.

    Args:
        metadata: the header's keys and values.
        shapes: every tensor's shape, rows first, under its GGUF name.
        rope_factors: the values of `rope_freqs.weight`; empty if there is none.
        eos_token_ids: from `paceline.tokenizer.gguf_eos_token_ids`.

    Raises:
        UnsupportedModelError: an architecture or a key that Paceline does not run; named.
        ModelError: a key is missing or out of range; named.
    """
    arch = metadata.get("general.architecture")
    if arch not in _GGUF_ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    _refuse_gguf_extras(metadata, arch)
    num_heads = _uniform(metadata, f"{arch}.attention.head_count")
    hidden_size = _integer(metadata, f"{arch}.embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length") or hidden_size // num_heads
    for key in ("rope.dimension_count", "attention.value_length"):
        value = metadata.get(f"{arch}.{key}", head_dim)
        if value != head_dim:
            raise UnsupportedModelError(
                f"{arch}.{key} {value} is not supported: it differs from head_dim {head_dim}"
            )
    rope = rope_from_gguf(metadata, arch, rope_factors)
    max_len = _integer(metadata, f"{arch}.context_length")
    if rope.type == "yarn":
        max_len = max(max_len, int(rope.original_max_position_embeddings * rope.factor))
    return ModelConfig(
        architecture=_GGUF_ARCHITECTURES[arch],
        vocab_size=shapes.get("token_embd.weight", (0,))[0] or _integer(metadata, f"{arch}.vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_uniform(metadata, f"{arch}.feed_forward_length"),
        num_layers=_integer(metadata, f"{arch}.block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(metadata, f"{arch}.attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        rms_norm_eps=_number(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        max_position_embeddings=max_len,
        rope=rope,
        tie_word_embeddings="output.weight" not in shapes,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm=arch == "qwen3",
        sliding_window=metadata.get(f"{arch}.attention.sliding_window") or None,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=eos_token_ids,
    )


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values.get(key)
    if value is None:
        raise ModelError(f"{key} is missing from the model's configuration")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{key} must be a number, got {value!r}")
    return float(value)


def _integer(values: Mapping[str, Any], key: str) -> int:
    value = _number(values, key)
    if value < 1 or not value.is_integer():
        raise ModelError(f"{key} must be a whole number of at least 1, got {values[key]!r}")
    return int(value)


def _hf_architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"architectures must be a list of names, got {names!r}")
    for name in names:
        if name in _HF_ARCHITECTURES:
            return _HF_ARCHITECTURES[name]
    shown = ", ".join(names) or f"model_type {config.get('model_type')!r} with no architectures"
    raise UnsupportedModelError(
        f"config.json: architecture {shown} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}"
    )


def _hf_sliding_window(config: Mapping[str, Any], architecture: Architecture) -> int | None:
    """The window in force, by transformers' rules: Llama has none, Mistral's is always on, Qwen's
    is on for the layers from `max_window_layers` (or those in `layer_types`) if `use_sliding_window`.
    """
    window: int | None = config.get("sliding_window")
    if architecture == "llama" or not window:
        return None
    if architecture == "mistral":
        return window
    if not config.get("use_sliding_window", False):
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ModelError(f"layer_types must be a list, got {layer_types!r}")
        return window if "sliding_attention" in layer_types else None
    first_layer = _number(config, "max_window_layers") if "max_window_layers" in config else 28
    return window if first_layer < config["num_hidden_layers"] else None


def _refuse_gguf_extras(metadata: Mapping[str, Any], arch: str) -> None:
    neutral: dict[str, tuple[Any, ...]] = {
        "expert_count": (0,),
        "logit_scale": (1.0,),
        "residual_scale": (1.0,),
        "embedding_scale": (1.0,),
        "attention.scale": (),
        "attention.clamp_kqv": (0.0,),
        "attn_logit_softcapping": (),
        "final_logit_softcapping": (),
    }
    for key, values in neutral.items():
        value = metadata.get(f"{arch}.{key}")
        if value is not None and value not in values:
            raise UnsupportedModelError(f"{arch}.{key} {value} is not supported")


def _uniform(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A value that GGUF may give once or per layer; it must be the same in every layer."""
    value = metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(f"{key} differs between layers, which is not supported")
        value = value[0]
    return _integer({key: value}, key)
