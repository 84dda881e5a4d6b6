"""From a draft's description to the drafter that runs beside a loaded target.

The head computes on the packed kernels where the target does and the head's options allow it, in plain torch
otherwise; its K/V lies in pages under the target's page numbers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from paceline.draft.build import TargetTables, build_head
from paceline.draft.checkpoint import Draft
from paceline.draft.eagle3_drafter import Eagle3Drafter
from paceline.draft.packed_head import PackedHead
from paceline.draft.packed_weights import misfit, pack_head
from paceline.draft.paged_head import PagedHead
from paceline.draft.torch_head import TorchHead
from paceline.kernels.parallel import Team
from paceline.models.rope import rope_tables
from paceline.models.weights import Weights
from paceline.worker.attention.cpu import CpuAttention, fits
from paceline.worker.rows import RowState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a head shares with the target that it drafts for."""

    weights: Weights
    rows: RowState
    num_pages: int
    page_size: int
    max_len: int  # the longest row
    dtype: torch.dtype  # of the target's dense matrices and K/V
    team: Team | None  # of a target on the packed kernels
    max_packed_tokens: int | None  # see `PackedHead`
    num_prepared: int  # tokens of the largest step whose programs are made at once


def eagle3_drafter(draft: Draft, beside: Beside, max_depth: int) -> Eagle3Drafter:
    """A drafter that keeps up with the target's steps.

    Args:
        max_depth: drafts of a round, at most.
    """
    head = _packed(draft, beside, beside.team, max_depth) if beside.team is not None else None
    if head is None:
        head = _torch(draft, beside)
    return Eagle3Drafter(head)


def _packed(draft: Draft, beside: Beside, team: Team, max_depth: int) -> PagedHead | None:
    config, rows = draft.config, beside.rows
    obstacle = misfit(config, beside.weights)
    if obstacle is None and not fits(config, beside.page_size):
        obstacle = f"its head_dim is {config.head_dim}"
    if obstacle is not None:
        logger.info("the draft head runs in torch, slower than on the packed kernels: %s", obstacle)
        return None
    weights = pack_head(draft, beside.weights)
    rope = rope_tables(config, beside.max_len + max_depth)
    norms = [(weights.q_norm, weights.k_norm)]
    cache = CpuAttention(config, beside.num_pages, beside.page_size, rows.tables, rope, norms, team)
    head = PackedHead(config, weights, cache, team, len(rows.tables), beside.max_packed_tokens)
    head.prepare(beside.num_prepared)
    return head


def _torch(draft: Draft, beside: Beside) -> PagedHead:
    rows = beside.rows
    head = build_head(
        draft, TargetTables.of(beside.weights), dtype=beside.dtype, device=str(rows.tables.device)
    )
    return TorchHead(head, beside.num_pages, beside.page_size, rows.tables, beside.dtype)
