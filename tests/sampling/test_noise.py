"""The noise is Philox4x32-10 wherever it is computed, and looks random along every part of its key."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from paceline.worker import noise, race_cpu

# Known answers of Random123, the generator's own library (kat_vectors: philox4x32, 10 rounds).
KNOWN = [
    ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
AXES = ("token", "position", "choice", "seed")


@pytest.mark.parametrize(("inputs", "words"), KNOWN)
def test_known_answers_in_python_torch_and_numba(inputs: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert noise.philox(*inputs) == words
    assert race_cpu.philox(*inputs) == words
    assert tuple(int(w) for w in noise.philox(*(torch.tensor(i) for i in inputs))) == words


def tails(axis: str, num: int, *, offset: int = 0) -> np.ndarray:
    """x for `num` successive values along one part of the key, the others fixed: [num]."""
    steps = torch.arange(num) + offset
    fixed = torch.full((num,), 3)
    seeds = torch.tensor([5, 7]).repeat(num, 1)
    if axis == "token":
        return noise.tail(fixed[:1], fixed[:1], seeds[:1], steps)[0].numpy()
    if axis == "seed":
        seeds = torch.tensor([noise.seed_words(int(s)) for s in steps])
    positions = steps if axis == "position" else fixed
    choices = steps if axis == "choice" else fixed
    return noise.tail(positions, choices, seeds, fixed[:1])[:, 0].numpy()


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_axis(axis: str) -> None:
    x = tails(axis, 100_000)
    assert kstest(x, "uniform").pvalue > 1e-4
    assert len(np.unique(x)) == len(x), "a coarse grid would repeat values"


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis: str) -> None:
    x = (tails(axis, 100_001) * 16).astype(int)
    pairs = np.bincount(x[:-1] * 16 + x[1:], minlength=256)
    assert chisquare(pairs).pvalue > 1e-4


def test_axes_are_not_exchangeable() -> None:
    """Token 4 at position 5 shares nothing with token 5 at position 4, and likewise for choices."""
    one, two = torch.tensor([4]), torch.tensor([5])
    seeds = torch.tensor([[1, 0]])
    draws = {
        float(noise.tail(position, choice, seeds, token))
        for position, choice, token in [(one, one, two), (one, two, one), (two, one, one)]
    }
    assert len(draws) == 3


@pytest.mark.parametrize("argument", range(6))
def test_avalanche(argument: int) -> None:
    """Flipping any input bit flips each output bit half of the time."""
    rng = np.random.default_rng(argument)
    inputs = torch.from_numpy(rng.integers(0, 2**32, (6, 500)))
    before = torch.stack(noise.philox(*inputs))
    for bit in range(32):
        flipped = inputs.clone()
        flipped[argument] ^= 1 << bit
        changed = before ^ torch.stack(noise.philox(*flipped))
        share = torch.stack([(changed >> b & 1).double().mean(1) for b in range(32)])
        assert (share - 0.5).abs().max() < 6 * 0.5 / 500**0.5


def test_gumbel_tail_is_not_cut_off() -> None:
    """P(G > g) = 1 - exp(-exp(-g)) far beyond what a million draws of coarse uniforms could show."""
    ids = torch.arange(500_000)
    seeds = torch.tensor([[1, 0], [2, 0], [3, 0], [4, 0]])
    zero = torch.zeros(4, dtype=torch.int64)
    draws = noise.gumbel(zero, zero, seeds, ids)
    for threshold in (6.0, 9.0, 11.0):
        expected = draws.numel() * -np.expm1(-np.exp(-threshold))
        assert abs(int((draws > threshold).sum()) - expected) < 5 * expected**0.5
    assert draws.isfinite().all()
    assert draws.min() > -3.62


def test_any_token_list_gives_the_noise_of_the_whole_vocabulary() -> None:
    """A draft vocabulary draws with the target's noise: by token id, in any order."""
    positions, choices = torch.tensor([9, 10]), torch.tensor([0, 1])
    seeds = torch.tensor([[1, 2], [3, 4]])
    whole = noise.gumbel(positions, choices, seeds, torch.arange(1000))
    some = torch.tensor([999, 4, 4, 512, 0])
    assert torch.equal(noise.gumbel(positions, choices, seeds, some), whole[:, some])


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, -1, -(2**63)])
def test_seed_words_hold_all_64_bits(seed: int) -> None:
    low, high = noise.seed_words(seed)
    assert (high << 32 | low) == seed % 2**64
