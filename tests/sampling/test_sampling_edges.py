"""Edges: ties, infinities, NaN, extreme parameters; row state; validation; logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import RequestError
from paceline.request import SamplingParams, TokenLogprobs
from paceline.worker.sampling import SamplerState, logprobs, processed, sample, sample_torch

MakeState = Callable[..., SamplerState]

INF, NAN = float("inf"), float("nan")
both = pytest.mark.parametrize("implementation", [sample, sample_torch])


def draw(implementation: Any, logits: torch.Tensor, state: Any) -> list[int]:
    """One token at each of 200 positions of row 0, all with the same logits [V]."""
    num = 200
    rows = torch.zeros(num, dtype=torch.int64)
    return implementation(logits.repeat(num, 1), rows, torch.arange(num) + 5, state).tolist()


@both
@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([0.0, 0.0, 0.0, 0.0], 0),
        ([-0.0, 0.0, -0.0, 0.0], 0),
        ([-5.0, -0.0, 0.0, -1.0], 1),
        ([-INF, -3.0, -INF, -3.0], 1),
        ([-INF] * 4, 0),
        ([NAN, 1.0, NAN, 2.0], 3),
        ([NAN] * 4, 0),
        ([NAN, -INF, -3e38, NAN], 2),
        ([1.0, INF, 5.0, INF], 1),
    ],
)
def test_greedy(implementation: Any, make_state: MakeState, logits: list[float], token: int) -> None:
    assert set(draw(implementation, torch.tensor(logits), make_state(4, {"temperature": 0.0}))) == {token}


@both
@pytest.mark.parametrize(
    ("logits", "tokens"),
    [
        ([-INF, 1.0, -INF, 1.0], {1, 3}),
        ([NAN, 1.0, NAN, 1.0], {1, 3}),
        ([0.0, INF, 5.0, INF], {1}),
        ([-INF] * 4, {0}),
        ([NAN] * 4, {0}),
        ([3e38, -3e38, -3e38, 3e38], {0, 3}),
    ],
)
@pytest.mark.parametrize("params", [{}, {"top_p": 0.99}, {"top_k": 3}, {"min_p": 0.01}])
def test_masks_and_infinities(
    implementation: Any, make_state: MakeState, logits: list[float], tokens: set[int], params: dict[str, Any]
) -> None:
    assert set(draw(implementation, torch.tensor(logits), make_state(4, params))) == tokens


@both
@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_tiny_temperature_is_greedy(
    implementation: Any, make_state: MakeState, random_logits: Any, temperature: float
) -> None:
    logits = random_logits(1, 3000)[0]
    assert set(draw(implementation, logits, make_state(3000, {"temperature": temperature}))) == {
        int(logits.argmax())
    }


@both
@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-300])
def test_tiny_top_p_is_greedy(
    implementation: Any, make_state: MakeState, random_logits: Any, top_p: float
) -> None:
    logits = random_logits(1, 3000)[0]
    assert set(draw(implementation, logits, make_state(3000, {"top_p": top_p}))) == {int(logits.argmax())}


@both
def test_tiny_temperature_draws_among_equals(implementation: Any, make_state: MakeState) -> None:
    tokens = draw(implementation, torch.tensor([2.0, 1.0, 2.0]), make_state(3, {"temperature": 1e-6}))
    assert set(tokens) == {0, 2}


@both
def test_temperature_100_is_nearly_flat(implementation: Any, make_state: MakeState) -> None:
    tokens = draw(implementation, torch.tensor([5.0, 0.0, -5.0, 3.0]), make_state(4, {"temperature": 100.0}))
    assert np.bincount(tokens).min() > 25


@both
@pytest.mark.parametrize("top_k", [3, 4, 5, 10**9])
def test_top_k_at_and_beyond_the_vocabulary(implementation: Any, make_state: MakeState, top_k: int) -> None:
    tokens = draw(implementation, torch.zeros(4), make_state(4, {"top_k": top_k}))
    assert set(tokens) == set(range(min(top_k, 4)))


@both
def test_all_equal_and_truncated_keeps_the_lowest_ids(implementation: Any, make_state: MakeState) -> None:
    logits = torch.zeros(5000)
    assert max(draw(implementation, logits, make_state(5000, {"top_k": 10}))) <= 9
    assert max(draw(implementation, logits, make_state(5000, {"top_p": 0.01}))) <= 49


@both
def test_logits_are_left_alone(implementation: Any, make_state: MakeState, random_logits: Any) -> None:
    state = make_state(
        40,
        {"top_p": 0.5, "logit_bias": {3: 2.0}, "repetition_penalty": 1.5, "min_tokens": 30},
        {"temperature": 0.0},
    )
    logits = random_logits(2, 40)
    before = logits.clone()
    implementation(logits, torch.tensor([0, 1]), torch.tensor([5, 5]), state)
    assert torch.equal(logits, before)


PENALIZED = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.25}


class TestState:
    def adjusted(self, state: Any, row: int = 0) -> torch.Tensor:
        """Processed logits of a row when the model's are all 1: [V]."""
        return processed(torch.ones(1, state.vocab_size), torch.tensor([row]), torch.tensor([9]), state)[0]

    def test_accept_counts_as_start_does(self, make_state: MakeState) -> None:
        """A row resumed after a preemption stands where it stood."""
        resumed = make_state(8, PENALIZED, prompt=(1, 2), output=(3, 3, 5))
        running = make_state(8, PENALIZED, prompt=(1, 2))
        running.accept(torch.tensor([0, 0]), torch.tensor([3, 3]))
        running.accept(torch.tensor([0]), torch.tensor([5]))
        wanted = torch.tensor([1.0, 1 / 1.3, 1 / 1.3, 1 / 1.3 - 1.25, 1.0, 1 / 1.3 - 0.75, 1.0, 1.0])
        torch.testing.assert_close(self.adjusted(running), wanted)
        assert torch.equal(self.adjusted(resumed), self.adjusted(running))

    def test_rows_count_apart(self, make_state: MakeState) -> None:
        state = make_state(8, PENALIZED, PENALIZED, {}, prompt=(1,))
        state.accept(torch.tensor([0, 1, 2]), torch.tensor([4, 6, 7]))
        assert self.adjusted(state, 0).argmin() == 4
        assert self.adjusted(state, 1).argmin() == 6
        assert (self.adjusted(state, 2) == 1.0).all()

    def test_a_row_inherits_nothing(self, make_state: MakeState) -> None:
        state = make_state(
            8, {**PENALIZED, "logit_bias": {1: 5.0, 6: 5.0}, "min_tokens": 50}, prompt=(1,), output=(4,)
        )
        state.end(0)
        assert not any((state.any_biased, state.any_penalized, state.any_truncated))
        assert (self.adjusted(state) == 1.0).all()
        state.start(0, SamplingParams(seed=0, logit_bias={2: 3.0}, **PENALIZED), 0, [5], 1)
        wanted = torch.tensor([1.0, 1.0, 4.0, 1.0, 1.0, 1 / 1.3, 1.0, 1.0])
        torch.testing.assert_close(self.adjusted(state), wanted)

    def test_counts_take_memory_only_for_penalties(self, make_state: MakeState) -> None:
        state = make_state(8, {"top_p": 0.5, "logit_bias": {1: 1.0}, "min_tokens": 3})
        state.accept(torch.tensor([0]), torch.tensor([3]))
        assert state.counts.numel() == 0

    def test_biases_of_many_widths(self, make_state: MakeState) -> None:
        wide = {token_id: float(token_id) for token_id in range(40)}
        state = make_state(50, {"logit_bias": {3: 1.0}}, {"logit_bias": wide}, {})
        assert self.adjusted(state, 0).sum() == 51.0
        assert torch.equal(self.adjusted(state, 1)[:40], 1.0 + torch.arange(40))
        assert (self.adjusted(state, 2) == 1.0).all()


@pytest.mark.parametrize("token_id", [-1, 100, 10**6])
def test_unknown_token_ids_are_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=rf"logit_bias: token id {token_id} is not in \[0, 99\]") as caught:
        SamplingParams(logit_bias={5: 1.0, token_id: 1.0}).check_token_ids(100)
    assert caught.value.param == "logit_bias"
    with pytest.raises(RequestError, match=f"stop_token_ids: token id {token_id}") as caught:
        SamplingParams(stop_token_ids=(99, token_id)).check_token_ids(100)
    assert caught.value.param == "stop_token_ids"


def test_known_token_ids_pass() -> None:
    SamplingParams(logit_bias={0: 100.0, 99: -100.0}, stop_token_ids=(0, 99)).check_token_ids(100)


@pytest.mark.parametrize(
    ("param", "value", "words"),
    [
        ("stop", "END", "stop: expected `array`, got `str`"),
        ("stop", [1], r"stop\[0\]: expected `str`, got `int`"),
        ("temperature", "hot", "temperature: expected `float`, got `str`"),
        ("logprobs", True, "logprobs: expected `int | null`, got `bool`"),
        ("max_tokens", 3.5, "max_tokens: expected `int | null`, got `float`"),
        ("seed", 0.5, "seed: expected"),
        ("logit_bias", {"5": 1.0}, "logit_bias: expected `int`, got `str`"),
        ("stop_token_ids", 5, "stop_token_ids: expected `array`, got `int`"),
        ("grammar", "a+", "grammar: expected"),
        ("top_k", 2**64, "top_k must be in"),
        ("min_tokens", 2**64, "min_tokens must be in"),
        ("n", 0, "n must be at least 1, got 0"),
    ],
)
def test_values_of_a_wrong_type_or_size_stop_here(param: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words.replace("|", r"\|")) as caught:
        SamplingParams(**{param: value})
    assert (caught.value.param or "").startswith(param)


def test_lists_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1,))


def test_logprobs_are_the_log_softmax(random_logits: Any) -> None:
    logits = random_logits(5, 900)
    chosen = torch.tensor([0, 899, 3, 77, 500])
    num_top = [0, 3, 20, 1, 5]
    exact = torch.log_softmax(logits.double(), 1)
    records = logprobs(logits, chosen, max(num_top)).records(num_top)
    for p, record in enumerate(records):
        ids = torch.argsort(exact[p], descending=True)[: num_top[p]]
        assert record.top_ids == ids.tolist()
        np.testing.assert_allclose(record.top_logprobs, exact[p, ids], atol=2e-5)
        np.testing.assert_allclose(record.logprob, exact[p, chosen[p]], atol=2e-5)


def test_logprob_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0, 2.0, -0.0, 2.0, 0.0]])
    (record,) = logprobs(logits, torch.tensor([4]), 7).records([7])
    assert record.top_ids == [1, 3, 5, 0, 2, 4, 6]
    assert isinstance(record, TokenLogprobs)


def test_more_top_logprobs_than_tokens() -> None:
    (record,) = logprobs(torch.zeros(1, 3), torch.tensor([1]), 20).records([20])
    assert record.top_ids == [0, 1, 2]
    np.testing.assert_allclose(record.top_logprobs, np.log(1 / 3), rtol=1e-6)
