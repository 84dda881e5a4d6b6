"""A step's drafts: who makes any, how many, and which of them the target is to look at.

Knows neither the drafter's nor the target's arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.draft.protocol import NO_DRAFT, Drafter, Round
from paceline.step import Plan, RowStep
from paceline.worker.drafting import CoupledChoice
from paceline.worker.grammar import Cursor, GrammarRows
from paceline.worker.rows import RowState
from paceline.worker.sampling import SamplerState


@dataclass(frozen=True, slots=True)
class Proposals:
    """The drafts of a plan's S rows, of at most D each."""

    depths: Sequence[int]  # [S]; places of a row but its first. More than its drafts where nobody trimmed
    token_ids: torch.Tensor  # int64 [S, D], NO_DRAFT from where a row has none
    cursors: Mapping[int, Cursor]  # by row, of the rows that sample and have a grammar
    probs: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by row, fp32 [D], of those that ask
    shadows: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by row, int64 [D], not to be verified
    is_trimmed: bool = False

    def num_drafted(self) -> Sequence[int]:
        """[S]. Waits for the device."""
        if self.is_trimmed:
            return self.depths
        counts: list[int] = (self.token_ids >= 0).sum(1).tolist()
        return counts


def propose(
    plan: Plan,
    drafter: Drafter | None,
    rows: RowState,
    sampler: SamplerState,
    grammars: GrammarRows,
    asking: Collection[int],
    trims: bool,
) -> Proposals:
    """Let the drafter propose for the plan's rows, as deep as the plan says, in the shadow or not.

    Args:
        drafter: None: nothing is proposed.
        asking: rows that want the drafter's top probabilities.
        trims: leave out places without a draft; reads the drafts on the host.
    """
    cursors = {s.row: grammars.cursor(s.row) for s in plan.rows if s.samples and s.row in grammars}
    for row, cursor in cursors.items():
        if cursor.lifts:  # before anything is drawn, draft or not
            sampler.lift_min_tokens(row)
    places = [i for i, s in enumerate(plan.rows) if s.samples and _depth(s)]
    if drafter is None or not places:
        nothing = torch.empty(len(plan.rows), 0, dtype=torch.int64, device=sampler.device)
        return Proposals((0,) * len(plan.rows), nothing, cursors, is_trimmed=True)
    places.sort(key=lambda i: -_depth(plan.rows[i]))
    drafting = _round(plan, places, rows)
    row_ids = [plan.rows[i].row for i in places]
    choose = CoupledChoice(
        sampler,
        drafting,
        {k: cursors[row] for k, row in enumerate(row_ids) if row in cursors},
        [k for k, row in enumerate(row_ids) if row in asking],
    )
    drafts = drafter.propose(drafting, choose)
    shadows = {s.row: drafts[k].clone() for k, s in enumerate(plan.rows[i] for i in places) if not s.depth}
    for k, row in enumerate(row_ids):
        if row in shadows:
            drafts[k] = NO_DRAFT
        if row in cursors:
            num_taken = cursors[row].follow(drafts[k, : drafting.depths[k]].tolist())
            drafts[k, num_taken:] = NO_DRAFT
    probs: dict[int, torch.Tensor] = {}
    if choose.probs is not None:
        probs = {row: choose.probs[k] for k, row in enumerate(row_ids) if row in asking}
    token_ids = placed(drafts, drafting.depths, places, len(plan.rows), sampler.vocab_size)
    depths = [s.depth if s.samples else 0 for s in plan.rows]
    if trims:
        depths = [sum([draft != NO_DRAFT for draft in row]) for row in token_ids.tolist()]
    return Proposals(depths, token_ids, cursors, probs, shadows, trims)


def _depth(step: RowStep) -> int:
    """How deep the row drafts, for whatever use."""
    return step.depth or step.shadow_depth


def _round(plan: Plan, places: list[int], rows: RowState) -> Round:
    steps = [plan.rows[i] for i in places]
    row_ids = np.array([s.row for s in steps], np.int64)
    num_new = np.array([s.query_len for s in steps], np.int64)
    longest = int((rows.start_bound[row_ids] + num_new).max()) - 1
    return Round(*rows.newest(row_ids, num_new), tuple(_depth(s) for s in steps), longest)


def placed(
    drafts: torch.Tensor, depths: Sequence[int], places: list[int], num_rows: int, vocab_size: int
) -> torch.Tensor:
    """Drafts of the plan's rows at `places`, int64 [S, D]: up to each row's own depth and first NO_DRAFT.

    What is no token id counts as NO_DRAFT: the target's embedding must not see it.
    """
    if drafts.device.type != "cpu":
        return placed_torch(drafts, depths, places, num_rows, vocab_size)
    # Lists: for a few numbers, every operation on tensors would cost more than all of this.
    rows = [[NO_DRAFT] * drafts.shape[1] for _ in range(num_rows)]
    for place, depth, given in zip(places, depths, drafts.tolist(), strict=True):
        taken = list(itertools.takewhile(lambda draft: 0 <= draft < vocab_size, given[:depth]))
        rows[place][: len(taken)] = taken
    return torch.from_numpy(np.array(rows, np.int64))


def placed_torch(
    drafts: torch.Tensor, depths: Sequence[int], places: list[int], num_rows: int, vocab_size: int
) -> torch.Tensor:
    """`placed` in torch operations, on any device, without waiting for it."""
    device, num_columns = drafts.device, drafts.shape[1]
    own = torch.arange(num_columns, device=device) < torch.tensor(depths, device=device)[:, None]
    kept = ((drafts >= 0) & (drafts < vocab_size) & own).cumprod(1) > 0
    rows = drafts.new_full((num_rows, num_columns), NO_DRAFT)
    rows[torch.tensor(places, device=device)] = drafts.where(kept, NO_DRAFT)
    return rows
