"""How many tokens a round of drafting yields: the head in the box, on the yardstick and on self-made chat.

    python benchmarks/acceptance.py --head PATH [--device cuda]

Depth 4, at most 128 new tokens, natural stop, rounds chained as in serving (each starts where the last one
ended), mean over prompts of each prompt's mean of accepted + 1. Greedy, and at temperature 0.8 with the head
drawing with the target's own noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import PROMPTS, Bar, Results
from paceline.draft.checkpoint import open_draft
from paceline.models.checkpoint import open_checkpoint
from paceline.models.hub import resolve_model
from paceline.models.weights import load_weights
from paceline.tokenizer import load_tokenizer
from paceline.train.generate import Conversations, Lockstep
from paceline.train.head import TrainableHead
from paceline.train.measure import Tally, measure
from paceline.train.run import from_draft
from paceline.train.scripts import Script, Template
from paceline.train.target import Target
from paceline.worker.noise import gumbel, seed_words

DEPTH, MAX_NEW_TOKENS, TEMPERATURE, SEED = 4, 128, 0.8, 20_261_129
NUM_CHATS = 256
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning")


def main() -> None:
    """Measure and write results/acceptance.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--head", required=True, help="folder of the head")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--limit", type=int, help="prompts of each category, for a quick look; nothing is written"
    )
    args = parser.parse_args()

    path = resolve_model(args.target)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        weights = load_weights(checkpoint, dtype=dtype, device=args.device, packed=False)
    tokenizer = load_tokenizer(path)
    draft = open_draft(args.head, config)
    head = from_draft(draft, config, args.device).eval()
    capture = [layer + 1 for layer in draft.config.capture_layer_ids]
    target, template = Target(config, weights, capture, args.device), Template(tokenizer)

    scripts = _yardstick(template, args.limit)
    longest = max(sum(len(s.token_ids) for s in script.segments) for script in scripts)
    lockstep = {
        coupled: Lockstep(
            config,
            weights,
            tokenizer.eos_token_ids,
            len(scripts),
            longest + MAX_NEW_TOKENS + 8,
            args.device,
            coupled,
        )
        for coupled in (False, True)
    }
    greedy = lockstep[False].run(scripts, [0.0] * len(scripts), SEED, MAX_NEW_TOKENS)
    warm = lockstep[True].run(scripts, [TEMPERATURE] * len(scripts), SEED, MAX_NEW_TOKENS)
    chats = _chats(config, weights, tokenizer, template, args.device, args.limit or NUM_CHATS)

    rows = {
        "greedy": measure(head, target, greedy, DEPTH),
        "coupled": measure(head, target, warm, DEPTH, choose=_Coupled(head, SEED)),
        "chat": measure(head, target, chats, DEPTH, max_new_tokens=MAX_NEW_TOKENS),
    }
    table = _table(rows)
    print(table)
    if args.limit is None:
        _write(args, rows, table)


def _yardstick(template: Template, limit: int | None) -> list[Script]:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chosen = [r for c in CATEGORIES for r in [x for x in lines if x["category"] == c][:limit]]
    return [template.task(r["category"], r["turns"][:1]) for r in chosen]


def _chats(
    config: Any, weights: Any, tokenizer: Any, template: Template, device: str, num: int
) -> Conversations:
    """Fresh open conversations, answered greedily; their seed is no training seed."""
    lockstep = Lockstep(config, weights, tokenizer.eos_token_ids, num, 640, device)
    return lockstep.run([template.open_chat(2)] * num, [0.0] * num, SEED + 1, 256)


class _Coupled:
    """Draft ids drawn with the noise that the target's tokens were drawn with."""

    def __init__(self, head: TrainableHead, seed: int) -> None:
        self._head, self._seed = head, seed

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        chosen = [self._row(logits[i], int(rows[i, 0]), positions[i]) for i in range(len(logits))]
        return torch.stack(chosen)

    def _row(self, logits: torch.Tensor, row: int, positions: torch.Tensor) -> torch.Tensor:
        seeds = torch.tensor([seed_words(self._seed + row)], device=logits.device).expand(len(positions), 2)
        noise = gumbel(positions, torch.zeros_like(positions), seeds, self._head.draft_ids)
        return (logits.double() / TEMPERATURE + noise).argmax(-1)


def _mean(tallies: dict[str, Tally]) -> float:
    """Of the kinds' means."""
    return sum(t.accept_len for t in tallies.values()) / len(tallies)


def _table(rows: dict[str, dict[str, Tally]]) -> str:
    lines = [
        "| arm | on | prompts | rounds | accept_len | conditional acceptance at draft 1, 2, 3, 4 |",
        "|---|---|---|---|---|---|",
    ]
    for arm, tallies in rows.items():
        for kind, t in tallies.items():
            by_position = " ".join(f"{a:.2f}" for a in t.conditional)
            lines.append(
                f"| {arm} | {kind} | {len(t.row_means)} | {t.rounds} | {t.accept_len:.2f} | {by_position} |"
            )
        lines.append(f"| {arm} | **mean** | | | **{_mean(tallies):.2f}** | |")
    return "\n".join(lines) + "\n"


def _write(args: argparse.Namespace, rows: dict[str, dict[str, Tally]], table: str) -> None:
    results = Results("acceptance", ["torch"], is_fresh=True)
    if args.device == "cuda":
        results.device["gpu"] = torch.cuda.get_device_name()
    for arm, tallies in rows.items():
        kinds = {
            kind: {
                "accept_len": t.accept_len,
                "rounds": t.rounds,
                "prompts": len(t.row_means),
                "conditional": t.conditional,
            }
            for kind, t in tallies.items()
        }
        results.put(arm, {"mean": _mean(tallies), "kinds": kinds})
    bars = [
        Bar("accept_len, greedy, mean of four categories", _mean(rows["greedy"]), ">=", 2.0),
        Bar("accept_len, greedy, self-made chat", _mean(rows["chat"]), ">=", 2.4),
        Bar("accept_len, temperature 0.8 with coupled noise", _mean(rows["coupled"]), ">=", 1.8),
    ]
    met = "\n".join(f"- {bar.name}: {bar.value:.3f} ({bar.show()})" for bar in bars)
    results.write(list(rows), bars, table + "\n" + met + "\n")


if __name__ == "__main__":
    main()
