"""It pays, and it stops paying: tokens a second by depth, for one request and for up to sixteen.

Prompts are in the prefix cache beforehand, so that what is timed is decoding. An answer's words are the same
in every arm, hence so is the work.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from common import Row, common_prefix_len, take_turns
from paceline.bench.local import drafting
from paceline.bench.stats import Interval, bootstrap, crossover, median_interval, paired_ratios, spread
from paceline.bench.window import Sample, Speculation, sample
from speculation_runs import CATEGORIES, PARTS, PLAIN, Answer, Bench, Side, YardstickPrompt

PAYING_DEPTHS, ALL_DEPTHS = (1, 2, 3), (0, 1, 2, 3, 4)
LOADS = (1, 2, 4, 8, 16)
MIN_ANSWER_LEN = 8  # a shorter answer has too few steps to time
_PAUSE = 0.02  # seconds, in which the threads of the side before fall asleep


def measure_pays(bench: Bench, temperature: float, num_prompts: int) -> Row:
    """One request: every prompt at every depth and plain, one after the other.

    Args:
        num_prompts: of each category.
    """
    prompts = bench.prompts[: len(CATEGORIES) * num_prompts]
    arms: dict[str, Callable[[YardstickPrompt], Answer]] = {
        PLAIN: partial(_answer, bench.plain, None, temperature)
    }
    for depth in PAYING_DEPTHS:
        arms[f"depth {depth}"] = partial(_answer, bench.head, depth, temperature)
    for side in bench.sides.values():
        side.warm(prompts)
    take_turns(arms, prompts[:2], pause=_PAUSE)  # programs for every number of tokens
    rounds = take_turns(arms, prompts, pause=_PAUSE)
    long_enough = [len(answers[PLAIN].token_ids) >= MIN_ANSWER_LEN for answers in rounds]
    kept = [
        pair for pair, is_kept in zip(zip(prompts, rounds, strict=True), long_enough, strict=True) if is_kept
    ]
    by_category = {
        category: [answers for prompt, answers in kept if prompt.category == category]
        for category in CATEGORIES
    }
    by_category = {category: answers for category, answers in by_category.items() if answers}
    found = {name: _arm(by_category, name) for name in arms}
    best = max((name for name in arms if name != PLAIN), key=lambda name: found[name]["ratio"]["estimate"])
    return {
        "value": found[best]["ratio"]["estimate"],
        "best": best,
        "arms": found,
        "num_prompts": {category: len(answers) for category, answers in by_category.items()},
        "num_left_out": len(rounds) - len(kept),
    }


def _answer(side: Side, depth: int | None, temperature: float, prompt: YardstickPrompt) -> Answer:
    return side.answer(side.request(prompt, depth, temperature))


def _arm(by_category: Mapping[str, Sequence[Mapping[str, Answer]]], name: str) -> Row:
    """Means over prompts, then over categories; `ratio` is that of tokens a second to plain."""

    def ratios(of: Callable[[Answer], float]) -> list[list[float]]:
        return [[of(pair[name]) / of(pair[PLAIN]) for pair in pairs] for pairs in by_category.values()]

    def mean(of: Callable[[Answer], float]) -> float:
        return statistics.fmean(statistics.fmean(of(p[name]) for p in ps) for ps in by_category.values())

    speeds = ratios(lambda answer: answer.rate)
    parts_ms = {part: mean(lambda a, part=part: 1e3 * a.parts[part] / a.num_steps) for part in PARTS}  # type: ignore[misc]
    step_ms = mean(lambda answer: 1e3 * answer.step_seconds)
    pairs = [pair for pairs in by_category.values() for pair in pairs]
    return {
        "rate": mean(lambda answer: answer.rate),
        "ratio": asdict(mean_interval(speeds)),
        "cost": asdict(mean_interval(ratios(lambda answer: answer.step_seconds))),
        "step_len": mean(lambda answer: answer.step_len),
        "step_ms": step_ms,
        "parts_ms": {**parts_ms, "rest": step_ms - sum(parts_ms.values())},
        "accept_len": None if name == PLAIN else mean(_accept_len),
        "by_category": {
            category: {
                "ratio": statistics.fmean(values),
                "cost": statistics.fmean(p[name].step_seconds / p[PLAIN].step_seconds for p in ps),
                "step_len": statistics.fmean(p[name].step_len for p in ps),
                "accept_len": None if name == PLAIN else statistics.fmean(_accept_len(p[name]) for p in ps),
            }
            for values, (category, ps) in zip(speeds, by_category.items(), strict=True)
        },
        "num_same_words": sum(p[name].token_ids == p[PLAIN].token_ids for p in pairs),
        "median_same_tokens": statistics.median(
            common_prefix_len(p[name].token_ids, p[PLAIN].token_ids) for p in pairs
        ),
    }


def _accept_len(answer: Answer) -> float:
    """Tokens a round with drafts; 1 for an answer without such rounds."""
    drafted = answer.speculation
    return 1.0 if drafted is None or drafted.accept_len is None else drafted.accept_len


def mean_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """The mean over groups of each group's mean."""
    return bootstrap(groups, lambda drawn: statistics.fmean(statistics.fmean(g) for g in drawn))


def measure_crossover(bench: Bench, temperature: float, num_rounds: int) -> Row:
    """Tokens a second at every depth and load: so many requests in flight all the time."""
    cells: dict[tuple[int, int], list[Sample]] = {(load, d): [] for load in LOADS for d in ALL_DEPTHS}
    num_cached = num_computed = 0
    prompts = [p for p in bench.prompts if not bench.quick or p.category != "summarization"]
    for i in range(num_rounds):
        jobs = _jobs(prompts, i)
        bench.head.warm(jobs)
        before = bench.head.engine.stats()
        for load in LOADS:
            depths = ALL_DEPTHS[i % len(ALL_DEPTHS) :] + ALL_DEPTHS[: i % len(ALL_DEPTHS)]
            for depth in depths:
                got = _run(bench.head, jobs[: load + max(4, load)], load, depth, temperature)
                cells[load, depth].append(got)
        after = bench.head.engine.stats()
        num_cached += after.num_prompt_tokens_cached - before.num_prompt_tokens_cached
        num_computed += after.num_prompt_tokens_computed - before.num_prompt_tokens_computed
    return {
        "value": len([cell for cell in cells.values() if cell]),
        "cells": [_cell(cells, load, depth) for load, depth in cells],
        "crossovers": [_crossover(cells, depth) for depth in ALL_DEPTHS if depth],
        "num_rounds": num_rounds,
        "cached_share": num_cached / (num_cached + num_computed),
    }


def _jobs(prompts: Sequence[YardstickPrompt], round_id: int) -> list[YardstickPrompt]:
    """Those of a round's greatest load; smaller loads take the first of them."""
    num = 2 * LOADS[-1]
    return [prompts[(round_id * num + i) % len(prompts)] for i in range(num)]


def _run(side: Side, jobs: Sequence[YardstickPrompt], load: int, depth: int, temperature: float) -> Sample:
    """Answer the jobs in order, `load` at a time, as long as there is one for every client.

    The first answers are cut at staggered lengths: if all ended in one step, the next prompts would all
    come in one.
    """
    waiting = deque(
        side.request(job, depth, temperature, max_tokens=side.max_tokens * min(i + 1, load) // load)
        for i, job in enumerate(jobs)
    )
    before = side.engine.stats()
    loop = side.loop()
    try:
        for _ in range(load):
            loop.send(waiting.popleft())
        while loop.num_open == load:
            for _ in range(loop.step()):
                if waiting:
                    loop.send(waiting.popleft())
    finally:
        loop.give_up()
    after = side.engine.stats()
    num_preempted = after.num_preemptions - before.num_preemptions
    return sample(loop.traces, load, num_preempted, drafting(before, after))


def _cell(cells: Mapping[tuple[int, int], list[Sample]], load: int, depth: int) -> Row:
    samples = cells[load, depth]
    drafted: Speculation | None = None
    for got in samples:
        assert got.speculation is not None
        drafted = got.speculation if drafted is None else drafted + got.speculation
    return {
        "load": load,
        "depth": depth,
        "rate": asdict(spread(s.rate for s in samples)),
        "ratio": asdict(median_interval(_to_depth_0(cells, load, depth))),
        "accept_len": None if drafted is None else drafted.accept_len,
        "num_preemptions": sum(s.num_preemptions for s in samples),
        "seconds": sum(s.seconds for s in samples),
    }


def _to_depth_0(cells: Mapping[tuple[int, int], list[Sample]], load: int, depth: int) -> list[float]:
    return paired_ratios([s.rate for s in cells[load, depth]], [s.rate for s in cells[load, 0]])


def _crossover(cells: Mapping[tuple[int, int], list[Sample]], depth: int) -> Row:
    """The load from which on depth 0 is faster; a bound that lies outside of the loads is None."""
    at = crossover(LOADS, [_to_depth_0(cells, load, depth) for load in LOADS])
    numbers: dict[str, Any] = {
        name: value if LOADS[0] <= value <= LOADS[-1] else None
        for name, value in (("at", at.estimate), ("low", at.low), ("high", at.high))
    }
    shown = " to ".join(map(_shown, dict.fromkeys((at.low, at.high))))
    return {"depth": depth, **numbers, "shown": f"{_shown(at.estimate)} ({shown})"}


def _shown(load: float) -> str:
    if load < LOADS[0]:
        return f"below {LOADS[0]}"
    return f"above {LOADS[-1]}" if load > LOADS[-1] else f"{load:.1f}"
