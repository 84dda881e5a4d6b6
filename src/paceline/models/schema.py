"""Which tensors a model has, and their shapes; and the check of a checkpoint against them.

Names are Hugging Face's without the leading `model.`. Does not know where tensors come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor of the model, in the order of the computation. Matrices are [out, in]."""
    hidden = config.hidden_size
    shapes: Shapes = {"embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(config, hidden).items()}
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class LayerSizes(Protocol):
    """What a decoder layer's shapes depend on: a model's configuration, or a draft head's."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...


def layer_shapes(config: LayerSizes, input_size: int) -> Shapes:
    """One layer's tensors, whose q, k and v read `input_size` numbers. Matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, input_size)
        if config.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["self_attn.o_proj.weight"] = (hidden, q_size)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        shapes[f"mlp.{name}_proj.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"mlp.{name}_proj.bias"] = (rows,)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Check that `found` is exactly the model's set of tensors. `source` names the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, extra or misshapen; the first is named.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{source}: tensor {missing[0]} is missing{_and_more(missing)}")
    extra = [name for name in found if name not in expected]
    if extra:
        raise CheckpointError(f"{source}: tensor {extra[0]} is not part of this model{_and_more(extra)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(f"{source}: tensor {name} has shape {found[name]}, the model needs {shape}")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
