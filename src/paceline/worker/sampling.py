"""Choosing tokens: y = argmax over v of log p(v) + G(seed, choice, position, v).

p is the softmax after processors, G the Gumbel noise of `noise`, so y is distributed as p, and is a
pure function of the logits, the row's parameters, its tokens so far, and the position's index in the
whole sequence. Batch, row, order and load do not enter. At temperature 0 it is plain argmax. Ties
go to the lowest id.

The functions take a flat list of *positions*, each with its row, its index in the sequence and its
logits: a row may have several in one step.

NaN logits count as -inf. If no logit is above -inf the answer is token 0; if one is +inf, the
lowest such id.

Knows nothing of stop conditions and lengths: the scheduler cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.request import TokenLogprobs
from paceline.worker import sampling_cpu, sampling_torch
from paceline.worker.noise import gumbel
from paceline.worker.sampler_state import (
    CHOICE,
    FREQUENCY,
    HAS_PENALTIES,
    INV_TEMPERATURE,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TOP_K,
    TOP_P,
    SamplerState,
)

__all__ = [
    "LogprobTensors",
    "Prefix",
    "SamplerState",
    "draw_torch",
    "logprobs",
    "processed",
    "sample",
    "sample_torch",
    "without_nan",
]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens between those that a row has counted and the place where one is sampled.

    Place p is behind the `num_drafted[p]` tokens that end before `ends[p]` of `token_ids`. Without `ends`
    token p is the model's input at place p, and the last of them: a row's places follow one another.
    """

    token_ids: Tensor  # int64 [N]; [P] without `ends`
    num_drafted: Tensor  # int64 [P]
    ends: Tensor | None = None  # int64 [P]

    def resolved_ends(self) -> Tensor:
        """`ends`, made if need be."""
        if self.ends is not None:
            return self.ends
        return torch.arange(1, len(self.num_drafted) + 1, device=self.num_drafted.device)


_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_PREFIX = (_NOTHING, _NOTHING, _NOTHING)


def sample(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, prefix: Prefix | None = None
) -> Tensor:
    """The token at each position: int64 [P].

    Args:
        logits: fp32 [P, V], contiguous, on the state's device; left as they are.
        rows: int64 [P], which row's parameters and counts apply.
        positions: int64 [P], index in the whole sequence of the token being sampled.
        state: holds, for rows with penalties, the counts of all tokens before the position but those
            of `prefix`.
    """
    if state.device.type != "cpu":
        return sample_torch(logits, rows, positions, state, prefix)
    assert logits.is_contiguous(), "another layout would compile, and cache, a slower kernel"
    drafted = _NO_PREFIX
    if prefix is not None and state.any_penalized:
        drafted = (prefix.token_ids, prefix.resolved_ends(), prefix.num_drafted)
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    if state.team is not None:
        state.team.sample(logits, rows, positions, state.arrays(), drafted, token_ids)
        return token_ids
    sampling_cpu.sample_positions(
        logits.numpy(),
        rows.numpy(),
        positions.numpy(),
        *state.arrays(),
        drafted[0].numpy(),
        drafted[1].numpy(),
        drafted[2].numpy(),
        token_ids.numpy(),
    )
    return token_ids


def sample_torch(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, prefix: Prefix | None = None
) -> Tensor:
    """`sample` in torch operations, on any device."""
    logits = processed(logits, rows, positions, state, prefix)
    return draw_torch(logits, rows, positions, state, torch.arange(state.vocab_size, device=logits.device))


def draw_torch(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, token_ids: Tensor
) -> Tensor:
    """The token at each position after biases and penalties: int64 [P].

    Args:
        logits: fp32 [P, C] without NaN; token_ids: int64 [C], the token of each column.
    """
    ints, floats = state.ints[rows], state.floats[rows]
    top = logits.amax(dim=1, keepdim=True)
    scaled = (logits - top) * floats[:, INV_TEMPERATURE, None]
    if state.any_truncated:
        top_k, top_p, min_p = ints[:, TOP_K, None], floats[:, TOP_P, None], floats[:, MIN_P, None]
        kept = sampling_torch.keep_mask(logits, scaled, top_k, top_p, min_p)
        scaled = scaled.masked_fill(~kept, -torch.inf)
    noise = gumbel(positions, ints[:, CHOICE], ints[:, SEED_LOW : SEED_HIGH + 1], token_ids)
    drawn = sampling_torch.lowest_best(scaled.double() + noise, token_ids)
    greedy = (floats[:, INV_TEMPERATURE] == 0.0) | ~torch.isfinite(top[:, 0])
    return torch.where(greedy, sampling_torch.lowest_best(logits, token_ids), drawn)


def processed(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, prefix: Prefix | None = None
) -> Tensor:
    """Logits after biases and penalties, before temperature: fp32 [P, V], NaN replaced by -inf."""
    if state.any_biased:
        biases = state.bias_ids[rows], state.bias_values[rows], state.bias_until[rows]
        logits = sampling_torch.apply_biases(logits, *biases, positions)
    if state.any_penalized:
        floats = state.floats[rows]
        penalties = (floats[:, column, None] for column in (REPETITION, FREQUENCY, PRESENCE))
        counted = state.ints[rows, HAS_PENALTIES, None] != 0
        counts, prompt_mask = state.counts[rows], state.prompt_mask[rows] & counted
        if prefix is not None:
            ends = prefix.resolved_ends()
            counts = sampling_torch.add_counts(counts, prefix.token_ids, ends, prefix.num_drafted)
        logits = sampling_torch.apply_penalties(logits, counts * counted, prompt_mask, *penalties)
    return without_nan(logits)


def without_nan(logits: Tensor) -> Tensor:
    """NaN counts as -inf."""
    return torch.where(logits.isnan(), -torch.inf, logits)


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Natural-log probabilities of N positions, still on the device.

    `chosen` fp32 [N]; `top_ids` int64 and `top` fp32 [N, K], most likely first, ties to the lowest id.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def records(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One record per position, with its own number of top tokens. Waits for the device."""
        columns = zip(num_top, self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [TokenLogprobs(chosen, ids[:num], values[:num]) for num, chosen, ids, values in columns]


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Logprobs of the chosen `token_ids` int64 [N] and of the `num_top` most likely ones.

    `logits` are the model's own, fp32 [N, V], before any processor: pass only the positions that ask.
    """
    total = torch.logsumexp(logits, dim=1, keepdim=True)
    keys = torch.topk(sampling_torch.sort_keys(logits), min(num_top, logits.shape[1]), dim=1).values
    top_ids = sampling_torch.key_ids(keys)
    chosen = logits.gather(1, token_ids[:, None]) - total
    return LogprobTensors(chosen[:, 0], top_ids, logits.gather(1, top_ids) - total)
