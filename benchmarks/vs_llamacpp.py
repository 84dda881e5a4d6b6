"""Paceline beside llama.cpp: the same GGUF file, threads and prompts, in one process, taking turns.

    python benchmarks/vs_llamacpp.py                # everything; 10 to 15 minutes on two cores
    python benchmarks/vs_llamacpp.py --only decode  # these parts, or one as decode-8; the others' rows stay
    python benchmarks/vs_llamacpp.py --quick        # does it run? short, and nothing is written

Needs llama-cpp-python, which this script alone uses. `pip install llama-cpp-python==0.3.36` compiles it for
this machine (CMAKE_ARGS=-DGGML_NATIVE=ON makes sure of it) in about ten minutes. Nothing else should run
meanwhile. Writes `results/vs_llamacpp.json` and the table beside it.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

import serve_memory
from common import (
    Bar,
    Op,
    PromptCutter,
    Results,
    Row,
    Spread,
    TimedRun,
    common_prefix_len,
    paired_ratios,
    read_prompts,
    take_turns,
)
from paceline.config import DEFAULT_MODEL, available_cores
from paceline.models.hub import resolve_model
from paceline.request import SamplingParams
from paceline.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from llamacpp_side import LlamaCppModel
    from paceline_side import PacelineSide

NAME = "vs_llamacpp"
PACKAGES = ("torch", "numpy", "numba", "llama-cpp-python")
PROMPT_LEN, ANSWER_LEN = 256, 128
SEED = 1

Pair: TypeAlias = dict[str, TimedRun]  # by side

NOTES = f"""
Ratios are taken within a round, in which both engines get the same prompts one after the other (who
begins changes from round to round); the table shows the median of the rounds and their least and
greatest value.

- Both engines are libraries in one process here: no HTTP, no text, token ids in and out. Both are warm.
  While one works the other's threads sleep. Both have as many threads as the process may use cores.
- llama.cpp: native build, default settings (flash attention auto, memory-mapped weights, batches of up
  to 2,048 tokens computed 512 at a time); one `llama_batch` a step with one token for each sequence, the
  K/V cache split by sequence (a unified one was slower), sized for just the sequences of the part. The
  greedy choice is numpy's argmax on its logits, 0.05 ms at 16 sequences; its own greedy sampler took 1.2
  ms.
- Paceline: default settings, its scheduler and sampler included. Prefix caching is on, and no prompt
  ever begins like an earlier one: the runs that time prompts fail if a cached token is used.
- Prompts are {PROMPT_LEN} real tokens each (a window of this repository's prompt file), answers
  {ANSWER_LEN} tokens, the end-of-text token ignored. All requests of a run are submitted at once.
- *Decode* counts the steps in which every request decodes and nothing else runs. Paceline lets the first
  requests decode while later prompts are still processed, so at many requests it has a few tokens less
  to count, at a slightly longer context. *Whole run* is from submission to the last token.
- The engines' arithmetic differs: llama.cpp rounds activations to 8 bits for its products with 4-bit
  weights and keeps K/V in fp16; Paceline keeps activations in fp32 (bf16 in large steps) and K/V in
  bf16. Greedy answers therefore part at some token; the last column says after how many, as the median
  over requests.
- *Sampled* is temperature 0.8 with top_p 0.95 against greedy, Paceline alone, as time per token.
- *Memory* is the greatest PSS of all processes of `paceline serve`, from its start to the end of a load
  that opens 64 requests at once and fills the K/V pool; GB is 10⁹ bytes. RSS, the upper bound, counts
  pages that the processes share once for each.
"""


class Bench:
    """What the parts need. Made when first needed: memory must be measured before torch is imported."""

    def __init__(self, num_rounds: int, answer_len: int, load: serve_memory.Load) -> None:
        self.path = resolve_model(DEFAULT_MODEL)
        self.num_rounds, self.answer_len, self.load = num_rounds, answer_len, load
        self.num_threads = available_cores()
        text = "\n\n".join(read_prompts())
        self.cutter = PromptCutter(load_tokenizer(self.path).encode(text))

    @functools.cached_property
    def paceline(self) -> PacelineSide:
        """The engine, one for all parts."""
        from paceline_side import PacelineSide

        return PacelineSide(self.path, self.num_threads)

    @functools.cached_property
    def llamacpp(self) -> LlamaCppModel:
        """The weights, loaded once; each part has a context of its own."""
        from llamacpp_side import LlamaCppModel

        return LlamaCppModel(self.path)

    def against_llamacpp(self, num_requests: int, prompt_len: int, answer_len: int) -> list[Pair]:
        """One pair of runs a round, both sides warm.

        Raises:
            RuntimeError: the prefix cache had tokens of a prompt.
        """
        from llamacpp_side import LlamaCppSide

        params = sampling_params(answer_len)
        row_len = prompt_len + answer_len
        with LlamaCppSide(self.llamacpp, num_requests, row_len, self.num_threads) as llamacpp:
            sides: dict[str, Callable[[list[list[int]]], TimedRun]] = {
                "paceline": lambda prompts: self.paceline.run(prompts, params),
                "llama.cpp": lambda prompts: llamacpp.run(prompts, answer_len),
            }
            take_turns(sides, [self.warm_up_prompts(num_requests, prompt_len)])
            batches = [self.cutter.batch(num_requests, prompt_len) for _ in range(self.num_rounds)]
            rounds = take_turns(sides, batches)
        num_cached = sum(pair["paceline"].num_cached_tokens for pair in rounds)
        if num_cached:
            raise RuntimeError(f"{num_cached} prompt tokens came from the prefix cache")
        return rounds

    def warm_up_prompts(self, num_requests: int, prompt_len: int) -> list[list[int]]:
        """As many prompts as a run has, together no longer than one full step."""
        return self.cutter.batch(num_requests, min(prompt_len, 512 // num_requests))


def sampling_params(answer_len: int, temperature: float = 0.0, top_p: float = 1.0) -> SamplingParams:
    """Exactly `answer_len` tokens, the same at every run."""
    return SamplingParams(
        temperature=temperature, top_p=top_p, seed=SEED, max_tokens=answer_len, ignore_eos=True
    )


# The parts. Each returns a row; `value` is what its bar is about.


def measure_decode(bench: Bench, num_requests: int) -> Row:
    """Decode tokens a second against llama.cpp's."""
    pairs = bench.against_llamacpp(num_requests, PROMPT_LEN, bench.answer_len)
    whole = [{side: run.whole_rate for side, run in pair.items()} for pair in pairs]
    same = [
        common_prefix_len(ours, theirs)
        for pair in pairs
        for ours, theirs in zip(pair["paceline"].token_ids, pair["llama.cpp"].token_ids, strict=True)
    ]
    return {
        **compare([{side: run.decode_rate for side, run in pair.items()} for pair in pairs], 1),
        "whole_run": compare(whole, 1),
        "median_same_tokens": statistics.median(same),
    }


def measure_prompt(bench: Bench, prompt_len: int) -> Row:
    """Prompt tokens a second, alone and fresh, against llama.cpp's."""
    pairs = bench.against_llamacpp(1, prompt_len, answer_len=2)
    return compare(
        [{side: prompt_len / run.prompt_seconds for side, run in pair.items()} for pair in pairs], 0
    )


def measure_first_token(bench: Bench) -> Row:
    """Milliseconds to the first token of one request against llama.cpp's."""
    pairs = bench.against_llamacpp(1, PROMPT_LEN, answer_len=2)
    return compare([{side: run.prompt_seconds * 1e3 for side, run in pair.items()} for pair in pairs], 0)


def measure_sampling(bench: Bench, num_requests: int) -> Row:
    """Milliseconds a token of all requests together: sampled against greedy."""
    sides: dict[str, Callable[[list[list[int]]], TimedRun]] = {
        name: functools.partial(bench.paceline.run, params=sampling_params(bench.answer_len, *settings))
        for name, settings in (("sampled", (0.8, 0.95)), ("greedy", ()))
    }
    take_turns(sides, [bench.warm_up_prompts(num_requests, PROMPT_LEN)])
    batches = [bench.cutter.batch(num_requests, PROMPT_LEN) for _ in range(bench.num_rounds)]
    pairs = take_turns(sides, batches)
    return compare([{side: 1e3 / run.decode_rate for side, run in pair.items()} for pair in pairs], 2)


def measure_memory(bench: Bench) -> Row:
    """Greatest PSS of the server's processes, in GB."""
    if "torch" in sys.modules:
        raise RuntimeError("memory must be measured before torch is imported: it would share its pages")
    memory = serve_memory.measure(bench.cutter, str(bench.path), bench.load)
    return {"value": memory["pss_bytes"] / 1e9, **memory}


def compare(rounds: Sequence[Mapping[str, float]], digits: int) -> Row:
    """The first side's values over the second's, round by round."""
    over, under = rounds[0]
    ratio = paired_ratios(rounds, over, under)
    return {
        "value": ratio.median,
        "ratio": asdict(ratio),
        "sides": {side: asdict(Spread.of(values[side] for values in rounds)) for side in (over, under)},
        "digits": digits,
        "rounds": [dict(values) for values in rounds],
    }


@dataclass(frozen=True, slots=True)
class Part:
    """One figure, its bar, and how it is measured."""

    name: str
    title: str
    op: Op
    bar: float
    measure: Callable[[Bench], Row]

    @property
    def kind(self) -> str:
        """The name without its size."""
        return self.name.partition("-")[0]


def _parts() -> list[Part]:
    parts = [
        Part(
            f"decode-{num}",
            f"decode, {num} request{'s' if num > 1 else ''}, tokens/s",
            ">=",
            bar,
            functools.partial(measure_decode, num_requests=num),
        )
        for num, bar in ((1, 1.15), (2, 1.4), (4, 1.6), (8, 1.8), (16, 1.8))
    ]
    parts += [
        Part(
            "prompt-512",
            "prompt of 512 tokens, tokens/s",
            ">=",
            3.0,
            functools.partial(measure_prompt, prompt_len=512),
        ),
        Part("ttft-256", "first token after 256, ms", "<=", 1.2, measure_first_token),
    ]
    parts += [
        Part(
            f"sampling-{num}",
            f"sampled against greedy, {num} row{'s' if num > 1 else ''}, ms/token",
            "<=",
            1.1,
            functools.partial(measure_sampling, num_requests=num),
        )
        for num in (1, 16)
    ]
    parts.append(Part("memory", "memory of `paceline serve`, GB", "<=", 1.6, measure_memory))
    return parts


PARTS = _parts()


# The report.


def bars(results: Results) -> list[Bar]:
    """One for each part, measured or not."""
    found = []
    for part in PARTS:
        row = results.row(part.name)
        found.append(Bar(part.name, None if row is None else row["value"], part.op, part.bar))
    return found


def table(results: Results) -> str:
    """The parts as a Markdown table, and the notes on fairness."""
    lines = [
        "| | Paceline | against | ratio | bar | whole run, ratio | same tokens | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, bar in zip(PARTS, bars(results), strict=True):
        row = results.row(part.name)
        cells = ["–"] * 3 if row is None else _memory_cells(row) if part.name == "memory" else _cells(row)
        whole = "–" if row is None or "whole_run" not in row else Spread(**row["whole_run"]["ratio"]).show()
        same = "–" if row is None else row.get("median_same_tokens", "–")
        measured = "–" if row is None else row["date"]
        lines.append("| " + " | ".join([part.title, *cells, bar.show(), whole, str(same), measured]) + " |")
    return "\n".join(lines) + "\n" + NOTES


def _cells(row: Row) -> list[str]:
    """Both sides and their ratio."""
    (_, first), (name, second) = row["sides"].items()
    digits = row["digits"]
    return [
        Spread(**first).show(digits),
        f"{name} {Spread(**second).show(digits)}",
        Spread(**row["ratio"]).show(),
    ]


def _memory_cells(row: Row) -> list[str]:
    """The total with its split; nothing to compare with."""
    split = ", ".join(f"{part['process']} {part['Pss'] / 1e9:.2f}" for part in row["split"])
    return [f"{row['value']:.2f}: {split} (RSS {row['rss_bytes'] / 1e9:.2f})", "–", "–"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options. Exits with the parts' names if `--only` has another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {name for part in PARTS for name in (part.name, part.kind)}
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=sorted(names), help=f"among {', '.join(sorted(names))}"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="pairs of runs a part (default: 5)"
    )
    parser.add_argument("--quick", action="store_true", help="one round of short answers; writes nothing")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen parts, print the table, and write it unless `--quick`."""
    args = parse(argv)
    chosen = [part for part in PARTS if not args.only or {part.name, part.kind} & set(args.only)]
    chosen.sort(key=lambda part: part.name != "memory")
    if args.quick:
        bench = Bench(1, 24, serve_memory.QUICK_LOAD)
    else:
        bench = Bench(args.rounds, ANSWER_LEN, serve_memory.FULL_LOAD)
    results = Results(NAME, PACKAGES, is_fresh=args.quick)
    for part in chosen:
        print(f"{part.name} …", file=sys.stderr, flush=True)
        results.put(part.name, part.measure(bench))
        if not args.quick:
            results.write([p.name for p in PARTS], bars(results), table(results))
    print(results.heading() + table(results))


if __name__ == "__main__":
    main()
