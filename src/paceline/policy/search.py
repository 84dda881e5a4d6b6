"""The best way to spend draft tokens on rows that differ: a global argmax over depths and ragged batches.

Rows that are alike form a *group*. A group's rows go deeper in increments, from one declared depth to the
next; an increment of w tokens adds gain = S_{start+1} + ... + S_{end} expected tokens for each row, and its
*density* gain / w never rises along a row. So for any number of tokens the best are those of the highest
density, which never leave a gap in a row. For every deepest draft k the increments are taken in that order
and T is evaluated

- wherever a group is complete, and
- inside the groups at and behind the best of those, where the cost curve bends (stairs, a change of kernel):
  between bends E and T are straight lines, so nothing between them is better than both ends.

All k are tried and all prefixes with them: cost is a staircase, and its first local optimum is often not
the best. With draft steps whose time depends on whether they run, not on how many rows do, this is exact;
otherwise nearly so (tests compare it with trying everything). Pure functions: nothing is kept.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

_FEW = 4  # rows of a group up to which every number of them is tried
_MAX_BENDS = 3  # tried inside a larger group


class Group(NamedTuple):
    """Rows that are alike. `survivals[j]` is the chance that one accepts j + 1 drafts or more."""

    num_rows: int
    survivals: Sequence[float]
    max_depth: int  # declared
    drafter: int = 0


class Prices(NamedTuple):
    """The cost of a step at one load, by tables.

    m tokens of decoding rows, and rows[i][j] rows that make draft j of drafter i, take

        (tokens[m] + fixed + slope m + sum drafts[i][j][rows[i][j]]) factor(k, m)
        + prompt_factor (tokens[m + p] - tokens[m] + prompt_fixed)

    where factor is what `factors[k]` holds for `buckets[m]`, or else its second item: corrections are
    learnt from steps without prompt tokens, and an error of theirs must not grow with a long prompt.
    drafts[i][j][0] is 0.
    """

    tokens: Sequence[float]
    fixed: float
    slope: float
    drafts: Sequence[Sequence[Sequence[float]]]
    factors: Mapping[int, tuple[Mapping[int, float], float]]
    buckets: Sequence[int]
    bends: Sequence[int]  # sizes where `tokens` may bend, in order
    num_prompt_tokens: int = 0  # p
    prompt_fixed: float = 0.0
    prompt_factor: float = 1.0


class Base(NamedTuple):
    """What the step has before anything is chosen: one token a row, and rows whose depth is their own."""

    num_tokens: int
    expected: float
    rows: Sequence[Sequence[int]]  # by drafter and position: rows that draft there


class Choice(NamedTuple):
    """The best found for one deepest draft."""

    depth: int
    limit: int  # on increments, when it was found
    num_tokens: int  # m
    expected: float  # E
    seconds: float  # T, without drift
    num_items: int  # increments taken, the last of them for `num_last` rows
    num_last: int


class Item(NamedTuple):
    """An increment of a group."""

    density: float
    gain: float  # expected tokens a row
    width: int
    num_rows: int
    group: int
    drafter: int
    start: int
    end: int


def increments(groups: Sequence[Group], depths: Sequence[int]) -> list[Item]:
    """All increments between declared depths (which begin at 0), the densest first."""
    items = []
    for g, (num_rows, survivals, max_depth, drafter) in enumerate(groups):
        start = 0
        for end in depths[1:]:
            if end > max_depth:
                break
            gain = sum(survivals[start:end])
            width = end - start
            items.append(
                (-gain / width, end, Item(gain / width, gain, width, num_rows, g, drafter, start, end))
            )
            start = end
    items.sort()
    return [item for _, _, item in items]


def best_by_depth(
    items: Sequence[Item],
    base: Base,
    prices: Prices,
    depths: Sequence[int],
    price: float | None = None,
    margin: float | None = None,
) -> list[Choice]:
    """For each depth k that can be reached, the best choice whose deepest draft is k.

    Best is the greatest E - `price` T, or without a price the greatest E / T.

    Args:
        margin: depths that are sure to fall behind shallower ones by more than this share are left out. For
            steps without prompt tokens, and without a price.
    """
    least = max((len(rows) for rows in base.rows), default=0)  # rows with their own depth go so deep
    choices = [_as_it_is(base, prices, least)]
    best, hope = choices[0].expected / choices[0].seconds, base.expected
    for depth in depths:
        gains = [item.gain * item.num_rows for item in items if item.end == depth]
        if not gains:
            continue
        hope += sum(gains)
        deepest = max(depth, least)
        if margin is not None:
            seconds = _least_seconds(items, base, prices, depth, deepest)
            if hope < (1 - margin) * best * seconds:
                continue
        choice = _walk(items, base, prices, depth, deepest, price)
        best = max(best, choice.expected / choice.seconds)
        choices.append(choice)
    return choices


def _least_seconds(items: Sequence[Item], base: Base, prices: Prices, limit: int, depth: int) -> float:
    """What a step takes at least that goes to the limit: all denser increments up to it come first."""
    first = next(i for i, item in enumerate(items) if item.end == limit)
    denser = sum([item.width * item.num_rows for item in items[:first] if item.end < limit])
    tokens = base.num_tokens + denser + items[first].width
    drafting = min([sum([of[1] for of in tables[:limit]]) for tables in prices.drafts])
    by_tokens, typical = prices.factors[depth]
    seconds = min(prices.tokens[tokens:]) + prices.fixed + prices.slope * tokens + drafting
    return seconds * min([typical, *by_tokens.values()])


def group_depths(items: Sequence[Item], choice: Choice, num_groups: int) -> list[tuple[int, int, int]]:
    """What a choice means for each group: depth of its first rows, their number, depth of the others.

    Where all rows of a group go as deep, so will those that are not there yet.
    """
    found = [(0, 0, 0)] * num_groups
    taken = [item for item in items if item.end <= choice.limit][: choice.num_items]
    for item in taken[:-1]:
        found[item.group] = (item.end, item.num_rows, item.end)
    for item in taken[-1:]:
        found[item.group] = (
            item.end,
            choice.num_last,
            item.end if choice.num_last == item.num_rows else item.start,
        )
    return found


def _as_it_is(base: Base, prices: Prices, depth: int) -> Choice:
    seconds = step_seconds(prices, base.num_tokens, depth, _drafting(base, prices))
    return Choice(depth, 0, base.num_tokens, base.expected, seconds, 0, 0)


def _drafting(base: Base, prices: Prices) -> float:
    pairs = zip(prices.drafts, base.rows, strict=False)
    return sum(table[j][num] for table, rows in pairs for j, num in enumerate(rows))


def step_seconds(prices: Prices, num_tokens: int, depth: int, drafting: float) -> float:
    """T of m = `num_tokens` when the deepest draft is `depth` and all drafts take `drafting`."""
    return _pricing(prices, depth)(num_tokens, drafting)


def _pricing(prices: Prices, depth: int) -> Callable[[int, float], float]:
    """T by m and by what all drafts take."""
    tokens, fixed, slope, _, factors, buckets, _, num_prompt_tokens, prompt_fixed, prompt_factor = prices
    by_tokens, typical = factors[depth]

    def seconds(num: int, drafting: float) -> float:
        own = tokens[num]
        found = (own + fixed + slope * num + drafting) * by_tokens.get(buckets[num], typical)
        if num_prompt_tokens:
            found += prompt_factor * (tokens[num + num_prompt_tokens] - own + prompt_fixed)
        return found

    return seconds


# An increment about to be taken, and how things stand before: increments, it included; it; m, E, the time
# that drafts take; for each of its positions, times by rows, and the rows that draft there.
_Taking: TypeAlias = tuple[int, Item, int, float, float, Sequence[Sequence[float]], Sequence[int]]


def _walk(
    items: Sequence[Item], base: Base, prices: Prices, limit: int, depth: int, price: float | None
) -> Choice:
    """The best prefix of the increments up to `limit` that has one that deep, of which there is one.

    Its last increment is taken for every number of a few rows, or else for all of them; of many rows, those
    of the two increments around the best are then taken up to bends.
    """
    seconds_of, drafts = _pricing(prices, depth), prices.drafts
    rows = [[*own, *[0] * (depth - len(own))] for own in base.rows]
    tokens, expected, drafting = base.num_tokens, base.expected, _drafting(base, prices)
    best, best_value = (0, 0.0, 0.0, 0, 0), -math.inf
    num_items, is_deep = 0, False
    large: list[_Taking] = []

    def consider(taking: _Taking, numbers: Iterable[int]) -> None:
        nonlocal best, best_value
        num_items, (_, gain, width, *_), tokens, expected, drafting, tables, before = taking
        for num in numbers:
            making = drafting
            for table, rows in zip(tables, before, strict=True):
                making += table[rows + num] - table[rows]
            m, hope = tokens + num * width, expected + num * gain
            seconds = seconds_of(m, making)
            value = hope / seconds if price is None else hope - price * seconds
            if value > best_value:
                best, best_value = (m, hope, seconds, num_items, num), value

    for item in items:
        _, gain, width, num_rows, _, drafter, start, end = item
        if end > limit:
            continue
        num_items += 1
        own, tables = rows[drafter], drafts[drafter]
        is_deep = is_deep or end == limit
        if is_deep:
            before = tables[start:end], own[start:end]
            taking: _Taking = num_items, item, tokens, expected, drafting, *before
            if num_rows > _FEW:
                large.append(taking)
                consider(taking, (num_rows,))
            else:
                consider(taking, range(1, num_rows + 1))
        for j in range(start, end):
            drafting += tables[j][own[j] + num_rows] - tables[j][own[j]]
            own[j] += num_rows
        tokens += num_rows * width
        expected += num_rows * gain
    near = best[3], best[3] + 1
    for taking in large:
        if taking[0] in near:
            consider(taking, _numbers(taking[1], taking[2] + prices.num_prompt_tokens, prices.bends))
    return Choice(depth, limit, *best)


def _numbers(item: Item, size: int, bends: Sequence[int]) -> list[int]:
    """How many of a large group's rows are worth trying, short of all, where each adds to a size."""
    first = bisect.bisect_left(bends, size + item.width)
    last = bisect.bisect_left(bends, size + item.num_rows * item.width)
    inside = bends[first:last]
    if len(inside) > _MAX_BENDS:  # evenly, the last one among them
        inside = [inside[-1 - i * len(inside) // _MAX_BENDS] for i in range(_MAX_BENDS)]
    return sorted({(bend - size) // item.width for bend in inside})
