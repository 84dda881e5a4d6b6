"""What a configuration turns into, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tiny_models import hf_config

from paceline.errors import ConfigError, ModelError, UnsupportedModelError
from paceline.models.config import ModelConfig, config_from_gguf, config_from_hf

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}
SHAPES = {"token_embd.weight": (96, 64)}


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_writes_is_read(name: str) -> None:
    theirs = getattr(transformers, f"{name}Config")(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    written = theirs.to_diff_dict() | {"architectures": [f"{name}ForCausalLM"]}
    written.pop("sliding_window", None)
    ours = config_from_hf(written)
    assert ours.architecture == name.lower()
    for mine, his in {
        "vocab_size": "vocab_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "rms_norm_eps": "rms_norm_eps",
        "max_position_embeddings": "max_position_embeddings",
        "tie_word_embeddings": "tie_word_embeddings",
        "bos_token_id": "bos_token_id",
    }.items():
        assert getattr(ours, mine) == getattr(theirs, his), mine
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.qkv_bias == (name == "Qwen2")
    assert ours.qk_norm == (name == "Qwen3")


def test_llama_biases() -> None:
    both = config_from_hf(hf_config(attention_bias=True, mlp_bias=True))
    assert (both.qkv_bias, both.o_bias, both.mlp_bias) == (True, True, True)
    # transformers' Mistral ignores the field.
    mistral = config_from_hf(hf_config(architectures=["MistralForCausalLM"], attention_bias=True))
    assert not mistral.qkv_bias


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"num_experts": 64}, "num_experts 64"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor 0.25",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "odd": 1}}, "'odd'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named.replace("(", r"\(")):
        config_from_hf(hf_config(**changes))


WINDOWED = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a number, got 'two'"),
        ({"num_hidden_layers": 5000}, "num_layers must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1"),
        ({"head_dim": "x"}, "head_dim must be"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor must be a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor must be a number"),
        ({"rope_scaling": "linear"}, "must be an object, got 'linear'"),
        ({"architectures": [7]}, r"architectures must be a list of names, got \[7\]"),
        ({"architectures": True}, "architectures must be a list of names, got True"),
        (WINDOWED | {"max_window_layers": "x"}, "max_window_layers must be a number, got 'x'"),
        (WINDOWED | {"layer_types": 5}, "layer_types must be a list, got 5"),
    ],
)
def test_broken_fields_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        config_from_hf(hf_config(**changes))


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32}, 32),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 32}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": False}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            32,
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            None,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 32,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            32,
        ),
    ],
)
def test_the_sliding_window_in_force(changes: dict[str, Any], window: int | None) -> None:
    assert config_from_hf(hf_config(**changes)).sliding_window == window


def test_a_window_is_refused_beyond_its_size_and_exact_up_to_it() -> None:
    config = config_from_hf(hf_config(architectures=["MistralForCausalLM"], sliding_window=32))
    assert config.context_length(32) == 32
    with pytest.raises(UnsupportedModelError, match="sliding_window 32 is smaller than the context of 33"):
        config.context_length(33)
    with pytest.raises(UnsupportedModelError, match="sliding_window 32 is smaller than the context of 128"):
        config.context_length()


def test_context_length() -> None:
    config = config_from_hf(hf_config())
    assert config.context_length() == 128
    assert config.context_length(5) == 5
    with pytest.raises(ConfigError, match="at most 128"):
        config.context_length(129)


def test_yarn_extends_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert config_from_hf(hf_config(rope_scaling=scaling)).context_length() == 512
    stated = config_from_hf(hf_config(rope_scaling=scaling, max_position_embeddings=512))
    assert stated.context_length() == 512


def gguf_config(**changes: Any) -> ModelConfig:
    metadata = GGUF | {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return config_from_gguf({key: value for key, value in metadata.items() if value is not None}, SHAPES)


def test_gguf_and_hf_agree() -> None:
    from_hf = config_from_hf(hf_config(tie_word_embeddings=True, bos_token_id=...))
    assert gguf_config() == from_hf


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope__dimension_count": 8}, "llama.rope.dimension_count 8"),
        ({"attention__value_length": 8}, "llama.attention.value_length 8"),
        ({"expert_count": 4}, "llama.expert_count 4"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"attention__head_count_kv": [2, 1]}, "head_count_kv differs"),
        ({"logit_scale": 0.5}, "llama.logit_scale 0.5"),
    ],
)
def test_gguf_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        gguf_config(**changes)


def test_gguf_unknown_architecture_and_missing_key() -> None:
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        config_from_gguf({"general.architecture": "mamba"}, {})
    with pytest.raises(ModelError, match=r"llama\.context_length is missing"):
        gguf_config(context_length=None)


def test_gguf_broken_values_are_named() -> None:
    for key, value in {"attention__head_count": 0, "block_count": "two", "feed_forward_length": []}.items():
        with pytest.raises(ModelError, match=key.replace("__", ".")):
            gguf_config(**{key: value})


def test_gguf_values_per_layer_may_be_a_list() -> None:
    assert gguf_config(attention__head_count_kv=[2, 2]).num_kv_heads == 2


def test_gguf_sliding_window_is_kept() -> None:
    assert gguf_config(attention__sliding_window=32).sliding_window == 32
