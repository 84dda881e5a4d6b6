"""The vector functions whose rounding matters: exp and bfloat16."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.parallel import Kernel, Program, Team, arg
from paceline.kernels.simd import load_f32, store_bf16, vexp, vload, vload_bf16, vstore, vstore_bf16


def _exp(args: int, thread: int, token: int, begin: int, end: int) -> None:
    for i in range(begin, end):
        vstore(arg(args, 1) + i * 64, vexp(vload(arg(args, 0) + i * 64)))


def _bf16(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Into bfloat16 by vectors and one by one, and back."""
    source, by_vector, by_one, back = arg(args, 0), arg(args, 1), arg(args, 2), arg(args, 3)
    for i in range(begin, end):
        vstore_bf16(by_vector + i * 32, vload(source + i * 64))
        for j in range(16):
            store_bf16(by_one + i * 32 + j * 2, load_f32(source + i * 64 + j * 4))
        vstore(back + i * 64, vload_bf16(by_vector + i * 32))


exp_kernel, bf16_kernel = Kernel(_exp), Kernel(_bf16)


def vector_exp(x: np.ndarray, team: Team) -> np.ndarray:
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    out = np.full_like(padded, np.nan)
    team.run(Program([exp_kernel.bind(padded, out, num_tasks=len(padded) // 16, step=64)]))
    return out[: len(x)]


def test_exp_is_within_its_bound(teams: list[Team]) -> None:
    x = np.concatenate([np.linspace(-87, 88, 400_000), np.linspace(-1, 1, 100_000)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(vector_exp(x, teams[1]) - exact) / exact) < 2e-7


def test_exp_beyond_its_range(teams: list[Team]) -> None:
    low = np.array([-87.001, -100.0, -1e30, -np.inf], np.float32)
    high = np.array([88.5, 1e30, np.inf], np.float32)
    assert vector_exp(low, teams[0]).tolist() == [0.0] * 4
    np.testing.assert_allclose(vector_exp(high, teams[0]), np.exp(88.0), rtol=2e-7)
    assert vector_exp(np.zeros(1, np.float32), teams[0]).tolist() == [1.0]


@settings(max_examples=50, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=16, max_size=16))
def test_bfloat16_rounds_to_nearest_even(teams: list[Team], bits: list[int]) -> None:
    ties = [word & 0xFFFF0000 | 0x8000 for word in bits]
    source = torch.from_numpy(np.array(bits + ties, np.uint32).view(np.float32))
    source = torch.where(source.isnan(), 1.0, source)
    by_vector, by_one = (torch.zeros(32, dtype=torch.bfloat16) for _ in range(2))
    back = torch.zeros(32)
    teams[0].run(Program([bf16_kernel.bind(source, by_vector, by_one, back, num_tasks=2)]))
    expected = source.bfloat16()
    assert torch.equal(by_vector, expected)
    assert torch.equal(by_one, expected)
    assert torch.equal(back, expected.float())
