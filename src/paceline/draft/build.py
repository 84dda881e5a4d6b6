"""From a draft on disk to a head that runs: types, devices, fused matrices, the target's tables.

Does not know files or formats (`checkpoint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.draft.checkpoint import Draft, open_draft
from paceline.draft.eagle3 import Eagle3Head, Eagle3Weights
from paceline.draft.fields import Overrides
from paceline.draft.schema import D2T, EMBEDDING, HEAD, LAYER
from paceline.models.config import ModelConfig
from paceline.models.weights import Matrix, Weights


class Table(Protocol):
    """A vocabulary's vectors, both ways. The target's may be packed: hence no tensor."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [M] to fp32 [M, H]."""
        ...

    def project(self, h: torch.Tensor) -> torch.Tensor:
        """fp32 [M, H] to [M, vocab] of any float type."""
        ...


@dataclass(frozen=True, slots=True)
class DenseTable:
    """A table [vocab, H] as a tensor."""

    matrix: Matrix

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Table`."""
        assert self.matrix.dense is not None
        return torch.nn.functional.embedding(token_ids, self.matrix.dense).float()

    def project(self, h: torch.Tensor) -> torch.Tensor:
        """See `Table`."""
        return self.matrix(h)


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's tables, for a draft that stores none of its own."""

    embedding: Table
    head: Table

    @classmethod
    def dense(cls, weights: Weights) -> TargetTables:
        """Of a target whose tables are dense, as everywhere but on the packed CPU path."""
        return cls(DenseTable(weights.embedding), DenseTable(weights.head))


def build_head(
    draft: Draft, target: TargetTables, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Eagle3Head:
    """A head with its matrices as `dtype` on `device`; norms and biases are fp32."""
    make = _Maker(draft, dtype, device)
    config = draft.config
    embedding = make.table(EMBEDDING) if config.embedding == "own" else target.embedding
    head = make.table(HEAD) if config.head == "own" else target.head
    qkv = make.matrix(*(f"{LAYER}self_attn.{n}_proj" for n in "qkv"))
    q_size = config.num_heads * config.head_dim
    assert qkv.dense is not None
    weights = Eagle3Weights(
        embed=embedding.embed,
        input_norm=make.vector("input_norm.weight"),
        fc_norm=tuple(
            make.norm(f"fc_norm.{i}") for i in range(len(config.capture_layer_ids)) if config.fc_norm
        ),
        fc=make.matrix("fc"),
        token_norm=make.norm(f"{LAYER}input_layernorm"),
        hidden_norm=make.norm(f"{LAYER}hidden_norm"),
        qkv=qkv,
        kv=Matrix(None, qkv.dense[q_size:], None if qkv.bias is None else qkv.bias[q_size:]),
        q_norm=make.vector(f"{LAYER}self_attn.q_norm.weight"),
        k_norm=make.vector(f"{LAYER}self_attn.k_norm.weight"),
        o=make.matrix(f"{LAYER}self_attn.o_proj"),
        post_norm=make.norm(f"{LAYER}post_attention_layernorm"),
        gate_up=make.matrix(f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"),
        down=make.matrix(f"{LAYER}mlp.down_proj"),
        norm=make.norm("norm"),
        head=(embedding if config.head == "embedding" else head).project,
        vocabulary=(torch.arange(config.draft_vocab_size) + draft.tensors[D2T]).to(device),
    )
    return Eagle3Head(config, weights)


def load_draft(
    name: str,
    target: ModelConfig,
    tables: TargetTables,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    revision: str | None = None,
    overrides: Overrides | None = None,
    progress: bool = True,
) -> Eagle3Head:
    """`open_draft` and `build_head` in one; arguments and errors are theirs."""
    draft = open_draft(name, target, revision=revision, overrides=overrides, progress=progress)
    return build_head(draft, tables, dtype=dtype, device=device)


class _Maker:
    """The draft's tensors by name, converted."""

    def __init__(self, draft: Draft, dtype: torch.dtype, device: str) -> None:
        self._tensors, self._dtype, self._device = draft.tensors, dtype, device

    def vector(self, name: str) -> torch.Tensor | None:
        """A norm's weight or a bias, fp32; None where the head has none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.to(self._device, torch.float32)

    def norm(self, name: str) -> torch.Tensor:
        return self._tensors[f"{name}.weight"].to(self._device, torch.float32)

    def table(self, name: str) -> Table:
        return DenseTable(Matrix(None, self._dense(name)))

    def _dense(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device, self._dtype)

    def matrix(self, *names: str) -> Matrix:
        """The rows of several matrices as one, with their biases."""
        biases = [bias for name in names if (bias := self.vector(f"{name}.bias")) is not None]
        rows = [self._dense(f"{name}.weight") for name in names]
        return Matrix(None, torch.cat(rows), torch.cat(biases) if biases else None)
