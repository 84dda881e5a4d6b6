"""Acceptance of a head over finished conversations, rounds chained as in serving.

Given the true tokens, a draft is accepted as long as it equals them, so drafting with the true tokens decides
every round as drafting with its own would: up to the first mismatch they are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.train.generate import Conversations
from paceline.train.head import TrainableHead
from paceline.train.scripts import Turn
from paceline.train.target import Target

Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Tally:
    """Rounds of one kind of conversation. `reached[i]` counts rounds that came to draft i."""

    rounds: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    row_means: list[float] = field(default_factory=list)

    @property
    def accept_len(self) -> float:
        """Mean over conversations of the mean of accepted + 1."""
        return float(np.mean(self.row_means)) if self.row_means else float("nan")

    @property
    def conditional(self) -> list[float]:
        """Acceptance of draft i given that it was reached."""
        return [a / r if r else float("nan") for a, r in zip(self.accepted, self.reached, strict=True)]


@torch.no_grad()
def matches(
    head: TrainableHead,
    target: Target,
    token_ids: torch.Tensor,
    depth: int,
    choose: Choose | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """Whether draft j of the chain from pair t equals x_{t+2+j}: bool [B, L, depth], L = T - 1 - depth.

    `choose(logits, rows, positions)` picks draft ids; greedy by default.
    """
    features, _ = target.read(token_ids)
    length = token_ids.shape[1] - 1 - depth
    embedded = torch.nn.functional.embedding(token_ids[:, 1:-1], target.embedding).to(features.dtype)
    found = []
    rows = first_row + torch.arange(len(token_ids), device=token_ids.device)
    rows = rows[:, None].expand(-1, length)
    places = torch.arange(length, device=token_ids.device)[None].expand(len(token_ids), -1)
    for step, h in enumerate(head.chain(embedded, features[:, :length], depth)):
        logits = head.logits(h)
        drafted = logits.argmax(-1) if choose is None else choose(logits, rows, places + 2 + step)
        found.append(head.draft_ids[drafted] == token_ids[:, 2 + step : 2 + step + length])
    return torch.stack(found, dim=-1)


def answers(turns: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of answer tokens in one row."""
    flags = np.concatenate(([0], (turns[:length] == Turn.ANSWER).astype(np.int8), [0]))
    edges = np.flatnonzero(np.diff(flags))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def rounds(row: np.ndarray, begin: int, end: int, depth: int) -> Iterator[int]:
    """Accepted drafts of each round over one answer; `row` is bool [L, depth] of `matches`.

    The first answer token comes from the prompt's own step. A round starts at the pair before the newest
    known token n, and can accept up to the answer's last token.
    """
    newest = begin
    while newest < end - 1:
        pair = newest - 1
        if pair >= len(row):
            return
        possible = min(depth, end - 1 - newest)
        hit = row[pair, :possible]
        accepted = possible if hit.all() else int(np.argmin(hit))
        yield accepted
        newest += accepted + 1


def measure(
    head: TrainableHead,
    target: Target,
    conversations: Conversations,
    depth: int = 4,
    rows_at_a_time: int = 16,
    max_new_tokens: int | None = None,
    choose: Choose | None = None,
) -> dict[str, Tally]:
    """Tallies by kind, over every answer of every row.

    `choose(logits, rows, positions)` picks draft ids, rows counted over all conversations; default: greedy.
    """
    tallies: dict[str, Tally] = defaultdict(lambda: Tally(0, [0] * depth, [0] * depth, []))
    for first in range(0, len(conversations.kinds), rows_at_a_time):
        part = slice(first, first + rows_at_a_time)
        width = int(conversations.lengths[part].max())
        ids = torch.from_numpy(conversations.token_ids[part, :width].astype(np.int64)).to(target.device)
        # Padded so that the last answer is drafted to its end.
        padded = torch.nn.functional.pad(ids, (0, depth + 1))
        hits = matches(head, target, padded, depth, choose, first).cpu().numpy()
        for i, kind in enumerate(conversations.kinds[part]):
            tally, row = tallies[kind], first + i
            lengths: list[int] = []
            for begin, end in answers(conversations.turns[row], int(conversations.lengths[row])):
                stop = end if max_new_tokens is None else min(end, begin + max_new_tokens)
                lengths += _count(tally, rounds(hits[i], begin, stop, depth), stop - begin - 1, depth)
            if lengths:
                tally.row_means.append(float(np.mean(lengths)))
    return dict(tallies)


def _count(tally: Tally, accepted: Iterator[int], num_tokens: int, depth: int) -> list[int]:
    """Add one answer's rounds to a tally; accept_len of each."""
    lengths: list[int] = []
    left = num_tokens
    for a in accepted:
        for i in range(min(a + 1, depth, left)):
            tally.reached[i] += 1
            tally.accepted[i] += i < a
        tally.rounds += 1
        lengths.append(a + 1)
        left -= a + 1
    return lengths
