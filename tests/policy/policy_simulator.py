"""A server in a few lines: true costs and true acceptance, which a policy learns only by what it runs.

What a draft round that starts at a position of a request would match is a function of (request, position)
alone, as under coupled sampling, so shadow drafts are compared with the very rounds that would have run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.policy import (
    CostModel,
    Curve,
    Decision,
    Load,
    Observation,
    Policy,
    Reason,
    RowView,
    ShadowResult,
)

Chances = Callable[[int], Sequence[float]]  # of a request: conditional acceptance by position

MS = 1e-3
# A two-core CPU with a 4-bit model: stairs of four tokens up to 32, smooth above.
TRUTH = CostModel(
    tokens=Curve(
        [(n, t * MS) for n, t in ((4, 8), (8, 13), (16, 25), (32, 44), (64, 75), (128, 140), (512, 540))],
        stairs=range(4, 33, 4),
    ),
    drafts={"": (Curve([(1, 0.8 * MS), (64, 8 * MS)]),) * 4},
    row_seconds=0.3 * MS,
    context_seconds=1e-7,
)


def same(*chances: float) -> Chances:
    """Every request accepts alike."""
    return lambda request: chances


@dataclass
class Shadow:
    """Shadow drafts whose words are not there yet."""

    request: int
    start: int
    depth: int
    matched: int


COMMON = same(0.6, 0.6, 0.65, 0.7)


class Server:
    """Runs rounds of a policy.

    Args:
        lag: decisions made between a step and its results.
        noise: relative standard deviation of a step's time.
        repeats: 1: decisions are run again as often as they say.
    """

    def __init__(
        self,
        policy: Policy,
        truth: CostModel = TRUTH,
        chances: Chances = COMMON,
        **options: float,
    ) -> None:
        self.policy, self.truth, self.chances = policy, truth, chances
        self.noise, self.lag = options.get("noise", 0.05), int(options.get("lag", 0))
        self.random = random.Random(options.get("seed", 1))
        self.repeats, self.num_repeats = bool(options.get("repeats", 0)), 0
        self.lens: dict[int, int] = {}
        self.views: dict[int, RowView] = {}
        self.late: list[Observation] = []
        self.shadows: list[Shadow] = []
        self.decisions: list[Decision] = []
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.max_depth = 4

    def matches(self, request: int, start: int) -> int:
        """How many drafts of a round that starts there are right."""
        draw = random.Random(request * 1_000_003 + start)
        num = 0
        for chance in self.chances(request):
            if draw.random() >= chance:
                break
            num += 1
        return num

    def rows(self, num_rows: int) -> tuple[RowView, ...]:
        return tuple(self.views.setdefault(i, RowView(i, self.max_depth)) for i in range(num_rows))

    def round(self, num_rows: int, num_prompt_tokens: int = 0) -> Decision:
        """One step with that many requests."""
        rows = self.rows(num_rows)
        load = Load(num_rows, sum(self.lens.setdefault(i, 100) for i in range(num_rows)), num_prompt_tokens)
        if self.num_repeats and self.decisions[-1].rows == rows and not num_prompt_tokens:
            decision, self.num_repeats = self.decisions[-1], self.num_repeats - 1
        else:
            decision = self.policy.decide(load, rows)
            self.num_repeats = decision.repeat if self.repeats else 0
        for index in decision.shadow:
            start = self.lens[index]
            matched = min(self.matches(index, start), decision.shadow_depth)
            self.shadows.append(Shadow(index, start, decision.shadow_depth, matched))
        accepted = tuple(
            min(self.matches(i, self.lens[i]), depth) if depth else 0
            for i, depth in enumerate(decision.depths)
        )
        for i, num in enumerate(accepted):
            self.lens[i] += num + 1
        seconds = self.truth.step_seconds(load, [("", depth) for depth in decision.depths])
        seconds += self.truth.draft_seconds([len(decision.shadow)] * decision.shadow_depth)
        seconds *= max(0.2, self.random.gauss(1, self.noise))
        self.late.append(Observation(decision, accepted, seconds, shadows=self._known_shadows()))
        if len(self.late) > self.lag:
            self.policy.observe(self.late.pop(0))
        self.decisions.append(decision)
        self.times.append(seconds)
        self.tokens.append(num_rows + sum(accepted))
        return decision

    def run(self, num_rounds: int, num_rows: int) -> list[Decision]:
        return [self.round(num_rows) for _ in range(num_rounds)]

    def _known_shadows(self) -> tuple[ShadowResult, ...]:
        def is_known(s: Shadow) -> bool:
            return self.lens[s.request] >= s.start + min(s.matched + 1, s.depth)

        known = tuple(
            ShadowResult(s.request, s.start, s.depth, s.matched) for s in self.shadows if is_known(s)
        )
        self.shadows = [s for s in self.shadows if not is_known(s)]
        return known

    def rate(self, begin: int = 0, end: int | None = None) -> float:
        """Tokens a second over these rounds."""
        return sum(self.tokens[begin:end]) / sum(self.times[begin:end])

    def share(self, reason: Reason) -> float:
        return sum(d.reason is reason for d in self.decisions) / len(self.decisions)

    def true_rate(self, num_rows: int, depth: int) -> float:
        """What a fixed depth would make, in the long run, at the present contexts."""
        expected, seconds = self.expectation(num_rows, depth)
        return expected / seconds

    def expectation(self, num_rows: int, depth: int) -> tuple[float, float]:
        """Tokens and seconds of a round at a fixed depth."""
        expected = 0.0
        for request in range(num_rows):
            survival, expected = 1.0, expected + 1
            for chance in self.chances(request)[:depth]:
                survival *= chance
                expected += survival
        load = Load(num_rows, sum(self.lens.get(i, 100) for i in range(num_rows)))
        return expected, self.truth.step_seconds(load, [("", depth)] * num_rows)

    def against_best(self, num_rounds: int, num_rows: int, depths: Sequence[int] = (0, 1, 2, 3, 4)) -> float:
        """Run so many rounds: tokens a second, over those of the best fixed depth at the same loads."""
        begin = len(self.times)
        sums = {depth: (0.0, 0.0) for depth in depths}
        for i in range(num_rounds):
            if i % 20 == 0:
                for depth, (tokens, seconds) in sums.items():
                    more, time = self.expectation(num_rows, depth)
                    sums[depth] = tokens + more, seconds + time
            self.round(num_rows)
        return self.rate(begin) / max(tokens / seconds for tokens, seconds in sums.values())

    def best(self, num_rows: int, depths: Sequence[int] = (0, 1, 2, 3, 4)) -> int:
        """The best fixed depth at the present contexts."""
        return max(depths, key=lambda depth: self.true_rate(num_rows, depth))
