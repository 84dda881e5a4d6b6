"""Several places of a row in one step, and drafts drawn with the target's noise: as one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import reference
from test_sampling_processors import EOS, logits_rows, sampling_params

from paceline.draft.protocol import Round
from paceline.request import SamplingParams
from paceline.worker import drafting
from paceline.worker.drafting import CoupledChoice
from paceline.worker.sampling import Prefix, SamplerState, draw_torch, sample, sample_torch

relaxed = settings(
    deadline=None, max_examples=120, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
# What makes a row one whose drafts are drawn among the drafter's own columns.
UNPROCESSED: dict[str, Any] = {"min_tokens": 0, "logit_bias": None, "repetition_penalty": 1.0} | {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
both = pytest.mark.parametrize("implementation", [sample, sample_torch])


@dataclass(frozen=True)
class Answer:
    """A row with its known tokens, the drafts behind them, and the target's logits [1 + depth, V]."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    drafts: list[int]
    logits: np.ndarray

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


@st.composite
def answers(draw: st.DrawFn, vocab_size: int) -> Answer:
    tokens = st.integers(0, vocab_size - 1)
    drafts = draw(st.lists(tokens, max_size=4))
    params = draw(sampling_params(vocab_size))
    if draw(st.integers(0, 3)) == 0:
        params = msgspec.structs.replace(params, temperature=0.0)
    if draw(st.booleans()):
        params = msgspec.structs.replace(params, **UNPROCESSED)
    rows = [draw(logits_rows(vocab_size)) for _ in range(len(drafts) + 1)]
    prompt, output = draw(st.lists(tokens, min_size=1, max_size=4)), draw(st.lists(tokens, max_size=4))
    return Answer(params, prompt, output, drafts, np.stack(rows))


@st.composite
def batches(draw: st.DrawFn) -> list[Answer]:
    vocab_size = draw(st.sampled_from([7, 65]))
    return draw(st.lists(answers(vocab_size), min_size=1, max_size=3))


def state_of(batch: list[Answer], num_committed: int = 0) -> SamplerState:
    """The rows of a batch, the first `num_committed` drafts of each already settled."""
    state = SamplerState(len(batch), batch[0].logits.shape[1], [EOS])
    for row, answer in enumerate(batch):
        known = [*answer.prompt, *answer.output, *answer.drafts[:num_committed]]
        state.start(row, answer.params, row, known, len(answer.prompt))
    return state


@both
@relaxed
@given(batch=batches())
def test_a_block_is_sampled_as_its_tokens_one_by_one(implementation: Any, batch: list[Answer]) -> None:
    """Every processor, ragged depths, rows with and without penalties beside one another."""
    places = [(row, j) for row, answer in enumerate(batch) for j in range(len(answer.drafts) + 1)]
    inputs = [token for answer in batch for token in (3, *answer.drafts)]  # 3: the state has counted it
    prefix = Prefix(torch.tensor(inputs), torch.tensor([j for _, j in places]))
    logits = torch.from_numpy(np.concatenate([answer.logits for answer in batch]))
    rows = torch.tensor([row for row, _ in places])
    positions = torch.tensor([batch[row].position + j for row, j in places])
    state = state_of(batch)
    counts = state.counts.clone()
    block = implementation(logits, rows, positions, state, prefix).tolist()
    assert torch.equal(state.counts, counts)
    for p, (row, j) in enumerate(places):
        committed = state_of(batch, j)
        alone = (logits[p : p + 1], rows[p : p + 1], positions[p : p + 1])
        assert block[p] == int(implementation(*alone, committed)), f"draft {j} of row {row}"


def test_counts_of_drafts_decide(make_state: Any) -> None:
    """The control: without the drafts counted the property above does not hold."""
    state = make_state(4, {"temperature": 0.0, "frequency_penalty": 1.0})
    logits, rows = torch.tensor([[0.0, 1.5, 1.0, 0.0]]).repeat(3, 1), torch.zeros(3, dtype=torch.int64)
    positions, num_drafted = torch.arange(3) + 1, torch.arange(3)
    prefix = Prefix(torch.tensor([3, 1, 2]), num_drafted)
    for implementation in (sample, sample_torch):
        assert implementation(logits, rows, positions, state).tolist() == [1, 1, 1]
        assert implementation(logits, rows, positions, state, prefix).tolist() == [1, 2, 1]


@st.composite
def vocabularies(draw: st.DrawFn, vocab_size: int) -> torch.Tensor | None:
    """The target's ids that a drafter knows, ascending."""
    if draw(st.booleans()):
        return None
    ids = draw(st.sets(st.integers(0, vocab_size - 1), min_size=1))
    return torch.tensor(sorted(ids))


def spread(columns: torch.Tensor, vocabulary: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    if vocabulary is None:
        return columns
    full = torch.full((len(columns), vocab_size), -torch.inf)
    full[:, vocabulary] = columns
    return full


@relaxed
@given(data=st.data())
def test_the_drafter_that_is_the_target_draws_the_targets_tokens(data: st.DataObject) -> None:
    """All processors, all depths, mixed rows, part of the vocabulary: every draft would be accepted."""
    vocab_size = data.draw(st.sampled_from([7, 65]))
    batch = data.draw(st.lists(answers(vocab_size), min_size=1, max_size=4))
    batch = sorted((a for a in batch if a.drafts), key=lambda answer: -len(answer.drafts))
    if not batch:
        return
    vocabulary = data.draw(vocabularies(vocab_size))
    columns = slice(None) if vocabulary is None else vocabulary.numpy()
    state = state_of(batch)
    positions = torch.tensor([answer.position for answer in batch])
    drafting = Round(
        torch.arange(len(batch)), positions * 0, positions - 1, tuple(len(a.drafts) for a in batch), 10**6
    )
    choose = CoupledChoice(state, drafting)
    chosen: list[list[int]] = [[] for _ in batch]
    for step in range(drafting.depths[0]):
        num = drafting.num_at(step)
        logits = torch.from_numpy(np.stack([answer.logits[step] for answer in batch[:num]]))
        q = logits[:, columns].contiguous()
        committed = [_drafted(answer, chosen[i]) for i, answer in enumerate(batch[:num])]
        rows, at = torch.arange(num), positions[:num] + step
        wanted = sample(spread(q, vocabulary, vocab_size), rows, at, state_of(committed, step))
        got = choose(step, q, vocabulary)
        full = spread(q, vocabulary, vocab_size)
        alive = (full > -torch.inf).any(dim=1)
        clear = torch.tensor([_clear(x, answer) for x, answer in zip(full, committed, strict=True)])
        assert got[alive & clear].tolist() == wanted[alive & clear].tolist()
        for i, token in enumerate(got.tolist()):
            chosen[i].append(token)


def _clear(logits: torch.Tensor, answer: Answer) -> bool:
    """Whether no rounding of a sum, which columns left out may change, decides what `top_p` keeps."""
    if answer.params.temperature == 0.0 or answer.params.top_p == 1.0:
        return True
    output = [*answer.output, *answer.drafts]
    with np.errstate(invalid="ignore"):
        return reference(logits.numpy(), answer.params, answer.prompt, output, [EOS]).margin > 1e-5


def _drafted(answer: Answer, drafts: list[int]) -> Answer:
    return Answer(answer.params, answer.prompt, answer.output, drafts, answer.logits)


@relaxed
@given(data=st.data())
def test_kernels_draw_as_torch_in_any_vocabulary(data: st.DataObject) -> None:
    """Columns in any order; where columns tie, the lowest token: what other devices run, in torch."""
    vocab_size = 65
    answer = data.draw(answers(vocab_size))
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, unique=True))
    vocabulary = torch.tensor(ids)
    params = SamplingParams(seed=answer.params.seed, temperature=answer.params.temperature)
    state = state_of([_drafted(Answer(params, [1], [], [], answer.logits), [])])
    num = 16
    logits = torch.from_numpy(answer.logits[0])[vocabulary].repeat(num, 1)
    rows, positions = torch.zeros(num, dtype=torch.int64), torch.arange(num) + 3
    got = drafting._draw(logits, rows, positions, state, vocabulary)
    assert torch.equal(got, draw_torch(logits, rows, positions, state, vocabulary))
    if torch.isfinite(logits).any():
        full = spread(logits, vocabulary, vocab_size)
        assert torch.equal(got, sample(full, rows, positions, state))


def test_top_probabilities(make_state: Any, random_logits: Any) -> None:
    state = make_state(50, {"temperature": 0.0}, {"logit_bias": {3: 9.0}}, {"top_k": 2}, {})
    drafting = Round(torch.arange(4), torch.zeros(4), torch.full((4,), 5), (3, 2, 2, 1), 5)
    choose = CoupledChoice(state, drafting, asking=[0, 1, 3])
    wanted = torch.zeros(4, 3)
    for step in range(3):
        num = drafting.num_at(step)
        logits = random_logits(num, 50, seed=step)
        choose(step, logits, None)
        wanted[:num, step] = torch.softmax(logits, dim=1).amax(dim=1)
    wanted[2] = 0.0
    assert choose.probs is not None
    torch.testing.assert_close(choose.probs, wanted, rtol=1e-5, atol=0.0)
    assert CoupledChoice(state, drafting).probs is None


def test_a_drafter_gone_mad_does_no_harm(make_state: Any) -> None:
    """NaN and infinities: some token of its vocabulary, and a probability that is a number."""
    state = make_state(9, {"temperature": 0.0}, {}, {"top_p": 0.5}, {"presence_penalty": 1.0})
    rows = torch.arange(4)
    drafting = Round(rows, rows, torch.full((4,), 5), (1, 1, 1, 1), 5)
    for value in (torch.nan, torch.inf, -torch.inf):
        choose = CoupledChoice(state, drafting, asking=[0, 1, 2, 3])
        drafts = choose(0, torch.full((4, 3), value), torch.tensor([2, 4, 8]))
        assert set(drafts.tolist()) <= {0, 2, 4, 8}
        assert choose.probs is not None
        assert torch.isfinite(choose.probs).all()
