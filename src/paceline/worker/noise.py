"""Noise for sampling: a pure function of (seed, choice, position, token id).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", SC 2011), the counter-based generator of JAX, cuRAND and Triton (`tl.philox`). The seed
is its 64-bit key; its 128-bit counter is (token id, position, choice, 0). For one seed Philox is
a bijection of the counter, so no two (token, position, choice) share a block, and nothing has to
be drawn in order: any token of any position can be asked for, alone.

`philox` uses only the operators * + ^ & >> on 64-bit integers, so the same lines run on Python
ints, under numba and on torch tensors of any device, and give the same words.

Knows nothing of logits, rows or requests.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

MASK = 0xFFFFFFFF
_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85


def philox(c0: Word, c1: Word, c2: Word, c3: Word, k0: Word, k1: Word) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words, held in 64-bit integers, for a counter and a key of 32-bit words.

    A signed 64-bit product of two words wraps, and its shift drags the sign along: the mask takes
    both away, which is why signed integers (all that torch has on every device) serve.
    """
    for _ in range(10):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0 = ((p1 >> 32) & MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & MASK) ^ c3 ^ k1
        c1 = p1 & MASK
        c3 = p0 & MASK
        k0 = (k0 + _W0) & MASK
        k1 = (k1 + _W1) & MASK
    return c0, c1, c2, c3


def seed_words(seed: int) -> tuple[int, int]:
    """The Philox key of a seed: its low and high 32 bits (negative seeds are taken modulo 2^64)."""
    return seed & MASK, (seed >> 32) & MASK


def tail(positions: Tensor, choices: Tensor, seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Uniform numbers x in [2^-53, 1 - 2^-53], symmetric about 1/2, on a grid of 2^-52.

    Args:
        positions, choices: int64 [P].
        seeds: int64 [P, 2], as `seed_words` gives them.
        token_ids: int64 [N], in any order, repeats allowed.

    Returns:
        float64 [P, N].
    """
    choice = choices[:, None]
    zero = torch.zeros_like(choice)
    w0, w1, _, _ = philox(token_ids[None, :], positions[:, None], choice, zero, seeds[:, :1], seeds[:, 1:])
    return (((w0 << 20) | (w1 >> 12)).double() + 0.5) * 2.0**-52


def gumbel(positions: Tensor, choices: Tensor, seeds: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise -log(-log u), float64 [P, N], arguments as for `tail`; within [-3.61, 36.74].

    With u = 1 - x the inner logarithm is log1p(-x), which is accurate where it matters: the large
    noise that decides a draw comes from a small x, and x is never rounded to 0.
    """
    return -torch.log(-torch.log1p(-tail(positions, choices, seeds, token_ids)))
