"""Speculation over HTTP: what a request may say of it, and what is shown of it.

Knows neither routes nor how drafts are made.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.errors import RequestError
from paceline.request import SpeculationSummary


class SpeculationOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`speculation` of a request. It never changes the words, only how fast they come."""

    enabled: bool | None = None  # false: as depth 0; true: as the server is set, unless depth says more
    depth: int | None = None  # drafts a round, at most; None: as the server is set
    summary: bool | None = None  # whether each choice of the answer says what drafting did for it

    def asked_depth(self) -> int | None:
        """The depth, None where the server's holds.

        Raises:
            RequestError: `enabled` and `depth` contradict each other.
        """
        if self.enabled is False and self.depth:
            raise RequestError(
                "speculation.depth", f"speculation.depth is {self.depth}, but speculation.enabled is false"
            )
        if self.enabled and self.depth == 0:
            raise RequestError("speculation.depth", "speculation.depth is 0, but speculation.enabled is true")
        return 0 if self.enabled is False else self.depth


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What drafting did for a choice, over its rounds with drafts; before any cut at a stop."""

    num_rounds: int
    num_drafted: int  # proposed
    num_verified: int  # of them, those that went through the model
    num_accepted: int  # of them, those that were right
    accept_len: float | None  # tokens a round, the bonus token among them; null without rounds
    acceptance_rate: float | None  # accepted of proposed; null when nothing was proposed
    accepted_per_pos: list[int]  # rounds whose draft at this position was accepted
    top_draft_prob_per_pos: list[float]  # the drafter's highest probability there: mean over rounds

    @classmethod
    def of(cls, summary: SpeculationSummary) -> Speculation:
        """As it is shown."""
        return cls(
            **msgspec.structs.asdict(summary),
            accept_len=summary.accept_len,
            acceptance_rate=summary.acceptance_rate,
        )


class SpeculationHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether requests can draft: `on`, `off` (there is no drafter) or `failed` (it turned itself off).

    With a policy that has failed, those that ask for a depth still can: `on`, at depth 0 unasked.
    """

    status: Literal["on", "off", "failed"]
    depth: int | str  # of requests that do not say; auto: chosen at every step
    max_depth: int  # largest that a request may ask for
    draft: str | None = None  # the drafter's name
    reason: str | None = None  # why it, or the policy, failed
