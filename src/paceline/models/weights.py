"""A checkpoint's tensors as the matrices the decoder multiplies by.

Fuses q, k, v and gate, up into one matrix each. Does not know how tokens flow through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from paceline.kernels.memory import Arena
from paceline.models.checkpoint import Checkpoint
from paceline.models.config import ModelConfig
from paceline.models.packed import PackedMatrix, pack, packs
from paceline.models.tensors import RawTensor

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_O = "self_attn.o_proj"
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in], packed, dense or both, with its bias.

    With both, `dense` is the packed values rounded to bfloat16, for many tokens at a time.
    """

    packed: PackedMatrix | None
    dense: torch.Tensor | None
    bias: torch.Tensor | None = None  # fp32 [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias for x [.., in] of any float type, through `dense` and in its type; fp32 if biased."""
        assert self.dense is not None
        y = torch.nn.functional.linear(x.to(self.dense.dtype), self.dense)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. Norm weights are fp32."""

    input_norm: torch.Tensor
    qkv: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    post_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `head` is the embedding where the model ties them."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Matrix
    losses: tuple[Loss, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Loss:
    """What a copy of some weights lost against the file's values."""

    kind: str  # the file's type
    held_as: str
    num_tensors: int
    rms_error: float  # relative to the rms of the weights


class _LossMeter:
    """Collects the rounding error of every copy that is not exact."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[int, float, float]] = {}

    def add(self, kind: str, exact: torch.Tensor, held: torch.Tensor) -> None:
        error, norm = float((held.float() - exact).square().sum()), float(exact.square().sum())
        if error == 0.0:
            return
        key = (kind, str(held.dtype).removeprefix("torch."))
        count, errors, norms = self._sums.get(key, (0, 0.0, 0.0))
        self._sums[key] = (count + 1, errors + error, norms + norm)

    def report(self) -> tuple[Loss, ...]:
        return tuple(
            Loss(*key, count, (error / norm) ** 0.5) for key, (count, error, norm) in self._sums.items()
        )


def can_pack(checkpoint: Checkpoint) -> bool:
    """Whether every layer can run on the packed kernels, which add no bias but that of q, k and v."""
    config, tensors = checkpoint.config, checkpoint.tensors
    matrices = [
        [f"layers.{i}.{name}.weight" for name in names]
        for i in range(config.num_layers)
        for names in (_QKV, (_O,), _GATE_UP, (_DOWN,))
    ]
    return not (config.o_bias or config.mlp_bias) and all(
        packs([tensors[name] for name in names]) for names in matrices
    )


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    packed: bool,
    on_tensors: Callable[[int], None] = lambda count: None,
) -> Weights:
    """Read every tensor of an open checkpoint.

    Args:
        dtype: of dense matrices.
        packed: keep the layers' matrices packed as well, for the CPU kernels; see `can_pack`.
        on_tensors: told the number of tensors read, as they are.
    """
    loader = _Loader(checkpoint, dtype, device, packed, on_tensors)
    config = checkpoint.config
    embedding = loader.vocab_matrix("embed_tokens.weight")
    layers = tuple(loader.layer(config, i) for i in range(config.num_layers))
    norm = loader.vector("norm.weight")
    head = embedding if config.tie_word_embeddings else loader.vocab_matrix("lm_head.weight")
    return Weights(embedding, layers, norm, head, loader.losses.report())


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: str,
        packed: bool,
        on_tensors: Callable[[int], None],
    ) -> None:
        self._tensors = checkpoint.tensors
        self._dtype, self._device, self._packed = dtype, device, packed
        self._on_tensors = on_tensors
        self._arena = Arena()
        self.losses = _LossMeter()

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight or a bias, fp32."""
        self._on_tensors(1)
        return self._tensors[name].dequantize().to(self._device).contiguous()

    def _optional(self, name: str, present: bool) -> torch.Tensor | None:
        return self.vector(name) if present else None

    def _dense(self, tensor: RawTensor) -> torch.Tensor:
        exact = tensor.dequantize()
        held = exact.to(self._dtype)
        self.losses.add(tensor.kind, exact, held)
        return held.to(self._device)

    def matrix(self, *names: str, bias: tuple[str, ...] = ()) -> Matrix:
        """The rows of several tensors as one matrix."""
        tensors = [self._tensors[name] for name in names]
        packed = pack(tensors, self._arena) if self._packed and packs(tensors) else None
        dense = torch.cat([self._dense(t) for t in tensors]) if len(tensors) > 1 else self._dense(tensors[0])
        self._on_tensors(len(names))
        return Matrix(packed, dense, torch.cat([self.vector(name) for name in bias]) if bias else None)

    def vocab_matrix(self, name: str) -> Matrix:
        """An embedding or head: packed alone where it can be, since few tokens at a time use it."""
        tensor = self._tensors[name]
        packed = pack([tensor], self._arena) if self._packed and packs([tensor]) else None
        if packed is not None and packed.format.embed is None:
            packed = None
        self._on_tensors(1)
        return Matrix(packed, None if packed is not None else self._dense(tensor))

    def layer(self, config: ModelConfig, i: int) -> Layer:
        at = f"layers.{i}."

        def fused(names: tuple[str, ...], has_bias: bool) -> Matrix:
            biases = tuple(f"{at}{name}.bias" for name in names if has_bias)
            return self.matrix(*(f"{at}{name}.weight" for name in names), bias=biases)

        return Layer(
            input_norm=self.vector(f"{at}input_layernorm.weight"),
            qkv=fused(_QKV, config.qkv_bias),
            q_norm=self._optional(f"{at}self_attn.q_norm.weight", config.qk_norm),
            k_norm=self._optional(f"{at}self_attn.k_norm.weight", config.qk_norm),
            o=fused((_O,), config.o_bias),
            post_norm=self.vector(f"{at}post_attention_layernorm.weight"),
            gate_up=fused(_GATE_UP, config.mlp_bias),
            down=fused((_DOWN,), config.mlp_bias),
        )
