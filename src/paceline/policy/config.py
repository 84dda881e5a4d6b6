"""The governor's settings. Nothing of it needs tuning to a machine, a model or a load."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.policy.acceptance import AcceptanceConfig
from paceline.policy.guard import GuardConfig
from paceline.policy.shadow import ShadowConfig
from paceline.policy.types import PolicyError


@dataclass(frozen=True, slots=True)
class GovernorConfig:
    """All settings, each with a default that holds everywhere.

    Args:
        dead_band: a depth gives way only to one whose rate is better by this share.
        is_ragged: rows of one step may have different depths. Without it all rows that have no depth of
            their own get the same, as far as they have room.
        warms_up: depths run out of turn until their cost is a served one.
        reuse: rounds that a choice is good for while there are as many rows; longer where it is rarely asked
            for, and where it comes out the same (`plans`). 1: choose anew at every step.
    """

    dead_band: float = 0.02
    is_ragged: bool = True
    warms_up: bool = True
    reuse: int = 16
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    shadow: ShadowConfig = field(default_factory=ShadowConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.dead_band < 1:
            raise PolicyError(f"dead_band must be in [0, 1), got {self.dead_band}")
        if self.reuse < 1:
            raise PolicyError(f"reuse must be at least 1, got {self.reuse}")
