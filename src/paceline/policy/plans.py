"""Choices that are kept, and how long each is good for.

A choice holds for `reuse` - 1 further rounds while there are as many rows, four times as many where it is
rarely asked for: beside prompts, by how many there are, and with up to `FEW` rows, where it is kept by their
kinds. One that was used up and comes out the same is then good for twice as long, up to `LONGEST`: what it
rests on changes slowly, and after a step nothing of this code is in the processor's caches, so that making a
choice anew costs five times what it takes in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from paceline.policy.rows import RowBook
from paceline.policy.search import Choice
from paceline.policy.served import bucket
from paceline.policy.types import Load

FEW = 4  # rows up to which what each has shown counts at once
LONGEST = 256  # rounds
_RARE_TIMES = 4
_MANY = 256  # plans that are kept

# By code: depth of its first rows, their number, that of the others.
Depths: TypeAlias = Mapping[int, tuple[int, int, int]]

_Key: TypeAlias = tuple[int | tuple[int, ...], int]  # rows: number or codes; bucket of prompt tokens


class Plan(NamedTuple):
    """A choice, and how long it is good for."""

    site: int
    depths: Depths
    choice: Choice
    plain: Choice  # the same step without drafts, except by rows with their own depth
    until: int = 0  # the last round
    lasts: int = 0  # rounds that it was good for when it was kept


class Plans:
    """The plans of late. Rounds are counted by the caller.

    Args:
        reuse: see `GovernorConfig`.
    """

    def __init__(self, rows: RowBook, reuse: int) -> None:
        self._rows, self._reuse = rows, reuse
        self._plans: dict[_Key, Plan] = {}

    def find(self, load: Load, codes: list[int], now: int) -> Plan | None:
        """The plan that is good for round `now`; it may lack some of the codes."""
        plan = self._good(load, codes, now)
        if plan is None and len(codes) <= FEW:
            free = [self._rows.unlimited(code) for code in codes]
            if free != codes:
                plan = self._good(load, free, now)
                return plan and self._within_limits(plan, free, codes)
        return plan

    def _good(self, load: Load, codes: list[int], now: int) -> Plan | None:
        plan = self._plans.get(_key(load, codes))
        return plan if plan is not None and now <= plan.until else None

    def keep(self, load: Load, codes: list[int], plan: Plan, now: int) -> Plan:
        """The plan, chosen in round `now`, with how long it is good for."""
        key = _key(load, codes)
        before = self._plans.get(key)
        is_rare = load.num_prompt_tokens > 0 or load.num_rows <= FEW
        lasts = (self._reuse - 1) * (_RARE_TIMES if is_rare else 1)
        if before is not None and before.choice.limit == plan.choice.limit:
            lasts = max(lasts, min(before.lasts * (2 if now > before.until else 1), LONGEST))
        if len(self._plans) >= _MANY:
            self._plans.clear()
        plan = self._plans[key] = plan._replace(until=now + lasts, lasts=lasts)
        return plan

    def _within_limits(self, plan: Plan, free: list[int], codes: list[int]) -> Plan | None:
        """A plan for rows without limits, `free`, for the same rows with them, `codes`, if it keeps to them.

        What is best where rows may go deeper is best where they may not, if it does not.
        """
        found: dict[int, list[int]] = {}
        for depth, code in zip(spread(plan.depths, free), codes, strict=True):
            if depth > self._rows.decode(code).depth:
                return None
            found.setdefault(code, []).append(depth)
        return plan._replace(
            depths={code: (max(of), of.count(max(of)), min(of)) for code, of in found.items()}
        )

    def extended(self, plan: Plan, codes: list[int]) -> Plan | None:
        """The plan for rows with these codes, if it says something of rows like them.

        Those it does not know share what it has for the nearest kind, better kinds first: were they the ones
        without drafts, acceptance would be learnt from those they leave behind. At almost every step of a
        large batch some request comes or goes, is near its end or turns out to be of another kind: near
        enough until the next choice.
        """
        missing = set(codes) - plan.depths.keys()
        if not missing:
            return plan
        depths = dict(plan.depths)
        decode = self._rows.decode
        sharing: dict[int, list[int]] = {}
        for code in missing:
            spelled = decode(code)
            if spelled.is_own:
                depths[code] = (spelled.depth, 0, spelled.depth)
                continue
            near = [
                (abs(decode(other).kind - spelled.kind), of[2], other)
                for other, of in plan.depths.items()
                if not decode(other).is_own and decode(other).drafter == spelled.drafter
            ]
            if not near:
                return None
            sharing.setdefault(min(near)[2], []).append(code)
        for known, others in sharing.items():
            first, num_left, other = plan.depths[known]
            for code in sorted([known, *others], key=lambda code: decode(code).kind):
                num, limit = min(num_left, codes.count(code)), decode(code).depth
                depths[code] = (min(first, limit), num, min(other, limit))
                num_left -= num
        return plan._replace(depths=depths)

    def clear(self) -> None:
        """What they rest on has been contradicted."""
        self._plans.clear()


def spread(depths: Depths, codes: list[int]) -> tuple[int, ...]:
    """The depths of rows with these codes."""
    table = {code: other for code, (_, _, other) in depths.items()}
    found = list(map(table.__getitem__, codes))
    for code, (first, num, other) in depths.items():
        if first == other:
            continue
        at = -1
        for _ in range(min(num, codes.count(code))):  # a plan that is used again may meet fewer of them
            at = codes.index(code, at + 1)
            found[at] = first
    return tuple(found)


def _key(load: Load, codes: list[int]) -> _Key:
    """What has to be the same for a plan to be used again."""
    rows = tuple(sorted(codes)) if len(codes) <= FEW else len(codes)
    return rows, bucket(load.num_prompt_tokens) if load.num_prompt_tokens else 0
