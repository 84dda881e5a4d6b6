"""Tokens are distributed as the softmax after processors, independently along every part of the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sampling_reference import g_test, reference
from scipy.stats import chi2_contingency

from paceline.request import SamplingParams
from paceline.worker.sampling import SamplerState, sample, sample_torch

MakeState = Callable[..., SamplerState]

VOCAB = 60
NUM = 40_000
PROMPT, OUTPUT = (1, 4, 5), (4, 9, 9, 11)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}
    | {"frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {3: 2.0, 8: -1.0}},
}


def count(logits: torch.Tensor, params: dict[str, Any], make_state: MakeState, implementation: Any) -> Any:
    """Tokens of NUM draws over 50 seeds and NUM / 50 positions."""
    rows = [SamplingParams(seed=seed, **params) for seed in range(50)]
    state = make_state(VOCAB, *rows, prompt=PROMPT, output=OUTPUT, eos=())
    positions = torch.arange(NUM) // 50 + len(PROMPT) + len(OUTPUT)
    tokens = implementation(logits.expand(NUM, -1).contiguous(), torch.arange(NUM) % 50, positions, state)
    return np.bincount(tokens, minlength=VOCAB)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, sample) for name in CASES), ("plain", sample_torch), ("all", sample_torch)],
)
def test_distribution(name: str, implementation: Any, make_state: MakeState, random_logits: Any) -> None:
    logits = random_logits(1, VOCAB, scale=2.0, seed=5)
    params = CASES[name]
    wanted = reference(logits[0].numpy(), SamplingParams(**params), PROMPT, OUTPUT)
    assert g_test(count(logits, params, make_state, implementation), wanted.probabilities) > 1e-4


@pytest.mark.parametrize("bias", [{"temperature": 1.04}, {"logit_bias": {4: 0.25}}, {"min_p": 0.002}])
def test_a_biased_sampler_is_caught(bias: dict[str, Any], make_state: MakeState, random_logits: Any) -> None:
    """The control: the test above has the power to see a distribution that is slightly wrong."""
    logits = random_logits(1, VOCAB, scale=2.0, seed=5)
    honest = reference(logits[0].numpy(), SamplingParams())
    assert g_test(count(logits, bias, make_state, sample), honest.probabilities) < 1e-6


def test_large_vocabulary_with_a_long_tail(make_state: MakeState) -> None:
    """Tokens of tiny probability get their share in sum: block skipping does not lose them."""
    vocab_size, num = 5000, 4000
    logits = torch.zeros(vocab_size)
    logits[1234] = 8.5  # as likely as 4,915 others together
    state = make_state(vocab_size, {})
    tokens = sample(logits.repeat(num, 1), torch.zeros(num, dtype=torch.int64), torch.arange(num), state)
    probabilities = torch.softmax(logits.double(), 0).numpy()
    groups = np.where(np.arange(vocab_size) == 1234, 0, 1 + np.arange(vocab_size) // 500)
    counts = np.bincount(groups[tokens], minlength=11)
    assert g_test(counts, np.bincount(groups, probabilities, minlength=11)) > 1e-4


@pytest.mark.parametrize("axis", ["position", "choice", "seed"])
def test_neighbouring_draws_are_independent(axis: str, make_state: MakeState, random_logits: Any) -> None:
    vocab_size, num = 8, 20_000
    logits = random_logits(1, vocab_size, scale=1.0).repeat(num, 1)
    zeros = torch.zeros(num, dtype=torch.int64)

    def draw(**key: int) -> torch.Tensor:
        state = make_state(vocab_size, {"seed": key.get("seed", 0)}, choice=key.get("choice", 0))
        return sample(logits, zeros, torch.arange(num) + key.get("position", 0), state)

    table = np.zeros((vocab_size, vocab_size))
    np.add.at(table, (draw().numpy(), draw(**{axis: 1}).numpy()), 1)
    assert chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("implementation", [sample, sample_torch])
def test_the_company_does_not_matter(implementation: Any, make_state: MakeState, random_logits: Any) -> None:
    """Alone, among others, in another order or another row: the same token."""
    params = [
        SamplingParams(seed=i, **case) for i, case in enumerate([*CASES.values(), {"temperature": 0.0}])
    ]
    num_rows = len(params)
    state = make_state(700, *params, prompt=PROMPT, output=OUTPUT)
    logits, rows = random_logits(4 * num_rows, 700), torch.arange(num_rows).repeat(4)
    positions = torch.arange(4 * num_rows) * 3 + 7
    together = implementation(logits, rows, positions, state)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    shuffled = implementation(logits[order], rows[order], positions[order], state)
    assert torch.equal(shuffled, together[order])
    for p in range(len(rows)):
        alone = make_state(700, params[rows[p]], prompt=PROMPT, output=OUTPUT)
        token = implementation(logits[p : p + 1], torch.tensor([0]), positions[p : p + 1], alone)
        assert token == together[p]
