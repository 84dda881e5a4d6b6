"""What learning costs, at loads that come and go: a machine whose calibration is right, or wrong by a tenth.

Costs and acceptance are those of the default model on two cores. Rates are expected ones, of what was
decided, so that luck in accepted drafts is not in them.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import NamedTuple

import pytest
from policy_simulator import MS, Server, same

from paceline.policy import CostModel, Curve, Decision, Governor, Load, Reason

CHANCES = (0.66, 0.6, 0.55, 0.55, 0.55, 0.55)
SURVIVALS = tuple(math.prod(CHANCES[: j + 1]) for j in range(len(CHANCES)))
DEPTHS = tuple(range(7))
SIZES = (*range(1, 33), 40, 48, 56, 64, 80, 96, 112, 128, 256)


def _drafting(*times: float) -> Curve:
    return Curve([(num, t * MS) for num, t in zip((1, 4, 16, 64), times, strict=True)])


CPU = CostModel(
    tokens=Curve(
        [
            (n, t * MS)
            for n, t in (
                *((1, 4.0), (2, 4.4), (3, 4.9), (4, 5.3), (6, 6.9), (8, 8.9), (12, 12.3), (16, 15.5)),
                *((24, 22.5), (32, 29.0), (48, 41.0), (64, 58.0), (96, 86.0), (128, 120.0)),
            )
        ]
    ),
    drafts={
        "": (
            _drafting(0.42, 0.55, 1.45, 9),
            _drafting(0.25, 0.4, 1.2, 9),
            *(_drafting(0.28, 0.5, 1.1, 9),) * 4,
        )
    },
    row_seconds=0.03 * MS,
    context_seconds=1.4e-6,
    query_seconds=0.4e-6,
)


def off_by(share: float, phase: float) -> CostModel:
    """`CPU`, wrong by up to that share, differently at every size, smoothly."""

    def factor(size: int, shift: float = 0.0) -> float:
        return 1 + share * math.sin(1.7 * math.log(size) + phase + shift)

    drafts = CPU.drafts[""]
    return CostModel(
        tokens=Curve([(n, CPU.tokens(n) * factor(n)) for n in SIZES]),
        drafts={
            "": tuple(
                Curve([(n, d(n) * factor(n, j + 2)) for n in (1, 2, 4, 8, 16, 32, 64)])
                for j, d in enumerate(drafts)
            )
        },
        row_seconds=CPU.row_seconds,
        context_seconds=CPU.context_seconds,
        query_seconds=CPU.query_seconds,
    )


class Phase(NamedTuple):
    """How a load went: shares of the best fixed depth's rate that were lost, and of rounds that explored."""

    first: float  # rounds 1 to 100
    later: float  # 101 to 400
    both: float
    explored: float


class Ledger(Server):
    """A server that keeps what its rounds could have expected. Contexts stay between 60 and 400 tokens."""

    def __init__(self, truth: CostModel, seed: int) -> None:
        super().__init__(Governor(CPU, DEPTHS), truth, same(*CHANCES), noise=0.05, seed=seed)
        self.max_depth = DEPTHS[-1]
        self.rounds: list[tuple[Decision, Load]] = []

    def round(self, num_rows: int, num_prompt_tokens: int = 0) -> Decision:
        load = Load(num_rows, sum(self.lens.setdefault(i, 100) for i in range(num_rows)))
        decision = super().round(num_rows, num_prompt_tokens)
        self.rounds.append((decision, load))
        for i in range(num_rows):
            if self.lens[i] > 400:
                self.lens[i] = 60 + 37 * i % 100
        return decision

    def regret(self, begin: int, end: int) -> float:
        tokens = seconds = 0.0
        fixed = {depth: [0.0, 0.0] for depth in DEPTHS}
        for decision, load in self.rounds[begin:end]:
            tokens += sum(1 + sum(SURVIVALS[:depth]) for depth in decision.depths)
            seconds += self.truth.step_seconds(load, [("", depth) for depth in decision.depths])
            seconds += self.truth.draft_seconds([len(decision.shadow)] * decision.shadow_depth)
            for depth, sums in fixed.items():
                sums[0] += load.num_rows * (1 + sum(SURVIVALS[:depth]))
                sums[1] += self.truth.step_seconds(load, [("", depth)] * load.num_rows)
        return 1 - tokens / seconds / max(of / time for of, time in fixed.values())

    def phase(self, loads: list[int]) -> Phase:
        begin = len(self.rounds)
        for num_rows in loads:
            self.round(num_rows)
        explored = [decision.reason is Reason.WARMUP for decision, _ in self.rounds[begin:]]
        return Phase(
            self.regret(begin, begin + 100),
            self.regret(begin + 100, begin + len(loads)),
            self.regret(begin, begin + len(loads)),
            sum(explored) / len(explored),
        )


def mean_phases(share: float) -> dict[str, Phase]:
    """Loads one after the other, 400 rounds each; means over machines."""
    draw = random.Random(3)
    loads = {str(n): [n] * 400 for n in (1, 16)}
    loads |= {"1 again": [1] * 400, "4": [4] * 400, "8": [8] * 400}
    loads |= {"14 to 16": [draw.choice((14, 15, 16)) for _ in range(400)]}
    found: dict[str, list[Phase]] = {name: [] for name in loads}
    for seed in range(100, 112):
        server = Ledger(off_by(share, 1.05 * seed), seed)
        for name, of in loads.items():
            found[name].append(server.phase(of))
    return {
        name: Phase(*(statistics.fmean(values) for values in zip(*phases, strict=True)))
        for name, phases in found.items()
    }


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_calibration_that_is_right_makes_new_loads_cheap(share: float) -> None:
    phases = mean_phases(share)
    new = [phase for name, phase in phases.items() if name not in ("1", "1 again")]
    assert statistics.fmean(phase.explored for phase in new) < 0.05
    assert statistics.fmean(phase.both for phase in new) < (0.02 if share else 0.015)
    assert statistics.fmean(phase.later for phase in new) < (0.017 if share else 0.012)
    assert statistics.fmean(phase.first for phase in new) < 0.03
    assert phases["1"].both < 0.02  # acceptance is learnt here too
    assert phases["1 again"].both < 0.01
    assert phases["1 again"].explored < 0.04
