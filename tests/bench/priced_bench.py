"""A sweep over priced engines, with every run written down."""

from __future__ import annotations

from collections.abc import Callable

from priced_engine import Clock, PricedEngine, Prices, Words, built, prompts

from paceline.bench.arms import Arm
from paceline.bench.local import Launched, LocalTarget
from paceline.bench.sweep import Sweep, Target
from paceline.bench.workload import Column, Work, Workload
from paceline.config import EngineConfig

PRICES = Prices()
LOADS = (1, 4, 8, 12, 16)
CONFIG = EngineConfig()


class Bench:
    """Arms on priced engines."""

    def __init__(self, *arms: Arm, prices: Prices = PRICES) -> None:
        self.arms, self.clock, self.prices = list(arms), Clock(), prices
        self.said: list[str] = []
        self.runs: list[tuple[str, Work]] = []

    def best_depth(self, rows: int) -> int:
        return max((0, 1, 3), key=lambda depth: self.prices.rate(rows, depth))

    def open(self, arm: Arm) -> Target:
        choose: dict[str, Callable[[int], int]] = {"auto": self.best_depth, "always": lambda rows: 1}
        engine = PricedEngine(
            self.clock,
            self.prices,
            choose.get(arm.name, lambda _: 0),
            max_depth=0 if arm.role == "plain" else 4,
        )
        target = LocalTarget(Launched(CONFIG, built(engine)), Words(), arm.depth, self.clock)  # type: ignore[arg-type]
        runs = self.runs

        class Recorded:
            def run(self, work: Work):  # type: ignore[no-untyped-def]
                runs.append((arm.name, work))
                return target.run(work)

        return Recorded()

    def sweep(self, loads: tuple[int, ...] = LOADS, num_rounds: int = 3, **more: float) -> Sweep:
        return Sweep(
            self.arms,
            [Column(0.0, None, load) for load in loads],
            Workload(prompts(), 64, 640),
            self.open,
            num_rounds=num_rounds,
            warmup_steps=int(more.get("warmup_steps", 0)),
            max_seconds=more.get("max_seconds"),
            say=self.said.append,
            clock=self.clock,
            pause=lambda seconds: None,
        )
