"""A `PagedHead` on the packed CPU kernels: settling and a draft step are one native call each.

As in `models.program`, what runs for a number of tokens or rows is prepared once. The kernels read the
caller's tensors where they lie: after a target step nothing of Python and torch is left in the processor's
caches, and every operation there costs as much as one of these kernels.

Does not know how a head is read or rounded (`packed_weights`), nor what becomes of its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import linear

from paceline.draft.config import Eagle3Config
from paceline.draft.packed_weights import PackedHeadWeights
from paceline.draft.protocol import Settled
from paceline.kernels.packed_gemm import ADD, EMBED_IDS, GEMM_X, STORE, SWIGLU
from paceline.kernels.paged_attention import SEGMENT_FIELDS
from paceline.kernels.parallel import Phase, Program, Team
from paceline.kernels.rows import (
    MOVE_FROM,
    MOVE_SOURCE,
    MOVE_TO,
    SEGMENT_POSITIONS,
    SEGMENT_ROWS,
    move_rows,
    norm_rows,
    pair_rows,
    segment_rows,
)
from paceline.models.batch import Segments
from paceline.models.buffers import Buffers
from paceline.models.phases import Products, Recent, embed


class DraftCache(Protocol):
    """Owns the draft's K and V, of one layer, in the target's pages."""

    def place(self, segments: Segments) -> None:
        """Where the tokens that are written next belong: int64 [S, 4], see `Batch`."""
        ...

    def bind(
        self,
        layer: int,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        segments: Segments,
    ) -> Phase:
        """See `BindableAttention`, but for `segments`, read anew at every run."""
        ...

    def bind_write(self, layer: int, kv: torch.Tensor, bias: torch.Tensor | None) -> Phase:
        """The phase that only writes: fp32 `kv` [M, 2 kv_heads D] + `bias`, K before norm and RoPE."""
        ...


@dataclass(frozen=True, slots=True)
class _Settling:
    """For M tokens: their token ids and features in."""

    token_ids: Phase  # which reads int64 [M]
    features: Phase  # fp32 [M, k T]
    keep: Phase  # int64 [S] twice: places in the batch, rows
    program: Program


@dataclass(frozen=True, slots=True)
class _BulkSettling:
    """For M tokens, around two products in torch: token ids and `h` to `pair`, `kv` to the pages."""

    token_ids: Phase  # which reads int64 [M]
    h: torch.Tensor  # fp32 [M, H]
    make_pair: Program
    pair: torch.Tensor  # fp32 [M, 2 H]
    kv: torch.Tensor  # fp32 [M, 2 kv_heads D]
    keep: Phase  # int64 [S] twice: places in the batch, rows
    write: Program


@dataclass(frozen=True, slots=True)
class _Step:
    """For B rows: which they are and their tokens in, `logits` out."""

    places: Phase  # which reads rows and positions, int64 [B] each
    token_ids: Phase  # int64 [B]
    take: Phase  # rows, int64 [B], as the next
    keep: Phase
    logits: torch.Tensor  # fp32 [B, V_draft]
    program: Program


class PackedHead:
    """See `PagedHead`.

    Args:
        cache: its RoPE tables must reach the deepest draft's position, its block tables have a column there.
        num_rows: of its block tables.
        max_packed_tokens: larger steps are settled by the dense copies; None: none are.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: PackedHeadWeights,
        cache: DraftCache,
        team: Team,
        num_rows: int,
        max_packed_tokens: int | None,
    ) -> None:
        self.capture, self.vocabulary = config.capture_layer_ids, weights.vocabulary
        self._h = torch.zeros(num_rows, config.hidden_size)
        self._h_next = torch.zeros_like(self._h)  # of each row's latest draft step
        self._num_settled = np.zeros(1, np.int64)  # rows of the step that is being settled
        self._config, self._weights, self._cache, self._team = config, weights, cache, team
        self._max_packed_tokens = max_packed_tokens
        self._products, self._buffers = Products(team, config.rms_norm_eps), Buffers()
        self._settlings = Recent[_Settling]()
        self._bulk_settlings = Recent[_BulkSettling]()
        self._steps = Recent[_Step]()

    def prepare(self, num_tokens: int) -> None:
        """Make the programs that follow steps of up to so many tokens, and of draft steps of as many rows."""
        for num in range(num_tokens, 0, -1):
            self._settlings.get(num, self._settling)
            if num <= len(self._h):
                self._steps.get(num, self._step)

    @property
    def h(self) -> torch.Tensor:
        """See `PagedHead`."""
        self._team.finish()
        return self._h

    def settle(self, settled: Settled) -> None:
        """See `PagedHead`."""
        assert settled.features is not None
        inputs = (settled.next_ids, settled.features, settled.last, settled.rows)
        token_ids, features, last, rows = (x.contiguous() for x in inputs)
        self._team.finish()  # before its arguments change
        self._cache.place(settled.batch.segments)
        self._num_settled[0] = len(rows)
        if self._max_packed_tokens is not None and len(features) > self._max_packed_tokens:
            self._settle_bulk(token_ids, features, last, rows)
            return
        s = self._settlings.get(len(features), self._settling)
        s.token_ids.set(EMBED_IDS, token_ids.data_ptr())
        s.features.set(GEMM_X, features.data_ptr())
        _move(s.keep, last, rows)
        self._team.start(s.program, token_ids, features, last, rows)

    def _settle_bulk(
        self, token_ids: torch.Tensor, features: torch.Tensor, last: torch.Tensor, rows: torch.Tensor
    ) -> None:
        w = self._weights
        s = self._bulk_settlings.get(len(features), self._bulk_settling)
        s.h.copy_(linear(features.to(w.dense_fc.dtype), w.dense_fc))
        s.token_ids.set(EMBED_IDS, token_ids.data_ptr())
        self._team.run(s.make_pair)
        s.kv.copy_(linear(s.pair.to(w.dense_kv.dtype), w.dense_kv))
        _move(s.keep, last, rows)
        self._team.run(s.write)

    def wait(self) -> None:
        """See `PagedHead`."""
        self._team.finish()

    def step(
        self, rows: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last: int, goes_on: bool
    ) -> torch.Tensor:
        """See `PagedHead`."""
        rows, token_ids, positions = (x.contiguous() for x in (rows, token_ids, positions))
        s = self._steps.get(len(rows), self._step)
        at = rows.data_ptr()
        s.places.set(SEGMENT_ROWS, at)
        s.places.set(SEGMENT_POSITIONS, positions.data_ptr())
        s.token_ids.set(EMBED_IDS, token_ids.data_ptr())
        s.take.set(MOVE_SOURCE, (self._h_next if goes_on else self._h).data_ptr())
        s.take.set(MOVE_FROM, at)
        s.keep.set(MOVE_TO, at)
        self._team.run(s.program)
        return s.logits

    def _settling(self, num_tokens: int) -> _Settling:
        w, gemm, get = self._weights, self._products.gemm, self._buffers.get
        hidden = self._config.hidden_size
        h, pair = get("h", num_tokens, hidden), get("pair", num_tokens, 2 * hidden)
        kv = get("kv", num_tokens, w.kv.num_rows)
        fuse = gemm(w.fc, _later(num_tokens, w.fc.num_columns), h)
        look_up, make_pair = self._pairing(h, pair, None)
        write, keep = self._cache.bind_write(0, kv, w.kv_bias), self._keeping(h)
        phases = [fuse, look_up, make_pair, gemm(w.kv, pair, kv), write, keep]
        return _Settling(look_up, fuse, keep, Program(phases))

    def _bulk_settling(self, num_tokens: int) -> _BulkSettling:
        w, get = self._weights, self._buffers.get
        hidden = self._config.hidden_size
        h, pair = get("h", num_tokens, hidden), get("pair", num_tokens, 2 * hidden)
        kv = get("kv", num_tokens, w.kv.num_rows)
        look_up, make_pair = self._pairing(h, pair, None)
        keep = self._keeping(h)
        write = Program([self._cache.bind_write(0, kv, w.kv_bias), keep])
        return _BulkSettling(look_up, h, Program([look_up, make_pair]), pair, kv, keep, write)

    def _keeping(self, h: torch.Tensor) -> Phase:
        """Puts some places of h [M, H] where the rows' h are kept."""
        num_bytes = h.shape[1] * h.element_size()
        return move_rows.bind(h, 0, self._h, 0, num_bytes, num_tasks=self._num_settled, step=16)

    def _step(self, num_rows: int) -> _Step:
        c, w, gemm, get = self._config, self._weights, self._products.gemm, self._buffers.get
        segments = np.zeros((num_rows, SEGMENT_FIELDS), np.int64)
        h, residual = get("taken", num_rows, c.hidden_size), get("residual", num_rows, c.hidden_size)
        pair = get("pair", num_rows, 2 * c.hidden_size)
        qkv = get("qkv", num_rows, w.qkv.num_rows)
        mixed = get("mixed", num_rows, w.o.num_columns)
        inner = get("inner", num_rows, c.intermediate_size)
        logits = get("logits", num_rows, c.draft_vocab_size)
        places = segment_rows.bind(0, 0, segments, num_tasks=num_rows, step=16)
        num_bytes = c.hidden_size * h.element_size()
        take = move_rows.bind(self._h, 0, h, 0, num_bytes, num_tasks=num_rows, step=16)
        look_up, make_pair = self._pairing(h, pair, residual)
        phases = [
            places,
            take,
            look_up,
            make_pair,
            gemm(w.qkv, pair, qkv),
            self._cache.bind(0, qkv, w.qkv_bias, mixed, segments),
            gemm(w.o, mixed, residual, ADD),
            gemm(w.gate_up, residual, inner, SWIGLU, w.post_norm),
            gemm(w.down, inner, residual, ADD),
            gemm(w.head, residual, logits, STORE, w.norm),
        ]
        h_next = residual
        if c.norm_output:
            h_next = get("normed", num_rows, c.hidden_size)
            norm = (w.norm, c.rms_norm_eps, c.hidden_size)
            phases.append(norm_rows.bind(residual, *norm, h_next, num_tasks=num_rows))
        keep = move_rows.bind(h_next, 0, self._h_next, 0, num_bytes, num_tasks=num_rows, step=16)
        return _Step(places, look_up, take, keep, logits, Program([*phases, keep]))

    def _pairing(
        self, h: torch.Tensor, pair: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[Phase, Phase]:
        """The look-up of tokens, and what makes the layer's input [M, 2 H] of them and h, and its residual
        stream where that is wanted.
        """
        c, w = self._config, self._weights
        tokens = self._buffers.get("tokens", *h.shape)
        return (
            embed(w.embedding, torch.empty(len(h), dtype=torch.int64), tokens),
            pair_rows.bind(
                tokens, h, w.token_norm, w.hidden_norm, c.rms_norm_eps, c.hidden_size,
                pair, 0 if residual is None else residual, int(c.norm_before_residual), num_tasks=len(h),
            ),
        )  # fmt: skip


def _move(phase: Phase, sources: torch.Tensor, outs: torch.Tensor) -> None:
    """Let a `move_rows` go between these rows, int64 each."""
    phase.set(MOVE_FROM, sources.data_ptr())
    phase.set(MOVE_TO, outs.data_ptr())


def _later(num_rows: int, num_columns: int) -> torch.Tensor:
    """In the place of a tensor [num_rows, num_columns] whose address every run sets anew."""
    return torch.empty(1, num_columns).expand(num_rows, num_columns)
