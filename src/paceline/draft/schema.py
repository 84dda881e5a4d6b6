"""Which tensors an EAGLE-3 head has, and their shapes; and the check of a checkpoint against them.

Names are SpecForge's: a trainable head's state_dict and an SGLang checkpoint have them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.draft.config import Eagle3Config
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.schema import layer_shapes

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
D2T = "d2t"
T2D = "t2d"
LAYER = "midlayer."

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIASES = {
    "layers.0.": LAYER,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def weight_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of the head, in the order of the computation. Matrices are [out, in]."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.embedding == "own":
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    if config.input_norm:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        for i in range(len(config.capture_layer_ids)):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    shapes["fc.weight"] = (hidden, config.feature_size)
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    shapes |= {LAYER + name: shape for name, shape in _layer_shapes(config).items()}
    shapes["norm.weight"] = (hidden,)
    if config.head == "own":
        shapes[HEAD] = (config.draft_vocab_size, hidden)
    return shapes


def _layer_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """A decoder layer's, which reads pairs, and the norm of the pair's second half."""
    shapes = layer_shapes(config, 2 * config.hidden_size)
    return {**shapes, "hidden_norm.weight": (config.hidden_size,)}


def canonical_name(name: str) -> str:
    """A tensor's name without what formats and older versions call differently."""
    name = name.removeprefix("model.")
    for alias, canonical in _ALIASES.items():
        if name.startswith(alias):
            return canonical + name.removeprefix(alias)
    return name


def check_weights(
    config: Eagle3Config, found: Mapping[str, torch.Tensor], file_names: Mapping[str, str] | None = None
) -> None:
    """Check that `found`, the vocabulary map apart, is exactly the head's set of tensors.

    Args:
        found: tensors under canonical names.
        file_names: what the checkpoint calls them, for messages.

    Raises:
        CheckpointError: a tensor is missing, extra or misshapen; the first is named.
        UnsupportedModelError: a tensor is not float32, float16 or bfloat16; named.
    """
    named = file_names or {}
    expected = weight_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is missing{_and_more(missing)}")
    extra = [named.get(n, n) for n in found if n not in expected and n not in (D2T, T2D)]
    if extra:
        raise CheckpointError(
            f"tensor {extra[0]} is not part of the head that the configuration describes{_and_more(extra)}"
        )
    for name, shape in expected.items():
        tensor, shown = found[name], named.get(name, name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {shown} has shape {tuple(tensor.shape)}, the configuration needs {shape}"
            )
        if tensor.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"tensor {shown} has type {_short(tensor.dtype)}, which is not supported; "
                f"supported: {', '.join(map(_short, _DTYPES))}"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
