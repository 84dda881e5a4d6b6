"""Whether accept_len as served is that of `acceptance.py`, and what arithmetic costs.

`acceptance.py` replays finished text in float32: given the true tokens, every round is decided. Here two
engines serve, and what each said is replayed. One computes in float32 throughout: every round must come out
as replayed. The other is the default one, alone with each request: weights of the head in Q8_0, K/V in
bfloat16. Its text is replayed with the head as trained, and with the head as rounded.

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
from paceline.config import DEFAULT_MODEL
from paceline.draft.checkpoint import Draft, open_draft
from paceline.draft.load import resolve_draft
from paceline.engine.factory import build
from paceline.kernels.memory import Arena
from paceline.models.checkpoint import open_checkpoint
from paceline.models.hub import resolve_model
from paceline.models.packed import pack_dense
from paceline.models.weights import load_weights
from paceline.request import RequestOutput
from paceline.train.head import TrainableHead
from paceline.train.measure import matches, rounds
from paceline.train.run import from_draft
from paceline.train.target import Target
from speculation_runs import CATEGORIES, PINNED, Bench, Side, YardstickPrompt

DEPTH = 4
WAYS = ("served", "replayed_q8", "replayed", "fp32_served", "fp32_replayed", "acceptance_py")


@dataclass(frozen=True, slots=True)
class Round:
    """One round of an answer."""

    left: int  # tokens of the answer that were still to come
    accepted: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it depended on where the answer ends."""
        return self.left > DEPTH


@dataclass(frozen=True, slots=True)
class Told:
    """An answer and its rounds."""

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]


def measure_acceptance(bench: Bench, num_prompts: int) -> Row:
    """Greedy, depth 4: means over prompts of each prompt's mean of accepted + 1, then over categories.

    Args:
        num_prompts: of each category.
    """
    prompts = bench.prompts[: len(CATEGORIES) * num_prompts]
    alone = Side(build(PINNED), bench.max_tokens)  # nothing cached: other parts computed prompts otherwise
    served = [_serve(alone, [prompt])[0] for prompt in prompts]
    fp32 = _serve(Side(build(replace(PINNED, precision="fp32")), bench.max_tokens), prompts)
    replay = Replay()
    trained, rounded = partial(replay.served, replay.trained), partial(replay.served, replay.rounded)
    replayed, replayed_q8 = list(map(trained, prompts, served)), list(map(rounded, prompts, served))
    fp32_replayed = list(map(trained, prompts, fp32))
    compared = {
        "served": served,
        "replayed_q8": replayed_q8,
        "replayed": replayed,
        "fp32_served": fp32,
        "fp32_replayed": fp32_replayed,
    }
    columns = {
        way: [_mean(r for r in answer.rounds if r.is_whole) for answer in answers]
        for way, answers in compared.items()
    }
    columns["acceptance_py"] = [_mean(answer.rounds) for answer in fp32_replayed]
    kinds = [prompt.category for prompt in prompts]
    by_category = {
        kind: {way: _of_category(columns[way], kinds, kind) for way in WAYS} for kind in CATEGORIES
    }
    means = {way: statistics.fmean(row[way] for row in by_category.values()) for way in WAYS}
    return {
        "value": abs(means["fp32_served"] - means["fp32_replayed"]),
        "means": means,
        "cost_of_q8": means["replayed"] - means["replayed_q8"],
        "cost_of_the_rest": means["replayed_q8"] - means["served"],
        "by_category": by_category,
        "num_prompts": num_prompts,
        "same_rounds": {
            "q8": _num_same(served, replayed_q8),
            "trained": _num_same(served, replayed),
            "fp32": _num_same(fp32, fp32_replayed),
        },
        "num_same_answers": sum(a.token_ids == b.token_ids for a, b in zip(served, fp32, strict=True)),
        "prompts": [
            {"number": p.number, "category": p.category} | {way: columns[way][i] for way in WAYS}
            for i, p in enumerate(prompts)
        ],
    }


def _num_same(left: Sequence[Told], right: Sequence[Told]) -> tuple[int, int]:
    """Whole rounds that accepted as many, and of how many that began at the same token."""
    pairs = []
    for a, b in zip(left, right, strict=True):
        others = {r.left: r.accepted for r in b.rounds}
        pairs += [(r.accepted, others[r.left]) for r in a.rounds if r.is_whole and r.left in others]
    return sum(a == b for a, b in pairs), len(pairs)


def _of_category(values: Sequence[float | None], kinds: Sequence[str], category: str) -> float:
    return statistics.fmean(
        value for value, kind in zip(values, kinds, strict=True) if kind == category and value is not None
    )


def _mean(of: Iterable[Round]) -> float | None:
    """accept_len; None for an answer without rounds."""
    lengths = [1 + r.accepted for r in of]
    return statistics.fmean(lengths) if lengths else None


def _serve(side: Side, prompts: Sequence[YardstickPrompt]) -> list[Told]:
    """The answers to all prompts at once, with their rounds as the engine counted them."""
    told: dict[str, _Telling] = {}
    for prompt in prompts:
        request = side.request(prompt, DEPTH, speculation_summary=True)
        told[request.request_id] = _Telling()
        side.engine.add(request)
    while side.engine.has_work:
        for output in side.engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            told[output.request_id].add(output)
    return [telling.told() for telling in told.values()]


class _Telling:
    """An answer in the making."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._rounds: list[tuple[int, int]] = []  # tokens before the round, accepted
        self._num_accepted = 0

    def add(self, output: RequestOutput) -> None:
        """Take a step's tokens, and its round if it had drafts."""
        summary = output.speculation
        if summary is not None and summary.num_rounds > len(self._rounds):
            self._rounds.append((len(self._token_ids), summary.num_accepted - self._num_accepted))
            self._num_accepted = summary.num_accepted
        self._token_ids += output.token_ids

    def told(self) -> Told:
        """All of it."""
        length = len(self._token_ids)
        return Told(tuple(self._token_ids), tuple(Round(length - n, a) for n, a in self._rounds))


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

    def served(self, head: TrainableHead, prompt: YardstickPrompt, answer: Told) -> Told:
        """The same answer with its rounds as this head decides them."""
        begin, end = len(prompt.token_ids), len(prompt.token_ids) + len(answer.token_ids)
        # Padded so that the answer is drafted to its end.
        token_ids = torch.tensor([[*prompt.token_ids, *answer.token_ids, *[0] * (DEPTH + 1)]])
        hits = matches(head, self._target, token_ids, DEPTH)[0].numpy()
        found, newest = [], begin
        for accepted in rounds(hits, begin, end, DEPTH):
            found.append(Round(end - 1 - newest, accepted))
            newest += accepted + 1
        return Told(answer.token_ids, tuple(found))


def _rounded(draft: Draft) -> Draft:
    """The head with its matrices through Q8_0, as `packed_weights` has them."""
    arena = Arena()
    tensors = {
        name: pack_dense(tensor, "Q8_0", arena).dequantize() if tensor.ndim == 2 else tensor
        for name, tensor in draft.tensors.items()
    }
    return replace(draft, tensors=tensors)
