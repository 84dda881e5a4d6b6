"""Acceptance: against plain Python; the joint law of the tokens, enumerated exactly, whatever is drafted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import process

from paceline.draft.protocol import NO_DRAFT
from paceline.request import SamplingParams
from paceline.worker import sampling
from paceline.worker.sampler_state import SEED_LOW, SamplerState
from paceline.worker.sampling import Prefix, sample_torch
from paceline.worker.verify import Accepted, accept, accept_torch


def by_hand(y: list[int], drafts: list[int], room: int) -> list[int]:
    """The new tokens of a row, one by one; as many places as drafts, and one."""
    tokens: list[int] = []
    for place, token in enumerate(y):
        tokens.append(token)
        if place == len(drafts) or drafts[place] != token:
            break
    return tokens[:room]


Row = tuple[list[int], list[int], int]


@st.composite
def blocks(draw: st.DrawFn) -> Row:
    """What the target chose, what was drafted, and the room, of one row."""
    depth = draw(st.integers(0, 4))
    tokens = st.integers(0, 2)
    y = draw(st.lists(tokens, min_size=depth + 1, max_size=depth + 1))
    drafts = draw(st.lists(st.one_of(tokens, st.just(NO_DRAFT)), min_size=depth, max_size=depth))
    return y, drafts, draw(st.integers(0, 6))


@pytest.mark.parametrize("function", [accept, accept_torch])
@given(rows=st.lists(blocks(), min_size=1, max_size=5), junk=st.integers(-1, 2))
def test_ragged_rows_as_by_hand(function: Callable[..., Accepted], rows: list[Row], junk: int) -> None:
    """`junk` fills the drafts beyond a row's own depth, and may equal what the next row's target chose."""
    width = max(len(drafts) for _, drafts, _ in rows)
    padded = [drafts + [junk] * (width - len(drafts)) for _, drafts, _ in rows]
    lens = [len(y) for y, _, _ in rows]
    got = function(
        torch.tensor([token for y, _, _ in rows for token in y]),
        torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width),
        torch.tensor([0, *itertools.accumulate(lens)][:-1]),
        torch.tensor([num - 1 for num in lens]),
        torch.tensor([room for _, _, room in rows]),
    )
    assert got.token_ids.shape == (len(rows), 1 + width)
    assert got.token_ids.dtype == got.accept_len.dtype == torch.int64
    taken = [ids[:num] for ids, num in zip(got.token_ids.tolist(), got.accept_len.tolist(), strict=True)]
    assert taken == [by_hand(*row) for row in rows]


# ---- The joint law of the tokens of an answer, over all noise of a finite alphabet

VOCAB, PROMPT = 3, (1,)
ALPHABET = (-0.61, 0.37, 1.83)
PARAMS = SamplingParams(
    seed=0, temperature=0.8, presence_penalty=0.9, repetition_penalty=1.3, logit_bias={2: 0.45}
)
# Logits by the latest two tokens of the answer so far (VOCAB: before its beginning).
TARGET = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(15)) * 0.5
NEARLY = TARGET + torch.randn(TARGET.shape, generator=torch.Generator().manual_seed(5)) * 0.6

Verifier = Callable[["Round"], Accepted]
Drafter = Callable[["Answers", int], torch.Tensor]


class Answers:
    """All N answers of `length` tokens, one for every noise there is, grown block by block."""

    def __init__(self, alphabet: tuple[float, ...], length: int, num_choices: int) -> None:
        size = num_choices * length * VOCAB
        noise = torch.tensor(list(itertools.product(alphabet, repeat=size)), dtype=torch.float64)
        self.noise = noise.reshape(-1, num_choices, length, VOCAB)
        self.length, self.num = length, len(noise)
        self.token_ids = torch.full((self.num, length + 8), VOCAB)
        self.lengths = torch.zeros(self.num, dtype=torch.int64)
        self.states = [self._state(choice) for choice in range(num_choices)]
        self.rows = torch.arange(self.num)

    def _state(self, choice: int) -> SamplerState:
        state = SamplerState(self.num, VOCAB)
        state.start(0, PARAMS, choice, PROMPT, len(PROMPT))
        for tensor in (state.floats, state.ints, state.bias_ids, state.bias_values, state.bias_until):
            tensor[:] = tensor[0].clone()
        state.prompt_mask[:] = state.prompt_mask[0].clone()
        state.ints[:, SEED_LOW] = torch.arange(self.num)
        return state

    def gumbel(
        self, positions: torch.Tensor, choices: torch.Tensor, seeds: torch.Tensor, token_ids: torch.Tensor
    ) -> torch.Tensor:
        """In the place of `noise.gumbel`. Beyond the answer's length it does not matter."""
        at = (positions - len(PROMPT)).clamp(max=self.length - 1)
        return self.noise[seeds[:, 0], choices, at][:, token_ids]

    def logits(self, table: torch.Tensor, ahead: int) -> torch.Tensor:
        """fp32 [N, V] of the token `ahead` of the known ones, whatever has been written between."""
        at = self.lengths + ahead
        latest = [
            torch.where(at >= back, self.token_ids[self.rows, (at - back).clamp(min=0)], VOCAB)
            for back in (2, 1)
        ]
        return table[latest[0], latest[1]]

    def choose(self, table: torch.Tensor, ahead: int, choice: int = 0) -> torch.Tensor:
        """int64 [N]: the token `ahead` of the known ones, from the logits of `table`."""
        # Part by part: what is made for counting grows with the square of the number of places.
        parts = [self._choose(table, ahead, choice, part) for part in self.rows.split(256)]
        return torch.cat(parts)

    def _choose(self, table: torch.Tensor, ahead: int, choice: int, part: torch.Tensor) -> torch.Tensor:
        written, lengths = self.token_ids[part], self.lengths[part]
        ends = torch.arange(len(part)) * written.shape[1] + lengths + ahead
        prefix = Prefix(written.flatten().clamp(max=VOCAB - 1), torch.full_like(part, ahead), ends)
        logits, positions = self.logits(table, ahead)[part], lengths + len(PROMPT) + ahead
        return sample_torch(logits, part, positions, self.states[choice], prefix)

    def take(self, accepted: Accepted) -> None:
        steps = torch.arange(accepted.token_ids.shape[1])
        new = steps < accepted.accept_len[:, None]
        at = self.lengths[:, None] + steps
        self.token_ids[self.rows[:, None].expand_as(at)[new], at[new]] = accepted.token_ids[new]
        rows = self.rows[:, None].expand_as(new)[new]
        for state in self.states:
            state.accept(rows, accepted.token_ids[new])
        self.lengths += accepted.accept_len


class Round:
    """What a verifier is given: the target's choice at each place, the drafts, and noise of its own."""

    def __init__(self, answers: Answers, drafter: Drafter, depth: int) -> None:
        self.drafts = torch.empty(answers.num, depth, dtype=torch.int64)
        for step in range(depth):
            self.drafts[:, step] = drafter(answers, step)
            written = self.drafts[:, step].clamp(min=0)
            answers.token_ids[answers.rows, answers.lengths + step] = written
        self.y = torch.stack([answers.choose(TARGET, ahead) for ahead in range(depth + 1)], dim=1)
        self.fresh = self.y
        if len(answers.states) > 1:
            self.fresh = torch.stack([answers.choose(TARGET, a, 1) for a in range(depth + 1)], dim=1)
        self.likely = torch.stack([answers.logits(TARGET, ahead) for ahead in range(depth + 1)], dim=1)
        self.room = answers.length - answers.lengths

    def accept(self, y: torch.Tensor) -> Accepted:
        num, places = y.shape
        first, depths = torch.arange(num) * places, torch.full((num,), places - 1)
        return accept(y.flatten(), self.drafts, first, depths, self.room)


def law(
    verifier: Verifier, drafter: Drafter, depth: int, answers: Answers
) -> dict[tuple[int, ...], Fraction]:
    """The exact law of the answers' tokens when each block is drafted and verified so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "gumbel", answers.gumbel)
        while (answers.lengths < answers.length).any():
            answers.take(verifier(Round(answers, drafter, depth)))
    counts = Counter(map(tuple, answers.token_ids[:, : answers.length].tolist()))
    return {tokens: Fraction(count, answers.num) for tokens, count in counts.items()}


def chain_law(alphabet: tuple[float, ...], length: int) -> dict[tuple[int, ...], Fraction]:
    """The target's own: the product of the laws of each token given those before, by the definitions."""
    known: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    for _ in range(length):
        longer: dict[tuple[int, ...], Fraction] = {}
        for tokens, probability in known.items():
            before = (VOCAB, VOCAB, *tokens)[-2:]
            x = process(TARGET[before].numpy(), PARAMS, PROMPT, tokens, ()).astype(np.float64)
            scaled = x / PARAMS.temperature
            drawn = Counter(
                int(np.argmax(scaled + np.array(noise)))
                for noise in itertools.product(alphabet, repeat=VOCAB)
            )
            for token, count in drawn.items():
                longer[*tokens, token] = probability * Fraction(count, len(alphabet) ** VOCAB)
        known = longer
    return known


def coupled(table: torch.Tensor) -> Drafter:
    return lambda answers, step: answers.choose(table, step)


def greedy_of_the_wrong(answers: Answers, step: int) -> torch.Tensor:
    return answers.logits(-TARGET, step).argmax(dim=1)


def second_best(answers: Answers, step: int) -> torch.Tensor:
    return answers.logits(TARGET, step).topk(2, dim=1).indices[:, 1]


def never_right(answers: Answers, step: int) -> torch.Tensor:
    """Knows what the target is going to choose, and proposes another token."""
    return (answers.choose(TARGET, step) + 1) % VOCAB


def right_where_it_suits(answers: Answers, step: int) -> torch.Tensor:
    """Would like answers to be of token 0: proposes it where it is right, and else wrong tokens or none."""
    y = answers.choose(TARGET, step)
    return torch.where(y == 0, y, torch.where(answers.rows % 2 == 0, NO_DRAFT, (y + 1) % VOCAB))


DRAFTERS: dict[str, Drafter] = {
    "perfect": coupled(TARGET),
    "good": coupled(NEARLY),
    "bad": coupled(TARGET.flip(2)),
    "wrong": greedy_of_the_wrong,
    "second best": second_best,
    "never right": never_right,
    "selective": right_where_it_suits,
}


def honest(round_: Round) -> Accepted:
    return round_.accept(round_.y)


def takes_likely_drafts(round_: Round) -> Accepted:
    """Accepts a draft that the target finds likely enough, though it chose another token."""
    y = round_.y.clone()
    proposed = round_.drafts.clamp(min=0)
    logits = round_.likely[:, : proposed.shape[1]]
    near = logits.gather(2, proposed[:, :, None])[:, :, 0] > logits.amax(dim=2) - 1.0
    y[:, : proposed.shape[1]] = torch.where(near & (round_.drafts >= 0), proposed, y[:, : proposed.shape[1]])
    return round_.accept(y)


def draws_again_on_rejection(round_: Round) -> Accepted:
    """Replaces the token that a draft missed by one of fresh noise."""
    accepted = honest(round_)
    rejected = accepted.accept_len <= round_.drafts.shape[1]
    last = (accepted.accept_len - 1).clamp(min=0)[:, None]
    fresh = torch.where(rejected[:, None], round_.fresh.gather(1, last), accepted.token_ids.gather(1, last))
    return Accepted(accepted.accept_len, accepted.token_ids.scatter(1, last, fresh))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_joint_law_is_the_targets(drafter: str, depth: int) -> None:
    assert law(honest, DRAFTERS[drafter], depth, Answers(ALPHABET, 2, 1)) == chain_law(ALPHABET, 2)


@pytest.mark.parametrize("drafter", ["good", "second best", "selective"])
def test_the_joint_law_of_three_tokens(drafter: str) -> None:
    two = ALPHABET[::2]
    assert law(honest, DRAFTERS[drafter], 2, Answers(two, 3, 1)) == chain_law(two, 3)


@pytest.mark.parametrize("verifier", [takes_likely_drafts, draws_again_on_rejection])
@pytest.mark.parametrize("drafter", ["good", "selective"])
def test_a_biased_verifier_is_caught(verifier: Verifier, drafter: str) -> None:
    """The control: the very check above, with the same drafters, on verifiers that only seem right."""
    two = ALPHABET[::2]
    assert law(honest, DRAFTERS[drafter], 1, Answers(two, 2, 2)) == chain_law(two, 2)
    assert law(verifier, DRAFTERS[drafter], 1, Answers(two, 2, 2)) != chain_law(two, 2)


def test_drafters_differ_as_they_should() -> None:
    """The control of the controls: between them the drafters are accepted always, sometimes and never."""
    rates: dict[str, float] = {}
    for name, drafter in DRAFTERS.items():
        answers = Answers(ALPHABET, 2, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "gumbel", answers.gumbel)
            accepted = honest(Round(answers, drafter, 1))
        rates[name] = float((accepted.accept_len == 2).double().mean())
    assert rates["perfect"] == 1.0
    assert rates["never right"] == 0.0
    assert 0.0 < rates["bad"] < rates["good"] < 1.0
    assert 0.0 < rates["selective"] < 1.0
