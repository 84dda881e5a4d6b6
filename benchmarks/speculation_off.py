"""Off is free: a step at depth 0 with the head loaded against one of an engine launched without a drafter.

What the head adds to such a step is *settling*: h = fc(features), then K and V of (token, h) into the pages.
Its share of a step is computed from the shapes and the bytes of the matrices, and measured.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from common import Row
from paceline.bench.stats import median_interval, paired_ratios
from speculation_runs import HEAD, PLAIN, Bench, Side

TURN_LEN, NUM_SKIPPED = 12, 4  # steps of a turn; the first ones wake threads and fill caches
_ENOUGH = 3 * TURN_LEN  # tokens that a request may have beyond those of its turns


def measure_steps(bench: Bench, num_requests: int) -> Row:
    """Seconds of a step on both engines, a dozen steps each in turn, and where the time goes."""
    num_runs, num_turns = (1, 3) if bench.quick else {1: (8, 25), 16: (3, 20)}[num_requests]
    prompts = list(bench.of("qa"))  # all about as long
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {HEAD: [], PLAIN: []}
    settling: list[float] = []
    alone: list[float] = []
    for run in range(num_runs):
        chosen = [prompts[(run * num_requests + i) % len(prompts)] for i in range(num_requests)]
        riders = {name: _Riders(side, chosen, num_turns) for name, side in bench.sides.items()}
        turns: dict[str, list[float]] = defaultdict(list)
        for turn in range(num_turns):
            for name in (HEAD, PLAIN) if turn % 2 else (PLAIN, HEAD):
                turns[name].append(riders[name].turn())
        alone.append(riders[HEAD].settling_alone())
        for rider in riders.values():
            rider.stop()
        ratios += paired_ratios(turns[HEAD], turns[PLAIN])
        settling += riders[HEAD].settling
        for name, values in turns.items():
            seconds[name] += values
    ratio = median_interval(ratios)
    pages = {name: side.engine.stats().num_pages for name, side in bench.sides.items()}
    return {
        "value": ratio.estimate,
        "step_ratio": asdict(ratio),
        "step_ms": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
        "settle_share_measured": statistics.median(alone) / statistics.median(seconds[PLAIN]),
        "settle_share_of_the_caller": statistics.median(settling),
        "num_steps": len(ratios) * (TURN_LEN - NUM_SKIPPED),
        "pages": pages,
    }


class _Riders:
    """Requests that decode on one engine, a turn at a time."""

    def __init__(self, side: Side, prompts: list[Any], num_turns: int) -> None:
        self._side, self._loop = side, side.loop()
        self.settling: list[float] = []  # its share of each turn
        max_tokens = num_turns * TURN_LEN + _ENOUGH
        for prompt in prompts:
            self._loop.send(side.request(prompt, 0, max_tokens=max_tokens, ignore_eos=True))
        while not all(trace.pieces for trace in self._loop.traces):
            self._loop.step()

    def turn(self) -> float:
        """Seconds of a step: the median of those that count."""
        counted = []
        settled = 0.0
        for step in range(TURN_LEN):
            self._side.stopwatch.lap()
            begin = time.perf_counter()
            if self._loop.step():
                raise RuntimeError("a request ended within its turns")
            seconds = time.perf_counter() - begin
            if step >= NUM_SKIPPED:
                counted.append(seconds)
                settled += self._side.stopwatch.lap()["settle"]
        self.settling.append(settled / sum(counted))
        return statistics.median(counted)

    def settling_alone(self) -> float:
        """Seconds of settling a step's tokens with nothing beside it: the median of a turn of steps."""
        drafter, seconds = self._side.worker._drafter, []
        settle = drafter.settle

        def timed(settled: Any) -> None:
            begin = time.perf_counter()
            settle(settled)
            drafter.wait()
            seconds.append(time.perf_counter() - begin)

        drafter.settle = timed
        for _ in range(TURN_LEN):
            self._loop.step()
        del drafter.settle
        return statistics.median(seconds[NUM_SKIPPED:])

    def stop(self) -> None:
        """Abort the requests."""
        self._loop.give_up()


def measure_shares(bench: Bench) -> Row:
    """The settling work of a step, from the shapes and bytes of the matrices that are loaded."""
    worker = bench.head.worker
    target, head = worker._model._weights, worker._drafter._head._weights
    config = worker._model.config
    matrices = [m for x in target.layers for m in (x.qkv, x.o, x.gate_up, x.down)]
    step = [*matrices, target.head]  # the embedding is looked up, not multiplied by
    tables = [target.head] if target.embedding is target.head else [target.head, target.embedding]
    vectors = [v for x in target.layers for v in (x.input_norm, x.q_norm, x.k_norm, x.post_norm)]
    num_parameters = sum(_size(m.packed) for m in [*matrices, *tables])
    num_parameters += sum(v.numel() for v in [*vectors, target.norm] if v is not None)
    hidden, kv_dim = config.hidden_size, config.num_kv_heads * config.head_dim
    num_features = len(worker._drafter.capture)
    formula = num_features * hidden**2 + 2 * hidden * 2 * kv_dim
    settled = [head.fc, head.kv]
    num_settled = sum(map(_size, settled))
    flops = num_settled / sum(_size(m.packed) for m in step)
    num_bytes, step_bytes = (sum(m.num_bytes for m in ms) for ms in (settled, [m.packed for m in step]))
    return {
        "value": flops,
        "published_share": formula / num_parameters,
        "parameters": num_parameters,
        "formula_weights": formula,
        "settling_weights": num_settled,
        "flops_share": flops,
        "settling_bytes": num_bytes,
        "step_bytes": step_bytes,
        "bytes_share": num_bytes / step_bytes,
        "draft_kv_bytes_per_token": 2 * 2 * kv_dim,
        "target_kv_bytes_per_token": 2 * 2 * kv_dim * config.num_layers,
    }


def _size(packed: Any) -> int:
    return int(packed.num_rows * packed.num_columns)
