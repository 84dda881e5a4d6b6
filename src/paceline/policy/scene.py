"""A step before its depths are chosen: its rows in groups, and what any choice would cost and yield."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.policy.memory import Memory
from paceline.policy.rows import Code
from paceline.policy.search import Base, Choice, Group, Prices, step_seconds
from paceline.policy.served import bucket
from paceline.policy.types import Load


class Scene(NamedTuple):
    """What there is to choose from."""

    load: Load
    site: int  # bucket of rows
    codes: list[int]  # of the rows, in their order
    numbers: Mapping[int, int]  # rows of each code
    free: list[tuple[int, Code]]  # codes whose depth is to be chosen
    base: Base
    prices: Prices


class Stage:
    """Builds scenes from a governor's memory. Keeps tables, no history.

    Args:
        is_ragged: see `GovernorConfig`.
    """

    def __init__(self, memory: Memory, depths: Sequence[int], is_ragged: bool) -> None:
        self._memory = memory
        self._depths = depths
        self._is_ragged = is_ragged
        self._bends = memory.model.tokens.edges if is_ragged else ()
        self._tables: list[list[list[float]]] = []  # by drafter, position and rows
        self._most_rows = -1  # that they hold
        self._buckets: list[int] = []

    def scene(self, load: Load, codes: list[int]) -> Scene:
        """The step with these rows."""
        rows = self._memory.rows
        numbers = Counter(codes)
        free: list[tuple[int, Code]] = []
        expected, num_tokens = float(len(codes)), len(codes)
        drafting: list[list[int]] = [[] for _ in rows.drafters]
        for code in sorted(numbers):
            spelled = rows.decode(code)
            if not spelled.is_own:
                free.append((code, spelled))
                continue
            num = numbers[code]
            num_tokens += num * spelled.depth
            survivals = self._memory.acceptance(spelled.drafter).survivals(spelled.kind)
            expected += num * sum(survivals[: spelled.depth])
            own = drafting[spelled.drafter]
            own += [0] * (spelled.depth - len(own))
            for j in range(spelled.depth):
                own[j] += num
        site = bucket(len(codes))
        base = Base(num_tokens, expected, drafting)
        return Scene(load, site, codes, numbers, free, base, self.prices(load, site))

    def prices(self, load: Load, site: int) -> Prices:
        """What tokens and drafts cost in a step like this."""
        model, served = self._memory.model, self._memory.served
        prompts = load.num_prompt_tokens
        most = load.num_rows * (1 + self._depths[-1]) + 1
        fixed, slope = model.besides(load)
        while len(self._buckets) < most:
            self._buckets.append(bucket(len(self._buckets)))
        return Prices(
            tokens=model.tokens.dense(most + prompts),
            fixed=fixed,
            slope=slope,
            drafts=self._drafts(load.num_rows),
            factors={depth: served.factors(site, depth) for depth in self._depths},
            buckets=self._buckets,
            bends=self._bends,
            num_prompt_tokens=prompts,
            prompt_fixed=model.prompt(prompts) if prompts else 0.0,
            prompt_factor=served.prompt_factor(site, bucket(prompts)) if prompts else 1.0,
        )

    def groups(self, scene: Scene) -> list[Group]:
        """The rows whose depth is to be chosen; a single group where they must have the same."""
        memory = self._memory
        groups = [
            Group(scene.numbers[code], memory.acceptance(c.drafter).survivals(c.kind), c.depth, c.drafter)
            for code, c in scene.free
        ]
        if self._is_ragged:
            return groups
        total = sum(group.num_rows for group in groups)
        mean = [
            sum(group.num_rows * group.survivals[j] for group in groups if j < group.max_depth) / total
            for j in range(self._depths[-1])
        ]
        return [Group(total, mean, max(group.max_depth for group in groups), groups[0].drafter)]

    def uniform(self, scene: Scene, depth: int, is_optimistic: bool = False) -> Choice:
        """What it comes to if every row that may goes as deep as `depth`; rows with their own depth do not
        draft.

        Args:
            is_optimistic: with acceptance at its upper bound.
        """
        expected, num_tokens = float(len(scene.codes)), len(scene.codes)
        by_drafter: dict[int, Counter[int]] = {}
        for code, spelled in scene.free:
            num, own = scene.numbers[code], min(depth, spelled.depth)
            of = self._memory.acceptance(spelled.drafter)
            survivals = of.optimistic() if is_optimistic else of.survivals(spelled.kind)
            expected += num * sum(survivals[:own])
            num_tokens += num * own
            by_drafter.setdefault(spelled.drafter, Counter()).update(dict.fromkeys(range(own), num))
        prices = scene.prices
        drafting = sum(
            prices.drafts[drafter][j][num] for drafter, rows in by_drafter.items() for j, num in rows.items()
        )
        return Choice(
            depth, depth, num_tokens, expected, step_seconds(prices, num_tokens, depth, drafting), 0, 0
        )

    def shadow_seconds(self, scene: Scene, num_rows: int) -> float:
        """The time for so many rows to draft as deep as can be, by the dearest drafter."""
        scale = self._memory.served.factors(scene.site, self._depths[-1])[1] * self._memory.served.drift
        return scale * max(sum(table[num_rows] for table in of) for of in scene.prices.drafts)

    def _drafts(self, num_rows: int) -> list[list[list[float]]]:
        """Times of draft steps; 0 for no rows."""
        drafters = self._memory.rows.drafters
        if len(self._tables) < len(drafters) or self._most_rows < num_rows:
            self._most_rows = 2 * num_rows
            size = self._most_rows + 1
            self._tables = [
                [
                    [0.0, *self._memory.model.position(name, j).dense(size)[1:size]]
                    for j in range(self._depths[-1])
                ]
                for name in drafters
            ]
        return self._tables
