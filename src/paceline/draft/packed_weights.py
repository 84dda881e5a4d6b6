"""An EAGLE-3 head's matrices in the packed kernels' layout, quantised on load.

Trained heads come in bfloat16, and a draft step reads every weight once: fewer bytes, faster drafts. What
rounding costs is acceptance, never words. Not all matrices are alike in this. Measured on the default model's
head, 4 bits for everything cost 0.8 points of first drafts accepted (of 67), for `fc` alone 0.9 and for
attention 0.4, but for the MLP and the vocabulary, five sixths of the bytes, nothing (0.0 +- 0.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.draft.checkpoint import Draft
from paceline.draft.config import Eagle3Config
from paceline.draft.schema import D2T, EMBEDDING, HEAD, LAYER
from paceline.kernels.memory import Arena
from paceline.kernels.packed_gemm import BLOCK
from paceline.kernels.simd import WIDTH
from paceline.models.packed import PackedMatrix, pack_dense
from paceline.models.tensors import Kind
from paceline.models.weights import Weights

_NOT_HERE = ("fc_bias", "fc_norm", "input_norm", "o_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class PackedHeadWeights:
    """A head's tensors as the packed kernels multiply by them. Norm weights and biases are fp32.

    `kv` is the K and V rows of `qkv` (the same memory). The dense copies, of the packed values, settle many
    tokens at a time. `embedding` and `head` may be the target's.
    """

    embedding: PackedMatrix  # [vocab, H]
    fc: PackedMatrix  # [H, k T]
    dense_fc: torch.Tensor
    token_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor  # [H]
    qkv: PackedMatrix  # [(heads + 2 kv_heads) D, 2 H]
    qkv_bias: torch.Tensor | None  # [(heads + 2 kv_heads) D]
    kv: PackedMatrix  # [2 kv_heads D, 2 H]
    kv_bias: torch.Tensor | None  # [2 kv_heads D]
    dense_kv: torch.Tensor
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    o: PackedMatrix  # [H, heads D]
    post_norm: torch.Tensor  # [H]
    gate_up: PackedMatrix  # [2 inner, H]
    down: PackedMatrix  # [H, inner]
    norm: torch.Tensor  # [H]
    head: PackedMatrix  # [draft_vocab, H]
    vocabulary: torch.Tensor  # int64 [draft_vocab]: the target's id of each draft token


def misfit(config: Eagle3Config, target: Weights) -> str | None:
    """Why the packed kernels cannot run a head for this target, in a few words; None where they can."""
    c = config
    for option in _NOT_HERE:
        if getattr(c, option):
            return f"the head has {option}"
    if c.head_dim % BLOCK:
        return f"the head's head_dim is {c.head_dim}, not a multiple of {BLOCK}"
    columns = (c.hidden_size, c.feature_size, c.intermediate_size)
    rows = (c.draft_vocab_size, c.vocab_size if c.embedding == "own" else 0)
    if any(n % BLOCK for n in columns) or any(n % WIDTH for n in rows):
        return f"the head's sizes are not multiples of {BLOCK} (vectors) and {WIDTH} (vocabularies)"
    table = target.embedding.packed
    if c.embedding == "target" and (table is None or table.format.embed is None):
        return "the target's embedding, which the head shares, is not packed"
    if c.head == "target" and target.head.packed is None:
        return "the target's head, which the draft shares, is not packed"
    return None


def pack_head(
    draft: Draft,
    target: Weights,
    *,
    kind: Kind = "Q8_0",
    bulk_kind: Kind = "Q4_1",
    dense: torch.dtype = torch.bfloat16,
) -> PackedHeadWeights:
    """A head that `misfit` has nothing against.

    Args:
        kind: Q8_0, Q4_1 or Q4_0, of `fc` and attention; an embedding of its own is always Q8_0.
        bulk_kind: the same, of the MLP and the vocabulary's matrix.
        dense: of the matrices that settle many tokens.
    """
    config, make = draft.config, _Maker(draft)
    layer = f"{LAYER}self_attn."
    qkv = make.matrix(kind, *(f"{layer}{n}_proj.weight" for n in "qkv"))
    biases = [make.vector(f"{layer}{n}_proj.bias") for n in "qkv"] if config.qkv_bias else []
    bias = torch.cat(biases) if biases else None
    q_size = config.num_heads * config.head_dim
    fc, kv = make.matrix(kind, "fc.weight"), qkv.rows(q_size)
    embedding = make.matrix("Q8_0", EMBEDDING) if config.embedding == "own" else target.embedding.packed
    own_head = make.matrix(bulk_kind, HEAD) if config.head == "own" else None
    head = {"own": own_head, "target": target.head.packed, "embedding": embedding}[config.head]
    assert embedding is not None
    assert head is not None
    return PackedHeadWeights(
        embedding=embedding,
        fc=fc,
        dense_fc=fc.dequantize(dense),
        token_norm=make.vector(f"{LAYER}input_layernorm.weight"),
        hidden_norm=make.vector(f"{LAYER}hidden_norm.weight"),
        qkv=qkv,
        qkv_bias=bias,
        kv=kv,
        kv_bias=None if bias is None else bias[q_size:],
        dense_kv=kv.dequantize(dense),
        q_norm=make.vector(f"{layer}q_norm.weight") if config.qk_norm else None,
        k_norm=make.vector(f"{layer}k_norm.weight") if config.qk_norm else None,
        o=make.matrix(kind, f"{layer}o_proj.weight"),
        post_norm=make.vector(f"{LAYER}post_attention_layernorm.weight"),
        gate_up=make.matrix(bulk_kind, f"{LAYER}mlp.gate_proj.weight", f"{LAYER}mlp.up_proj.weight"),
        down=make.matrix(bulk_kind, f"{LAYER}mlp.down_proj.weight"),
        norm=make.vector("norm.weight"),
        head=head,
        vocabulary=torch.arange(config.draft_vocab_size) + draft.tensors[D2T],
    )


class _Maker:
    """The draft's tensors by name, converted. The matrices of a head lie in one region."""

    def __init__(self, draft: Draft) -> None:
        self._tensors, self._arena = draft.tensors, Arena()

    def vector(self, name: str) -> torch.Tensor:
        return self._tensors[name].float().contiguous()

    def matrix(self, kind: Kind, *names: str) -> PackedMatrix:
        """The rows of several matrices as one."""
        return pack_dense(torch.cat([self._tensors[name] for name in names]), kind, self._arena)
