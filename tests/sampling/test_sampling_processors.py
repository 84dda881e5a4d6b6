"""Processors against their definitions, and the CPU kernels against the torch operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sampling_reference import process, reference

from paceline.request import SamplingParams
from paceline.worker import race_cpu, sampling_torch
from paceline.worker.sampling import SamplerState, processed, sample, sample_torch

MakeState = Callable[..., SamplerState]
EOS = 2

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
SIZES = (1, 2, 7, 63, 600, 1100)  # on both sides of the kernels' block sizes, 64 and 512


@st.composite
def logits_rows(draw: st.DrawFn, vocab_size: int) -> np.ndarray:
    """fp32 [V] of several shapes: smooth, full of ties, flat, peaked, partly masked."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "ties", "flat", "peaks", "masked", "negative"]))
    x = rng.normal(size=vocab_size) * draw(st.sampled_from([0.1, 1.0, 5.0]))
    if kind == "ties":
        x = np.round(x)
    elif kind == "flat":
        x[:] = 0.0
    elif kind == "peaks":
        x[rng.integers(0, vocab_size, 3)] += 15.0
    elif kind == "masked":
        x[rng.random(vocab_size) < 0.5] = -np.inf
        x[rng.integers(vocab_size)] = 1.0
    elif kind == "negative":
        x -= 40.0
    return x.astype(np.float32)


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    token_ids = st.integers(0, vocab_size - 1)
    return SamplingParams(
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        temperature=draw(st.sampled_from([0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 5, 40, 10**6])),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0.001, 1.0))),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=tuple(draw(st.lists(token_ids, max_size=2))) if vocab_size > 6 else (),
        ignore_eos=draw(st.booleans()) or vocab_size <= 6,
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.4])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, -0.3, 1.1])),
        logit_bias=draw(st.one_of(st.none(), st.dictionaries(token_ids, st.floats(-8.0, 8.0), max_size=4))),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[np.ndarray, SamplingParams, list[int], list[int]]:
    vocab_size = draw(st.sampled_from(SIZES))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    prompt = [0, *draw(tokens)]
    return draw(logits_rows(vocab_size)), draw(sampling_params(vocab_size)), prompt, draw(tokens)


def started(params: SamplingParams, vocab_size: int, prompt: list[int], output: list[int]) -> SamplerState:
    state = SamplerState(1, vocab_size, [EOS] if vocab_size > EOS else [])
    state.start(0, params, 3, prompt + output, len(prompt))
    return state


@relaxed
@given(situations())
def test_processed_logits_follow_the_definitions(
    situation: tuple[np.ndarray, SamplingParams, list[int], list[int]],
) -> None:
    logits, params, prompt, output = situation
    state = started(params, len(logits), prompt, output)
    position = torch.tensor([len(prompt) + len(output)])
    got = processed(torch.from_numpy(logits)[None], torch.tensor([0]), position, state)
    eos = [EOS] if len(logits) > EOS else []
    np.testing.assert_array_equal(got[0], process(logits, params, prompt, output, eos))


@relaxed
@given(situations())
def test_kept_tokens_follow_the_definitions(
    situation: tuple[np.ndarray, SamplingParams, list[int], list[int]],
) -> None:
    logits, params, _, _ = situation
    plain = SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    wanted = reference(logits, plain)
    assume(wanted.margin > 1e-5)
    x = torch.from_numpy(logits)[None]
    column = lambda value, dtype: torch.tensor([[value]], dtype=dtype)  # noqa: E731
    kept = sampling_torch.keep_mask(
        x,
        (x - x.max()) / params.temperature,
        column(max(params.top_k, 0), torch.int64),
        column(params.top_p, torch.float32),
        column(params.min_p, torch.float32),
    )[0]
    possible = wanted.probabilities > 0.0
    assert kept[possible].all()
    # What a limit would keep, but underflows or is masked, has no probability to be drawn with.
    assert not kept[~possible & (wanted.probabilities.max() > 0.0) & (logits > logits.max() - 30.0)].any()


@relaxed
@given(situations())
def test_cpu_kernels_choose_what_torch_chooses(
    situation: tuple[np.ndarray, SamplingParams, list[int], list[int]],
) -> None:
    logits, params, prompt, output = situation
    eos = [EOS] if len(logits) > EOS else []
    with np.errstate(invalid="ignore"):
        wanted = reference(logits, params, prompt, output, eos)
    assume(not wanted.margin < 1e-5)
    state = started(params, len(logits), prompt, output)
    num = 24
    positions = torch.arange(num) + len(prompt) + len(output)
    # The first position has the history that the state holds; at later ones min_tokens may be over.
    x, rows = torch.from_numpy(logits).repeat(num, 1), torch.zeros(num, dtype=torch.int64)
    tokens = sample(x, rows, positions, state)
    assert torch.equal(tokens, sample_torch(x, rows, positions, state))
    if np.isfinite(process(logits, params, prompt, output, eos)).any():
        assert wanted.probabilities[tokens[0]] > 0.0


def test_kernel_exponential_is_accurate() -> None:
    z = np.linspace(-86.9, 0.0, 400_001).astype(np.float32)
    weights = np.empty_like(z)
    race_cpu.weigh(z, np.float32(0.0), np.float32(1.0), weights)
    exact = np.exp(z.astype(np.float64))
    assert np.abs(weights / exact - 1.0).max() < 2e-7
    assert weights[-1] == 1.0


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 4}, {1, 3, 5, 6}),
        ({"top_p": 0.5}, {1, 3}),  # (.4 .2 .2 .1 .1): .4 is short of .5, and 3 ties with 5
        ({"top_p": 0.7}, {1, 3, 5}),
        ({"top_p": 0.01}, {1}),
        ({"min_p": 0.45}, {1, 3, 5}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.65}, {1}),  # renormalised, .4 of .6 is .667
        ({"top_p": 0.85, "min_p": 0.3}, {1, 3, 5}),
        ({"top_k": 3, "top_p": 0.9, "min_p": 0.6}, {1}),
    ],
)
@pytest.mark.parametrize("implementation", [sample, sample_torch])
def test_worked_examples(
    make_state: MakeState, params: dict[str, Any], kept: set[int], implementation: Any
) -> None:
    """Every token that may be drawn is drawn, and no other; ties at a border go to the lowest id."""
    probabilities = torch.tensor([0.0, 0.4, 0.0, 0.2, 0.0, 0.2, 0.1, 0.1])
    logits = torch.log(probabilities).repeat(400, 1)
    state = make_state(8, params)
    tokens = implementation(logits, torch.zeros(400, dtype=torch.int64), torch.arange(400), state)
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize("implementation", [sample, sample_torch])
class TestMinTokens:
    """Until `min_tokens` are generated no stop token can be drawn."""

    def drawn(self, make_state: MakeState, implementation: Any, **params: Any) -> list[set[int]]:
        """What positions 3, 4, 5, 6 can give after a prompt of 3 tokens, of 4 equal logits: EOS is 2."""
        seeds = [SamplingParams(seed=seed, min_tokens=2, **params) for seed in range(100)]
        state = make_state(4, *seeds, prompt=(0, 0, 0))
        rows, logits = torch.arange(100), torch.zeros(100, 4)
        return [set(implementation(logits, rows, torch.full((100,), p), state).tolist()) for p in range(3, 7)]

    def test_eos(self, make_state: MakeState, implementation: Any) -> None:
        masked, free = {0, 1, 3}, {0, 1, 2, 3}
        assert self.drawn(make_state, implementation) == [masked, masked, free, free]

    def test_stop_token_ids(self, make_state: MakeState, implementation: Any) -> None:
        assert self.drawn(make_state, implementation, stop_token_ids=(0,))[:2] == [{1, 3}, {1, 3}]

    def test_ignored_eos_is_an_ordinary_token(self, make_state: MakeState, implementation: Any) -> None:
        drawn = self.drawn(make_state, implementation, ignore_eos=True, stop_token_ids=(0,))
        assert drawn[:2] == [{1, 2, 3}, {1, 2, 3}]


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_extreme_logit_bias_forces_and_bans(make_state: MakeState, random_logits: Any, bias: float) -> None:
    state = make_state(50, {"logit_bias": {7: bias}})
    logits = random_logits(300, 50)
    logits[:, 7] = 0.0
    tokens = sample(logits, torch.zeros(300, dtype=torch.int64), torch.arange(300), state)
    assert ((tokens == 7) == (bias > 0)).all()
