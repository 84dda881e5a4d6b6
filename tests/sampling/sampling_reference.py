"""The reference of the sampling tests: processors from their definitions, in numpy float64; the G-test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax
from scipy.stats import chi2

from paceline.request import SamplingParams


@dataclass(frozen=True)
class Reference:
    """One position, straight from the definitions: probabilities, and how near a border decides."""

    probabilities: np.ndarray
    margin: float  # smallest relative distance of a cumulative or single weight from its limit


def process(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int],
) -> np.ndarray:
    x = logits.copy()  # in fp32, as the model's: which tokens tie is then part of the definition
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token_id in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            x[token_id] = -np.inf
    repetition, frequency, presence = np.float32(
        [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
    )
    for v in range(len(x)):
        count = list(output).count(v)
        if count or v in prompt:
            x[v] = x[v] / repetition if x[v] > 0 else x[v] * repetition
        x[v] = x[v] - frequency * np.float32(count) - presence * np.float32(count > 0)
    return x


def reference(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> Reference:
    """The distribution that a position must be drawn from (temperature > 0)."""
    x = process(logits, params, prompt, output, eos).astype(np.float64)
    scaled = (x - x.max()) / params.temperature
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = np.exp(scaled[order])
    margin = np.inf
    if params.top_p < 1.0:
        mass = np.cumsum(weights) / weights.sum()
        margin = np.abs(mass - params.top_p).min()
        size = int(np.argmax(mass >= params.top_p)) + 1
        order, weights = order[:size], weights[:size]
    if params.min_p > 0.0:
        lighter = weights[weights < 1.0]
        if len(lighter):
            margin = min(margin, np.abs(lighter / params.min_p - 1.0).min())
        order = [v for v, weight in zip(order, weights, strict=True) if weight >= params.min_p]
    kept = np.full(len(x), -np.inf)
    kept[order] = scaled[order]
    return Reference(softmax(kept), margin)


def g_test(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The chance of counts as far from the probabilities as these; 0 if an impossible token occurs."""
    if counts[probabilities == 0.0].any():
        return 0.0
    expected = probabilities * counts.sum()
    common = expected >= 5.0
    observed, wanted = counts[common].astype(float), expected[common]
    if expected[~common].sum() > 0.0:
        observed = np.append(observed, counts[~common].sum())
        wanted = np.append(wanted, expected[~common].sum())
    seen = observed > 0
    statistic = 2.0 * np.sum(observed[seen] * np.log(observed[seen] / wanted[seen]))
    return float(chi2.sf(statistic, len(wanted) - 1))
