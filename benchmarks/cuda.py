"""`--device cuda` says what the CPU says: the default model on both, in fp32, and in bf16 on the GPU.

    python benchmarks/cuda.py

Eight prompts of the yardstick at once, 48 tokens each, greedy and at temperature 0.8 with a seed. In fp32
the two devices differ by rounding alone, so answers may part where two tokens are nearly tied; how far each
pair of answers agrees is reported. Speed is not the point: this path runs eagerly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Bar, Results, common_prefix_len, read_prompts
from paceline import LLM, SamplingParams

NUM_PROMPTS, NUM_TOKENS = 8, 48
ARMS = {"greedy": 0.0, "temperature 0.8": 0.8}


def answers(model: str, device: str, precision: str) -> dict[str, list[tuple[int, ...]]]:
    """Token ids of every prompt's answer, by arm."""
    with LLM(model, device=device, precision=precision, max_model_len=4096) as llm:  # type: ignore[arg-type]
        prompts = [llm.chat_prompt([{"role": "user", "content": p}]) for p in read_prompts()[:NUM_PROMPTS]]
        found = {}
        for arm, temperature in ARMS.items():
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
                for i in range(NUM_PROMPTS)
            ]
            made = llm.generate(prompts, params, progress=False)
            found[arm] = [completion.choices[0].token_ids for completion in made]
        return found


def main() -> None:
    """Measure and write results/cuda.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    model = parser.parse_args().model
    cpu = answers(model, "cpu", "fp32")
    sides = {"cuda fp32": answers(model, "cuda", "fp32"), "cuda bf16": answers(model, "cuda", "bf16")}

    results = Results("cuda", ["torch"], is_fresh=True)
    results.device["gpu"] = torch.cuda.get_device_name()
    lines = ["| side | arm | tokens equal to the CPU's fp32, of 48, for each of 8 prompts |", "|---|---|---|"]
    shares: dict[str, float] = {}
    for side, found in sides.items():
        for arm in ARMS:
            equal = [common_prefix_len(a, b) for a, b in zip(cpu[arm], found[arm], strict=True)]
            shares[f"{side}, {arm}"] = sum(equal) / (NUM_PROMPTS * NUM_TOKENS)
            results.put(f"{side}, {arm}", {"equal_tokens": equal, "share": shares[f"{side}, {arm}"]})
            lines.append(f"| {side} | {arm} | {' '.join(map(str, equal))} |")
    bars = [
        Bar(f"share of equal tokens, {name}", shares[name], ">=", 0.9) for name in shares if "fp32" in name
    ]
    table = "\n".join(lines) + "\n"
    results.write(list(shares), bars, table)
    print(table)


if __name__ == "__main__":
    main()
