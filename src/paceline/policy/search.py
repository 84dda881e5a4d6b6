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
from collections.abc import Iterable, Mapping, Sequence
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
        margin: depths that fall behind shallower ones by more than this share, whatever their rows do, are
            left out. Without prompt tokens and without a price.
    """
    least = max((len(rows) for rows in base.rows), default=0)  # rows with their own depth go so deep
    choices = [_as_it_is(base, prices, least)]
    best, hope = choices[0].expected / choices[0].seconds, base.expected
    for depth in depths:
        gains = [item.gain * item.num_rows for item in items if item.end == depth]
        if not gains:
            continue
        hope += sum(gains)
        if margin is not None and hope < (1 - margin) * best * _least_seconds(base, prices, depth, least):
            continue
        choice = _walk(items, base, prices, depth, max(depth, least), price)
        best = max(best, choice.expected / choice.seconds)
        choices.append(choice)
    return choices


def _least_seconds(base: Base, prices: Prices, depth: int, least: int) -> float:
    """What a step takes at least in which some row drafts so deep."""
    by_tokens, typical = prices.factors[max(depth, least)]
    num_tokens = base.num_tokens + depth
    seconds = min(prices.tokens[num_tokens:]) + prices.fixed + prices.slope * num_tokens
    seconds += min(sum(table[j][1] for j in range(depth)) for table in prices.drafts)
    return seconds * min([typical, *by_tokens.values()])


def group_depths(items: Sequence[Item], choice: Choice, num_groups: int) -> list[tuple[int, int, int]]:
    """What a choice means for each group: depth of its first rows, their number, depth of the others."""
    found = [(0, 0, 0)] * num_groups
    taken = [item for item in items if item.end <= choice.limit][: choice.num_items]
    for item in taken[:-1]:
        found[item.group] = (item.end, item.num_rows, item.end)
    for item in taken[-1:]:
        found[item.group] = (item.end, choice.num_last, item.start)
    return found


def _as_it_is(base: Base, prices: Prices, depth: int) -> Choice:
    seconds = step_seconds(prices, base.num_tokens, depth, _drafting(base, prices))
    return Choice(depth, 0, base.num_tokens, base.expected, seconds, 0, 0)


def _drafting(base: Base, prices: Prices) -> float:
    pairs = zip(prices.drafts, base.rows, strict=False)
    return sum(table[j][num] for table, rows in pairs for j, num in enumerate(rows))


def step_seconds(prices: Prices, num_tokens: int, depth: int, drafting: float) -> float:
    """T of m = `num_tokens` when the deepest draft is `depth` and all drafts take `drafting`."""
    by_tokens, typical = prices.factors[depth]
    seconds = prices.tokens[num_tokens] + prices.fixed + prices.slope * num_tokens + drafting
    seconds *= by_tokens.get(prices.buckets[num_tokens], typical)
    if prices.num_prompt_tokens:
        more = prices.tokens[num_tokens + prices.num_prompt_tokens] - prices.tokens[num_tokens]
        seconds += prices.prompt_factor * (more + prices.prompt_fixed)
    return seconds


_Found: TypeAlias = tuple[float, int, float, float, int, int]  # value; of a choice: m, E, T, items, last

_NOTHING: _Found = (-float("inf"), 0, 0.0, 0.0, 0, 0)


class _Taken(NamedTuple):
    """How things stand before an increment is taken."""

    num_items: int  # that one included
    tokens: int
    expected: float
    drafting: float
    steps: list[tuple[Sequence[float], int]]  # for each of its positions: times by rows, and rows so far


def _walk(
    items: Sequence[Item], base: Base, prices: Prices, limit: int, depth: int, price: float | None
) -> Choice:
    """The best prefix of the increments up to `limit` that has one that deep, of which there is one.

    Whole groups come first; bends inside a group are tried for the two increments around the best of them.
    """
    rows = [[*own, *[0] * (depth - len(own))] for own in base.rows]
    tokens, expected, drafting = base.num_tokens, base.expected, _drafting(base, prices)
    best = _NOTHING
    walked: list[tuple[Item, _Taken]] = []
    best_at, is_deep = 0, False
    for item in items:
        _, gain, width, num_rows, _, drafter, start, end = item
        if end > limit:
            continue
        own = rows[drafter]
        steps = [(prices.drafts[drafter][j], own[j]) for j in range(start, end)]
        taken = _Taken(len(walked) + 1, tokens, expected, drafting, steps)
        walked.append((item, taken))
        tokens += num_rows * width
        expected += num_rows * gain
        for step, before in steps:
            drafting += step[before + num_rows] - step[before]
        own[start:end] = [before + num_rows for _, before in steps]
        is_deep = is_deep or end == limit
        if is_deep:
            seconds = step_seconds(prices, tokens, depth, drafting)
            value = expected / seconds if price is None else expected - price * seconds
            found = (value, tokens, expected, seconds, len(walked), num_rows)
            if 1 < num_rows <= _FEW:
                few = _best_number(item, taken, range(1, num_rows), prices, depth, price)
                found = max(found, few)
            if found[0] > best[0]:
                best, best_at = found, len(walked) - 1
    for item, taken in walked[best_at : best_at + 2]:
        if item.num_rows > _FEW:
            inside = _numbers(item, taken.tokens + prices.num_prompt_tokens, prices.bends)
            if inside:
                best = max(best, _best_number(item, taken, inside, prices, depth, price))
    _, num_tokens, hope, seconds, num_items, num_last = best
    return Choice(depth, limit, num_tokens, hope, seconds, num_items, num_last)


def _best_number(
    item: Item, taken: _Taken, numbers: Iterable[int], prices: Prices, depth: int, price: float | None
) -> _Found:
    """For how many of its rows an increment is taken best."""
    num_items, tokens, expected, before_drafting, steps = taken
    _, gain, width, *_ = item
    best = _NOTHING
    for num in numbers:
        drafting = before_drafting
        for step, before in steps:
            drafting += step[before + num] - step[before]
        m, hope = tokens + num * width, expected + num * gain
        seconds = step_seconds(prices, m, depth, drafting)
        value = hope / seconds if price is None else hope - price * seconds
        if value > best[0]:
            best = (value, m, hope, seconds, num_items, num)
    return best


def _numbers(item: Item, size: int, bends: Sequence[int]) -> list[int]:
    """How many of a large group's rows are worth trying, short of all, where each adds to a size."""
    first = bisect.bisect_left(bends, size + item.width)
    last = bisect.bisect_left(bends, size + item.num_rows * item.width)
    inside = bends[first:last]
    if len(inside) > _MAX_BENDS:  # evenly, the last one among them
        inside = [inside[-1 - i * len(inside) // _MAX_BENDS] for i in range(_MAX_BENDS)]
    return sorted({(bend - size) // item.width for bend in inside})
