"""Sampling in torch operations, on any device: processors as pure functions on [P, V] tensors.

P positions, V token ids. The order is that of `SamplingParams`: biases (`logit_bias`,
`min_tokens`), penalties, temperature, `top_k`, `top_p`, `min_p`. `top_p` acts on the probabilities
renormalised over what `top_k` left; `min_p` is relative to the most likely token, so renormalising
does not change it. Where equal logits straddle a border the lowest ids stay.

Nothing here reads a value back from the device. Knows nothing of rows: see `sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_biases(logits: Tensor, ids: Tensor, values: Tensor, until: Tensor, positions: Tensor) -> Tensor:
    """Add `values` [P, B] to the logits of token `ids` [P, B] where `positions` [P] < `until` [P, B]."""
    active = torch.where(positions[:, None] < until, values, 0.0)
    return logits.scatter_add(1, ids, active)


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """The three penalties, as in vLLM and the OpenAI API; the factors are fp32 [P, 1].

    `counts` int32 [P, V] are generated tokens. A token seen in the prompt or the answer has its
    logit divided by `repetition` if positive, else multiplied; one seen in the answer then loses
    `frequency` times its count, and `presence`.
    """
    generated = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(generated | prompt_mask, repeated, logits)
    return logits - frequency * counts.float() - presence * generated.float()


def sort_keys(logits: Tensor) -> Tensor:
    """Distinct int64 [P, V] that order tokens by logit, then by lowest id: a sort has no ties to break.

    The high half is the fp32 logit as an integer of the same order, the low half the inverted id.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: the two zeros are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ordered.long().mul_(2**32).add_(0xFFFFFFFF - ids)


def key_ids(keys: Tensor) -> Tensor:
    """The token ids in keys made by `sort_keys`."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def keep_mask(logits: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens `top_k`, `top_p` and `min_p` keep: bool [P, V], at least one each position.

    Args:
        logits: fp32 [P, V], the order of tokens.
        scaled: fp32 [P, V], (logit - greatest logit) / temperature.
        top_k: int64 [P, 1], 0 for all; top_p, min_p: fp32 [P, 1].
    """
    ids = key_ids(torch.sort(sort_keys(logits), dim=1, descending=True).values)
    rank = torch.arange(logits.shape[1], device=logits.device)[None, :]
    weights = torch.exp(scaled.gather(1, ids))
    kept = (top_k == 0) | (rank < top_k)
    mass = torch.cumsum(torch.where(kept, weights, 0.0).double(), dim=1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    kept &= (top_p >= 1.0) | (before < top_p * mass[:, -1:])
    kept &= weights >= min_p
    return torch.zeros_like(kept).scatter(1, ids, kept)


def add_counts(counts: Tensor, token_ids: Tensor, ends: Tensor, num_drafted: Tensor) -> Tensor:
    """`counts` int32 [P, V] and, at each place, its drafted tokens: a `sampling.Prefix` [N], [P], [P]."""
    places = torch.arange(len(token_ids), device=counts.device)
    behind = (places >= (ends - num_drafted)[:, None]) & (places < ends[:, None])
    return counts.scatter_add(1, token_ids.expand(len(counts), -1), behind.to(counts.dtype))


def lowest_best(scores: Tensor, token_ids: Tensor) -> Tensor:
    """The token of the greatest score in each row: int64 [P], the lowest id among equals.

    Args:
        scores: [P, C] without NaN; token_ids: int64 [C], the token of each column.
    """
    best = scores == scores.amax(dim=1, keepdim=True)
    return torch.where(best, token_ids, torch.iinfo(torch.int64).max).amin(dim=1)
