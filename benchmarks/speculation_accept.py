"""Whether accept_len as served is that of `acceptance.py`, and what 8-bit weights of the head cost.

`acceptance.py` replays finished text in float32: given the true tokens, every round is decided. Served, the
target runs on packed weights and the head on weights rounded to Q8_0. So the same text is replayed twice,
with the head as trained and with the head as rounded; and text that float32 made itself is replayed as well,
which is what `acceptance.py` reports.

Near an answer's end the two count differently: served, a round drafts no further than `max_tokens` lets it,
and one that runs into the end token counts what stood behind. Rounds with no more than a depth's tokens left
are therefore left out where the two are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from common import Row
from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.draft.checkpoint import Draft, open_draft
from paceline.draft.load import resolve_draft
from paceline.engine.factory import build
from paceline.kernels.memory import Arena
from paceline.models.checkpoint import open_checkpoint
from paceline.models.hub import resolve_model
from paceline.models.packed import pack_dense
from paceline.models.weights import load_weights
from paceline.train.head import TrainableHead
from paceline.train.measure import matches, rounds
from paceline.train.run import from_draft
from paceline.train.target import Target
from speculation_runs import CATEGORIES, Bench, Side, YardstickPrompt

DEPTH = 4
WAYS = ("served", "replayed_q8", "replayed", "replayed_whole", "fp32_text", "fp32_text_whole")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an answer."""

    left: int  # tokens of the answer that were still to come
    accepted: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it depended on where the answer ends."""
        return self.left > DEPTH


def measure_acceptance(bench: Bench, num_prompts: int) -> Row:
    """Greedy, depth 4: means over prompts of each prompt's mean of accepted + 1, then over categories.

    Args:
        num_prompts: of each category.
    """
    prompts = bench.prompts[: len(CATEGORIES) * num_prompts]
    answers, served = zip(*(_serve(bench.head, prompt) for prompt in prompts), strict=True)
    replay = Replay()
    exact = partial(replay.rounds, replay.trained)
    replayed = [exact(p, a) for p, a in zip(prompts, answers, strict=True)]
    rounded = [replay.rounds(replay.rounded, p, a) for p, a in zip(prompts, answers, strict=True)]
    exact_answers = _fp32_answers(prompts, bench.max_tokens)
    fp32 = [exact(p, a) for p, a in zip(prompts, exact_answers, strict=True)]
    columns = {
        "served": [_mean(r for r in rs if r.is_whole) for rs in served],
        "replayed_q8": [_mean(r for r in rs if r.is_whole) for rs in rounded],
        "replayed": [_mean(r for r in rs if r.is_whole) for rs in replayed],
        "replayed_whole": [_mean(rs) for rs in replayed],
        "fp32_text": [_mean(r for r in rs if r.is_whole) for rs in fp32],
        "fp32_text_whole": [_mean(rs) for rs in fp32],
    }
    kinds = [prompt.category for prompt in prompts]
    by_category = {
        category: {way: _of_category(columns[way], kinds, category) for way in WAYS}
        for category in CATEGORIES
    }
    means = {way: statistics.fmean(row[way] for row in by_category.values()) for way in WAYS}
    return {
        "value": abs(means["served"] - means["replayed"]),
        "means": means,
        "cost_of_q8": means["replayed"] - means["replayed_q8"],
        "by_category": by_category,
        "num_prompts": num_prompts,
        "num_same_rounds": {
            "q8": sum(a == b for x, y in zip(served, rounded, strict=True) for a, b in _aligned(x, y)),
            "trained": sum(a == b for x, y in zip(served, replayed, strict=True) for a, b in _aligned(x, y)),
            "of": sum(r.is_whole for rs in served for r in rs),
        },
        "num_same_answers": sum(tuple(a) == tuple(b) for a, b in zip(answers, exact_answers, strict=True)),
        "prompts": [
            {"number": p.number, "category": p.category} | {way: columns[way][i] for way in WAYS}
            for i, p in enumerate(prompts)
        ],
    }


def _aligned(left: Sequence[Round], right: Sequence[Round]) -> list[tuple[int, int]]:
    """Accepted of the whole rounds that began at the same token."""
    others = {r.left: r.accepted for r in right}
    return [(r.accepted, others[r.left]) for r in left if r.is_whole and r.left in others]


def _of_category(values: Sequence[float | None], kinds: Sequence[str], category: str) -> float:
    return statistics.fmean(
        value for value, kind in zip(values, kinds, strict=True) if kind == category and value is not None
    )


def _mean(of: Iterable[Round]) -> float | None:
    """accept_len; None for an answer without rounds."""
    lengths = [1 + r.accepted for r in of]
    return statistics.fmean(lengths) if lengths else None


def _serve(side: Side, prompt: YardstickPrompt) -> tuple[list[int], list[Round]]:
    """The answer, and its rounds as the engine counted them."""
    side.engine.add(side.request(prompt, DEPTH, speculation_summary=True))
    token_ids: list[int] = []
    counted: list[tuple[int, int]] = []  # tokens before the round, accepted
    num_accepted = num_rounds = 0
    while side.engine.has_work:
        for output in side.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            summary = output.speculation
            if summary is not None and summary.num_rounds > num_rounds:
                counted.append((len(token_ids), summary.num_accepted - num_accepted))
                num_rounds, num_accepted = summary.num_rounds, summary.num_accepted
            token_ids += output.token_ids
    return token_ids, [Round(len(token_ids) - before, accepted) for before, accepted in counted]


def _fp32_answers(prompts: Sequence[YardstickPrompt], max_tokens: int) -> list[list[int]]:
    """What float32 throughout says, greedily, to all prompts at once."""
    side = Side(build(EngineConfig(precision="fp32", draft="none")), max_tokens)
    answers: dict[str, list[int]] = {}
    for prompt in prompts:
        request = side.request(prompt, None)
        answers[request.request_id] = []
        side.engine.add(request)
    while side.engine.has_work:
        for output in side.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            answers[output.request_id] += output.token_ids
    return list(answers.values())


class Replay:
    """The target in float32, and the head twice: as trained, and with the matrices that serving rounds."""

    def __init__(self) -> None:
        with open_checkpoint(resolve_model(DEFAULT_MODEL)) as checkpoint:
            config = checkpoint.config
            weights = load_weights(checkpoint, dtype=torch.float32, device="cpu", packed=False)
        draft = open_draft(resolve_draft(None, DEFAULT_MODEL), config)
        capture = [layer + 1 for layer in draft.config.capture_layer_ids]
        self._target = Target(config, weights, capture, "cpu")
        self.trained = from_draft(draft, config, "cpu").eval()
        self.rounded = from_draft(_rounded(draft), config, "cpu").eval()

    def rounds(self, head: TrainableHead, prompt: YardstickPrompt, answer: Sequence[int]) -> list[Round]:
        """The rounds of an answer."""
        begin, end = len(prompt.token_ids), len(prompt.token_ids) + len(answer)
        # Padded so that the answer is drafted to its end.
        token_ids = torch.tensor([[*prompt.token_ids, *answer, *[0] * (DEPTH + 1)]])
        hits = matches(head, self._target, token_ids, DEPTH)[0].numpy()
        found, newest = [], begin
        for accepted in rounds(hits, begin, end, DEPTH):
            found.append(Round(end - 1 - newest, accepted))
            newest += accepted + 1
        return found


def _rounded(draft: Draft) -> Draft:
    """The head with its matrices through Q8_0, as `packed_weights` has them."""
    arena = Arena()
    tensors = {
        name: pack_dense(tensor, "Q8_0", arena).dequantize() if tensor.ndim == 2 else tensor
        for name, tensor in draft.tensors.items()
    }
    return replace(draft, tensors=tensors)
