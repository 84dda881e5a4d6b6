"""From a draft to a head that runs in torch: types, devices, fused matrices, the target's tables.

Does not know files or formats (`checkpoint`), nor heads on the packed kernels (`packed_weights`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from paceline.draft.checkpoint import Draft
from paceline.draft.eagle3 import Eagle3Head, Eagle3Weights
from paceline.draft.schema import D2T, EMBEDDING, HEAD, LAYER
from paceline.kernels.simd import WIDTH
from paceline.models.packed import PackedMatrix
from paceline.models.weights import Matrix, Weights

_ROWS_AT_ONCE = 64  # of a packed table: a tile of 16 is unpacked for each


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


class PackedTable:
    """A table in a kernel's layout, for a head that runs in torch beside a packed target. Exact as embedding;
    as head through a copy rounded to bfloat16, made when first used.
    """

    def __init__(self, matrix: PackedMatrix) -> None:
        self._matrix = matrix

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `Table`."""
        out = torch.empty(len(token_ids), self._matrix.num_columns)
        for begin in range(0, len(token_ids), _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            out[part] = self._rows(token_ids[part])
        return out

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        matrix, tiles = self._matrix, token_ids // WIDTH
        codes, scales = (parts.index_select(0, tiles) for parts in (matrix.codes, matrix.scales))
        picked = replace(matrix, num_rows=len(tiles) * WIDTH, codes=codes, scales=scales)
        rows = picked.dequantize().view(len(tiles), WIDTH, -1)
        return rows[torch.arange(len(tiles)), token_ids % WIDTH]

    def project(self, h: torch.Tensor) -> torch.Tensor:
        """See `Table`."""
        return self._dense(h)

    @cached_property
    def _dense(self) -> Matrix:
        return Matrix(None, self._matrix.dequantize(torch.bfloat16))


@dataclass(frozen=True, slots=True)
class TargetTables:
    """The target's tables, for a draft that stores none of its own."""

    embedding: Table
    head: Table

    @classmethod
    def of(cls, weights: Weights) -> TargetTables:
        """The tables of loaded weights, packed or dense; one where the model ties them."""
        embedding = _table(weights.embedding)
        return cls(embedding, embedding if weights.head is weights.embedding else _table(weights.head))


def _table(matrix: Matrix) -> Table:
    if matrix.dense is not None:
        return DenseTable(matrix)
    assert matrix.packed is not None
    return PackedTable(matrix.packed)


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
