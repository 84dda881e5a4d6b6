"""Sampling on a team of threads chooses what one thread does, and what the first kernels did."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core.runtime import _nrt_python, rtsys
from test_coupled_drafts import Answer, batches, relaxed, vocabularies

from paceline.kernels.parallel import Team
from paceline.request import SamplingParams
from paceline.worker import drafting, sampling_team
from paceline.worker.sampling import Prefix, SamplerState, sample
from paceline.worker.sampling_team import SamplingTeam

EOS = 2


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    """Teams of 1, 2 and 3 threads."""
    made = [Team(num_threads) for num_threads in (1, 2, 3)]
    yield made
    for team in made:
        team.close()


@pytest.fixture
def small_shares() -> Iterator[None]:
    """Vocabularies of the tests' sizes are cut into shares, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_team, "_MIN_SHARE", 3)
        yield


def states(batch: list[Answer], teams: list[Team]) -> list[SamplerState]:
    """The same rows without a team and with each."""
    vocab_size = batch[0].logits.shape[1]
    made = []
    for team in (None, *teams):
        together = None if team is None else SamplingTeam(team, vocab_size)
        state = SamplerState(len(batch), vocab_size, [EOS], team=together)
        for row, answer in enumerate(batch):
            state.start(row, answer.params, row, [*answer.prompt, *answer.output], len(answer.prompt))
        made.append(state)
    return made


@pytest.mark.usefixtures("small_shares")
@relaxed
@given(batch=batches())
def test_a_team_samples_as_one_thread(teams: list[Team], batch: list[Answer]) -> None:
    """All processors, rows of several places that count the drafts before them, shares of places."""
    places = [(row, j) for row, answer in enumerate(batch) for j in range(len(answer.drafts) + 1)]
    inputs = [token for answer in batch for token in (3, *answer.drafts)]
    prefix = Prefix(torch.tensor(inputs), torch.tensor([j for _, j in places]))
    logits = torch.from_numpy(np.concatenate([answer.logits for answer in batch]))
    rows = torch.tensor([row for row, _ in places])
    positions = torch.tensor([batch[row].position + j for row, j in places])
    alone, *together = states(batch, teams)
    wanted = sample(logits, rows, positions, alone, prefix)
    for state in together:
        for num in (len(places), 1):
            got = sample(logits[:num], rows[:num], positions[:num], state, prefix)
            assert torch.equal(got, wanted[:num])
        assert torch.equal(state.counts, alone.counts)


@relaxed
@given(batch=batches(), data=st.data())
def test_a_team_drafts_as_one_thread(teams: list[Team], batch: list[Answer], data: st.DataObject) -> None:
    vocabulary = data.draw(vocabularies(batch[0].logits.shape[1]))
    columns = slice(None) if vocabulary is None else vocabulary.numpy()
    logits = torch.from_numpy(np.stack([answer.logits[0][columns] for answer in batch]))
    rows, positions = torch.arange(len(batch)), torch.tensor([answer.position for answer in batch])
    alone, *together = states(batch, teams)
    wanted = drafting._draw(logits, rows, positions, alone, vocabulary)
    for state in together:
        assert torch.equal(drafting._draw(logits, rows, positions, state, vocabulary), wanted)


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 2.5},
    {"top_p": 0.9},
    {"top_k": 40, "temperature": 0.7},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2, "logit_bias": {7: 4.0}},
    {"temperature": 0.0, "presence_penalty": 0.5},
]


def drawn(vocab_size: int, team: SamplingTeam | None) -> list[int]:
    """A token of each of many rows and shapes of logits, in blocks of 1, 2, 3, … places."""
    rng = np.random.default_rng(vocab_size)
    state = SamplerState(len(PARAMS), vocab_size, team=team)
    for row, params in enumerate(PARAMS):
        state.start(row, SamplingParams(**{"seed": row, **params}), row, [1, 5, 5], 2)
    tokens: list[int] = []
    for num in range(1, 20):
        x = rng.normal(size=(num, vocab_size)) * rng.choice([0.2, 2.0, 8.0], (num, 1))
        x[rng.random((num, vocab_size)) < rng.choice([0.0, 0.5, 0.999], (num, 1))] = -np.inf
        rows, positions = rng.integers(len(PARAMS), size=num), rng.integers(3, 8192, size=num)
        arguments = (torch.from_numpy(array) for array in (x.astype(np.float32), rows, positions))
        tokens += sample(*arguments, state).tolist()
    return tokens


@pytest.mark.parametrize(
    ("vocab_size", "wanted"),
    [(1_000, "f74384416196fdfe"), (49_152, "69a89de2ea903ef1")],
)
def test_words_of_the_first_release(teams: list[Team], vocab_size: int, wanted: str) -> None:
    """A seed keeps its words: the tokens that the kernels drew before they were made faster."""
    for team in (None, *teams):
        tokens = drawn(vocab_size, None if team is None else SamplingTeam(team, vocab_size))
        assert hashlib.sha256(np.array(tokens).tobytes()).hexdigest()[:16] == wanted


def test_shares() -> None:
    """Cut only as far as it gives every thread as much to do."""
    team = Team(6)
    together = SamplingTeam(team, 60_000)
    shares = [together.num_shares(num_places, 60_000) for num_places in (1, 2, 3, 4, 6, 7, 12, 24, 25)]
    assert shares == [6, 3, 2, 3, 1, 6, 1, 1, 1]
    assert [together.num_shares(1, size) for size in (10, 8_192, 16_384, 49_151)] == [1, 1, 2, 5]
    team.close()


def test_kernels_give_back_what_they_take(teams: list[Team]) -> None:
    """Nobody collects what a kernel on a team's thread would leave behind."""
    _nrt_python.memsys_enable_stats()
    try:
        before = rtsys.get_allocation_stats()
        for team in teams:
            drawn(1_000, SamplingTeam(team, 1_000))
        after = rtsys.get_allocation_stats()
    finally:
        _nrt_python.memsys_disable_stats()
    assert after.alloc - before.alloc > 100  # the control: they do take some
    assert after.alloc - before.alloc == after.free - before.free
