"""Records the traces in `data/traces`: what drafting would have done at every position of real answers.

The default model answers prompts plainly, through the real engine, and its drafter drafts in the shadow at
full depth in every step; what it guessed is compared with the words that follow. From these answers come
three loads, in the `requests` form of `paceline.policy.replay`: few requests, many, and steps from one
request to 16 and back. What a step costs is this machine's calibration, which each header holds.

    python benchmarks/record_traces.py [--answers 80] [--max-tokens 64]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import FOLDER, read_prompts
from paceline.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler
from paceline.engine.steering import Steering
from paceline.models.hub import resolve_model
from paceline.policy import CostModel, Decision, Load, Observation, Reason, RowView
from paceline.policy.replay import SCHEMA
from paceline.request import EngineRequest, SamplingParams
from paceline.tokenizer import load_tokenizer
from paceline.worker.build import build_worker
from paceline.worker.calibrated import calibrate

TRACES = FOLDER / "data" / "traces"
DEPTH = 6  # of the shadow drafts
MAX_PROMPT_CHARS = 400
MIN_LEN = 12  # tokens; shorter answers say little


@dataclass(frozen=True, slots=True)
class Answer:
    """What drafting would have done: `matched[i]` drafts with i + 1 of its tokens known."""

    prompt_len: int
    matched: tuple[int, ...]


@dataclass(slots=True)
class Recorder:
    """A policy that drafts nothing in earnest, and for every row, at every step, in the shadow."""

    matched: dict[str, dict[int, int]] = field(default_factory=dict)  # by request and start

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """See `paceline.policy.Policy`."""
        every = tuple(range(len(rows)))
        return Decision(load, rows, (0,) * len(rows), Reason.PROBE, every, DEPTH)

    def observe(self, observation: Observation) -> None:
        """See `paceline.policy.Policy`."""
        for shadow in observation.shadows:
            self.matched.setdefault(str(shadow.key), {})[shadow.start] = shadow.matched

    def answer(self, request: EngineRequest, num_tokens: int) -> Answer:
        """Of a request that made so many tokens.

        Drafts that were right up to the end of the answer are never settled; all that can be said of them is
        that they matched what was left.
        """
        known, start = self.matched.get(request.request_id, {}), len(request.prompt_ids)
        matched = [
            known.get(start + made, min(DEPTH, num_tokens - made - 1)) for made in range(1, num_tokens)
        ]
        return Answer(start, tuple(matched))


def record(num_answers: int, max_tokens: int) -> tuple[list[Answer], CostModel]:
    """Answers to as many prompts, every second one greedy, and what this machine's steps cost."""
    config = EngineConfig()
    tokenizer = load_tokenizer(resolve_model(config.model, config.revision))
    worker, info = build_worker(config)
    costs = calibrate(worker, info, config, DEPTH).costs
    recorder = Recorder()
    scheduler = Scheduler(
        config,
        num_pages=info.num_pages,
        eos_token_ids=info.eos_token_ids,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_depth=info.max_depth,
        steering=Steering(recorder),
    )
    engine = Engine(scheduler, worker, config)
    requests: dict[str, EngineRequest] = {}
    prompts = [prompt for prompt in read_prompts() if len(prompt) <= MAX_PROMPT_CHARS]
    for i, prompt in enumerate(prompts[:num_answers]):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        prompt_ids = tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(temperature=0.8 * (i % 2), max_tokens=max_tokens, seed=i)
        requests[str(i)] = EngineRequest(str(i), prompt_ids, params)
        engine.add(requests[str(i)])
    num_tokens = dict.fromkeys(requests, 0)
    while engine.has_work:
        for output in engine.step():
            num_tokens[output.request_id] += len(output.token_ids)
        print(f"\r{sum(num_tokens.values())} tokens", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    answers = [recorder.answer(requests[key], num) for key, num in num_tokens.items() if num >= MIN_LEN]
    return answers, costs


Arrivals = list[tuple[float, Answer]]


def plain_seconds(answers: Iterable[Answer], costs: CostModel, num_rows: int) -> float:
    """What answering plainly takes, with so many at a time."""
    seconds = costs.step_seconds(Load(num_rows, 200 * num_rows), ()) / num_rows
    return sum(seconds * len(answer.matched) for answer in answers)


def low(answers: Sequence[Answer], costs: CostModel) -> Arrivals:
    """One or two at a time; every answer twice."""
    draw = random.Random(1)
    now, arrivals = 0.0, []
    for answer in (*answers, *answers):
        arrivals.append((now, answer))
        now += draw.uniform(0.5, 1.0) * plain_seconds([answer], costs, 1)
    return arrivals


def high(answers: Sequence[Answer], costs: CostModel) -> Arrivals:
    """Every answer eight times, all at once: as many as there are rows run, until none is left."""
    return [(0.0, answer) for answer in answers] * 8


def steps(answers: Sequence[Answer], costs: CostModel) -> Arrivals:
    """One at a time, then 16 until every answer came four times, then one again."""
    alone = answers[::2]
    crowd = [*answers] * 4
    now, arrivals = 0.0, []
    for answer in alone:
        arrivals.append((now, answer))
        now += 1.05 * plain_seconds([answer], costs, 1)
    arrivals += [(now, answer) for answer in crowd]
    now += 1.3 * plain_seconds(crowd, costs, 16)
    for answer in alone:
        arrivals.append((now, answer))
        now += 1.05 * plain_seconds([answer], costs, 1)
    return arrivals


LOADS = {"low": (low, 2), "high": (high, 24), "steps": (steps, 16)}


def write(path: Path, arrivals: Arrivals, costs: CostModel, max_rows: int) -> None:
    """A trace file."""
    depths = list(range(DEPTH + 1))
    header: dict[str, Any] = {"schema": SCHEMA, "kind": "requests", "depths": depths}
    header |= {"costs": costs.to_dict(), "max_rows": max_rows}
    records = [
        {"key": i, "arrival": round(now, 3), "prompt_len": answer.prompt_len, "matched": answer.matched}
        for i, (now, answer) in enumerate(arrivals)
    ]
    lines = [json.dumps(record, separators=(",", ":")) for record in (header, *records)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Record, and write the traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    answers, costs = record(args.answers, args.max_tokens)
    TRACES.mkdir(parents=True, exist_ok=True)
    for name, (arrive, max_rows) in LOADS.items():
        path = TRACES / f"{name}.jsonl"
        write(path, arrive(answers, costs), costs, max_rows)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
