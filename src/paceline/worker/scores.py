"""Logprobs of a step: of the tokens it chose, and of the prompt tokens it computed.

Prompt logprobs need the logits of every position of a prompt, a vocabulary wide: they are made, and
given up, `BLOCK` positions at a time. Everything stays on the device until the records are asked for.

Knows nothing of sampling or of how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.request import SamplingParams, TokenLogprobs
from paceline.step import Plan
from paceline.worker.rows import StepInput
from paceline.worker.sampling import LogprobTensors, logprobs

BLOCK = 64  # positions; 13 MB of logits for a vocabulary of 49,152

Head = Callable[[Tensor], Tensor]  # hidden states fp32 [P, hidden] to logits fp32 [P, V]


@dataclass(slots=True)
class Wants:
    """Which rows want logprobs: the number of most likely tokens beside each position's own."""

    answer: dict[int, int] = field(default_factory=dict)
    prompt: dict[int, tuple[int, int]] = field(default_factory=dict)  # with the prompt's length

    def start(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        """A request takes a row."""
        self.end(row)
        if params.logprobs is not None:
            self.answer[row] = params.logprobs
        if params.prompt_logprobs is not None:
            self.prompt[row] = (params.prompt_logprobs, prompt_len)

    def end(self, row: int) -> None:
        """A row is given back."""
        self.answer.pop(row, None)
        self.prompt.pop(row, None)


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of some positions, each with its own number of most likely tokens."""

    num_top: tuple[int, ...]
    tensors: tuple[LogprobTensors, ...]  # their positions follow one another

    def records(self) -> tuple[TokenLogprobs, ...]:
        """One for each position. Waits for the device."""
        found: list[TokenLogprobs] = []
        for tensors in self.tensors:
            found += tensors.records(self.num_top[len(found) : len(found) + len(tensors.chosen)])
        return tuple(found)


def answer_scores(
    wants: Wants, place_rows: Sequence[int], logits: Tensor, token_ids: Tensor
) -> tuple[tuple[int, ...], Scores]:
    """Of the P places that sampled `token_ids` from `logits` [P, V]: those that want logprobs, and these.

    A row may have several places; whether a token there will be taken is not asked.
    """
    asked = tuple(place for place, row in enumerate(place_rows) if row in wants.answer)
    if not asked:
        return (), Scores((), ())
    num_top = tuple(wants.answer[place_rows[place]] for place in asked)
    at = torch.tensor(asked, device=logits.device)
    return asked, Scores(num_top, (logprobs(logits[at], token_ids[at], max(num_top)),))


def prompt_scores(
    wants: Wants, plan: Plan, step: StepInput, hidden: Tensor, token_ids: Tensor, head: Head
) -> dict[int, Scores]:
    """By row, for rows that want it: logprobs of the prompt tokens that follow this step's positions.

    Args:
        hidden: fp32 [M, hidden], the step's.
        token_ids: int64 [rows, max_len], the known tokens of every row.
    """
    scores: dict[int, Scores] = {}
    for planned, (begin, q_len, start, _) in zip(plan.rows, step.batch.segments.tolist(), strict=True):
        if planned.row not in wants.prompt:
            continue
        num_top, prompt_len = wants.prompt[planned.row]
        num = min(start + q_len, prompt_len - 1) - start
        if num > 0:
            targets = token_ids[planned.row, start + 1 : start + 1 + num]
            blocks = _in_blocks(hidden[begin : begin + num], targets, num_top, head)
            scores[planned.row] = Scores((num_top,) * num, tuple(blocks))
    return scores


def _in_blocks(hidden: Tensor, targets: Tensor, num_top: int, head: Head) -> Sequence[LogprobTensors]:
    blocks: list[LogprobTensors] = []
    for begin in range(0, len(hidden), BLOCK):
        num = min(BLOCK, len(hidden) - begin)
        # A head may keep buffers for each size it has seen: few sizes, all powers of two.
        size = 1 << (num - 1).bit_length()
        places = torch.arange(begin, begin + size, device=hidden.device).clamp_(max=begin + num - 1)
        logits = head(hidden[places])[:num]
        blocks.append(logprobs(logits, targets[begin : begin + num], num_top))
    return blocks
