"""RoPE tables equal transformers' own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import hf_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import ModelError, UnsupportedModelError
from paceline.models.config import config_from_hf
from paceline.models.rope import rope_frequencies, rope_tables
from paceline.models.rope_config import RopeConfig, rope_from_gguf, rope_from_hf

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    LLAMA3 | {"factor": 32.0, "high_freq_factor": 2.5, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "truncate": False},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2},
]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_equal_to_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    theta = 500000.0 if scaling["rope_type"] == "llama3" else 10000.0
    sizes = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "max_position_embeddings": 256}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(num_attention_heads=4, rope_parameters=scaling | {"rope_theta": theta}, **sizes)
    )
    expected_cos, expected_sin = theirs(torch.zeros(1), torch.arange(256)[None])
    styles = [
        {"rope_parameters": scaling | {"rope_theta": theta}, "rope_theta": ...},
        {"rope_scaling": scaling, "rope_theta": theta},
    ]
    for style in styles:
        cos, sin = rope_tables(config_from_hf(hf_config(**sizes, **style)), 256)
        assert cos.dtype == sin.dtype == torch.float32
        torch.testing.assert_close(torch.cat((cos, cos), -1), expected_cos[0], rtol=0, atol=0)
        torch.testing.assert_close(torch.cat((sin, sin), -1), expected_sin[0], rtol=0, atol=0)


def test_the_old_name_of_the_type_is_read() -> None:
    assert rope_from_hf({"rope_scaling": {"type": "linear", "factor": 2.0}}).type == "linear"


def test_llama3_through_a_ggufs_factors() -> None:
    """llama.cpp stores Llama 3's scaling as one divisor a frequency."""
    plain, _ = rope_frequencies(RopeConfig(theta=500000.0), 64)
    scaled, _ = rope_frequencies(rope_from_hf({"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}), 64)
    factors = tuple((plain / scaled).tolist())
    rope = rope_from_gguf({"llama.rope.freq_base": 500000.0}, "llama", factors)
    frequencies, attention_factor = rope_frequencies(rope, 64)
    assert attention_factor == 1.0
    torch.testing.assert_close(frequencies, scaled, rtol=1e-6, atol=0)


def test_gguf_scaling_keys() -> None:
    prefix = "qwen2.rope.scaling."
    metadata = {
        "qwen2.rope.freq_base": 1e6,
        "qwen2.context_length": 32768,
        prefix + "type": "yarn",
        prefix + "factor": 4.0,
        prefix + "original_context_length": 32768,
    }
    from_hf = rope_from_hf(
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        }
    )
    assert rope_from_gguf(metadata, "qwen2", ()) == from_hf
    assert rope_from_gguf({"llama.rope.scale_linear": 2.0}, "llama", ()) == RopeConfig(
        type="linear", factor=2.0
    )
    assert rope_from_gguf({"llama.rope.scaling.type": "none"}, "llama", ()) == RopeConfig()
    with pytest.raises(ModelError, match=r"llama\.rope\.freq_base must be a number above 0, got 'x'"):
        rope_from_gguf({"llama.rope.freq_base": "x"}, "llama", ())
    with pytest.raises(UnsupportedModelError, match="together with"):
        rope_from_gguf({"llama.rope.scaling.type": "linear"}, "llama", (1.0,))
    with pytest.raises(UnsupportedModelError, match=r"yarn_attn_factor 0\.5"):
        rope_from_gguf(metadata | {prefix + "yarn_attn_factor": 0.5}, "qwen2", ())
