"""What a drafter is to the worker: `settle` after each target step, `propose` before it.

Known tokens of a row are x_0..x_n; positions below n have been through the target. Drafts are guesses at
x_{n+1}, x_{n+2}, ... Whatever a drafter proposes, the words stay the target's; a bad one only costs time.

Does not know how the target's tokens are chosen (`Choose`) or what becomes of the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.models.batch import Batch

NO_DRAFT = -1  # in the place of a token: nothing is proposed here, nor behind it


@dataclass(frozen=True, slots=True)
class Round:
    """The rows that draft in a step, deepest first."""

    rows: torch.Tensor  # int64 [B]
    token_ids: torch.Tensor  # int64 [B]; x_n, the newest known token
    lengths: torch.Tensor  # int64 [B]; n, the positions that have been through the target
    depths: tuple[int, ...]  # [B], descending, each at least 1
    longest: int  # known on the host: no length exceeds it

    def num_at(self, step: int) -> int:
        """How many of the rows, from the first, make draft number `step` (from 0)."""
        return sum(depth > step for depth in self.depths)


@dataclass(frozen=True, slots=True)
class Settled:
    """What a target step leaves to the drafter: every position that went through the target.

    Places behind what a row accepted hold rejected drafts. Whatever is made of them must lie at their
    positions, where the next step writes again before anybody reads.
    """

    batch: Batch  # M tokens
    next_ids: torch.Tensor  # int64 [M]; the token at the following position, where that is known
    features: torch.Tensor | None  # fp32 [M, k T]: the streams of `Drafter.capture`, side by side
    rows: torch.Tensor  # int64 [S], each row of the step
    last: torch.Tensor  # int64 [S]; the place in the batch of the row's last settled position


class Choose(Protocol):
    """Draws a draft for each row, with the row's own parameters and noise."""

    def __call__(self, step: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        """The drafts number `step` of a round's first rows: int64 [B], target ids or NO_DRAFT.

        Args:
            logits: fp32 [B, V], valid until the drafter's next step; left as they are.
            vocabulary: int64 [V], the target's id of each column; None: it is the target's own.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens. May keep state by row; ready again after any number of steps without drafts."""

    @property
    def capture(self) -> tuple[int, ...]:
        """The target's residual streams that it reads, as `Eagle3Config.capture_layer_ids`; may be none."""
        ...

    def settle(self, settled: Settled) -> None:
        """Take over what a step computed. Called after every target step, at every depth, 0 included.

        May still be at it when it returns: see `wait`.
        """
        ...

    def wait(self) -> None:
        """Until a `settle` is done with its arguments and with block tables: before any of these changes."""
        ...

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """Drafts int64 [B, depths[0]]: target ids, or NO_DRAFT where a row proposes nothing more.

        Entries behind a row's first NO_DRAFT, and at or beyond its own depth, are without meaning.
        """
        ...
