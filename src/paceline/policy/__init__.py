"""When to draft, and how deep: policies for speculative decoding, in plain Python.

Imports nothing but the standard library: no tensors, no clock, no files, no logging. A loop of any engine
drives a policy with two calls, `decide` before a step and `observe` after it; docs/policy.md shows one in
two dozen lines.

    types        the records, and the Protocol
    governor     the policy that measures: cost against acceptance, at every step
      acceptance, cost, served, doubt, search, warmup, shadow, guard, rows, fit,
      scene, plans, memory, config                                               its parts
    rivals       what other servers do, under the same Protocol
    replay       a recorded trace against any policy
    checks       what numbers from outside may be
"""

from paceline.policy.acceptance import Acceptance, AcceptanceConfig
from paceline.policy.config import GovernorConfig
from paceline.policy.cost import CostModel, Curve, DraftSample, TargetSample
from paceline.policy.governor import Governor
from paceline.policy.guard import GuardConfig
from paceline.policy.replay import Regret, Replay, Trace, fixed_depths, read_trace, regret, replay_trace
from paceline.policy.rivals import AcceptanceEma, BatchTable, Fixed, Threshold
from paceline.policy.shadow import ShadowConfig
from paceline.policy.types import (
    Decision,
    Explains,
    Load,
    Observation,
    Policy,
    PolicyError,
    Reason,
    RowView,
    ShadowResult,
)

__all__ = [
    "Acceptance",
    "AcceptanceConfig",
    "AcceptanceEma",
    "BatchTable",
    "CostModel",
    "Curve",
    "Decision",
    "DraftSample",
    "Explains",
    "Fixed",
    "Governor",
    "GovernorConfig",
    "GuardConfig",
    "Load",
    "Observation",
    "Policy",
    "PolicyError",
    "Reason",
    "Regret",
    "Replay",
    "RowView",
    "ShadowConfig",
    "ShadowResult",
    "TargetSample",
    "Threshold",
    "Trace",
    "fixed_depths",
    "read_trace",
    "regret",
    "replay_trace",
]
