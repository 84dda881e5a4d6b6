"""The products in integers: each block's sum is exact, x keeps 16 bits, and no value of x breaks anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_blocks import QUANTIZED, raw_tensor, scaled_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from paceline.kernels.memory import Arena
from paceline.kernels.packed_gemm import STORE
from paceline.kernels.parallel import Program, Team
from paceline.models.packed import HAS_DOT, PackedMatrix, pack, pack_dense
from paceline.models.phases import Products
from paceline.models.tensors import Kind

pytestmark = pytest.mark.skipif(not HAS_DOT, reason="this processor has no AVX-512 VNNI")

F32, F64, I64 = NDArray[np.float32], NDArray[np.float64], NDArray[np.int64]
LARGEST = np.float32(32512)


def multiply(matrix: PackedMatrix, x: torch.Tensor, team: Team) -> torch.Tensor:
    out = torch.full((len(x), matrix.num_rows), torch.nan)
    team.run(Program([Products(team, 1e-5).gemm(matrix, x, out, STORE)]))
    return out


def from_blocks(tmp_path: Path, kind: Kind, blocks: NDArray[np.uint8]) -> PackedMatrix:
    return pack([raw_tensor(tmp_path / "w", kind, blocks)], Arena(), dot=True)


def rounded(x: torch.Tensor, block: int) -> tuple[F32, I64]:
    """Scales [M, K/block] and integers [M, K/block, block] as the kernel's docstring has them."""
    blocks = x.numpy().reshape(len(x), -1, block)
    top = np.abs(blocks).max(axis=2)
    product = blocks.astype(np.float64) * (LARGEST / top).astype(np.float64)[..., None]
    return top * np.float32(1 / 32512), np.rint(product).astype(np.int64)


def codes_of(matrix: PackedMatrix) -> I64:
    """[N, K/block, block]: unsigned for the formats with an offset, signed otherwise."""
    tiles, block = matrix.num_rows // 16, matrix.format.block
    packed = matrix.codes.numpy().reshape(tiles, matrix.num_columns // block, -1, 16, 4)
    if matrix.format.bits == 4:
        codes = np.concatenate((packed & 15, packed >> 4), axis=2).astype(np.int64)
    else:
        codes = packed.astype(np.int64) - 128
    return codes.transpose(0, 3, 1, 2, 4).reshape(matrix.num_rows, -1, block)


def exact(matrix: PackedMatrix, x: torch.Tensor) -> tuple[F64, F64]:
    """The product of x as it is rounded, and the sizes of the terms that were summed, [M, N]."""
    s, q = rounded(x, matrix.format.block)
    scales = matrix.scales.double().numpy().transpose(0, 3, 1, 2).reshape(matrix.num_rows, s.shape[1], -1)
    dots = np.einsum("mbi,nbi->mnb", q, codes_of(matrix)).astype(np.float64)
    terms = dots * scales[:, :, 0]
    sizes = np.abs(terms)
    if matrix.format.bits == 4:
        offsets = q.sum(axis=2)[:, None] * scales[:, :, 1]
        terms, sizes = terms + offsets, sizes + np.abs(offsets)
    return (terms * s[:, None]).sum(axis=2), (sizes * s[:, None]).sum(axis=2)


def assert_exact(matrix: PackedMatrix, x: torch.Tensor, team: Team) -> None:
    """Within float32's rounding of each block's term and of the sums."""
    expected, sizes = exact(matrix, x)
    error = np.abs(multiply(matrix, x, team).double().numpy() - expected)
    assert (error <= 6e-8 * (3 + matrix.num_columns // matrix.format.block) * sizes + 1e-37).all()


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 13])
def test_block_sums_are_exact(tmp_path: Path, teams: list[Team], kind: Kind, num_tokens: int) -> None:
    matrix = from_blocks(tmp_path, kind, scaled_blocks(kind, 80, 768, 768**-0.5))
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = torch.logspace(-4, 4, 768)[torch.randperm(768, generator=generator)]
    assert_exact(matrix, torch.randn(num_tokens, 768, generator=generator) * sizes, teams[1])


@pytest.mark.parametrize(("kind", "first", "low", "high"), [("Q8_0", 2, 0x80, 0x7F), ("Q4_1", 4, 0x00, 0xFF)])
def test_the_largest_sums_do_not_overflow(
    tmp_path: Path, teams: list[Team], kind: Kind, first: int, low: int, high: int
) -> None:
    blocks = scaled_blocks(kind, 32, 64, 0.1)
    codes = blocks.reshape(32, 2, -1)[:, :, first:]
    codes[:16], codes[16:] = low, high
    matrix = from_blocks(tmp_path, kind, blocks)
    signs = torch.tensor([[1.0], [-1.0]])
    assert_exact(matrix, signs * 3.7 * torch.ones(64), teams[0])
    near = torch.full((1, 64), 3.7 * 32511.4 / 32512)  # q 32511: its lower byte is -1
    near[0, ::32] = 3.7
    assert_exact(matrix, near, teams[0])


_HUGE = float(np.float32(1e38))
_ELEMENTS = st.one_of(st.floats(-1, 1, width=32), st.floats(-_HUGE, _HUGE, width=32))


@settings(max_examples=100, deadline=None)
@given(
    x=hnp.arrays(np.float32, (2, 64), elements=_ELEMENTS),
    kind=st.sampled_from(("Q8_0", "Q4_1")),
)
def test_x_keeps_sixteen_bits_of_its_blocks_largest(teams: list[Team], x: F32, kind: Kind) -> None:
    """Of rows that each pick one column of x: their other codes are 0, as is Q4_1's offset."""
    picks = pack_dense(torch.eye(64), kind, Arena(), dot=True)
    one = float(picks.dequantize()[0, 0])
    given_x = x.astype(np.float64).reshape(2, 2, 32)
    largest = np.abs(given_x).max(axis=2, keepdims=True)
    got = multiply(picks, torch.from_numpy(x), teams[0]).double().numpy().reshape(2, 2, 32) / one
    assert (np.abs(got - given_x) <= largest * (1.001 / 65024) + 2e-35).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_zeros_give_zeros(tmp_path: Path, teams: list[Team], kind: Kind) -> None:
    matrix = from_blocks(tmp_path, kind, scaled_blocks(kind, 32, 512, 0.1))
    assert bool((multiply(matrix, torch.zeros(3, 512), teams[0]) == 0).all())
    x = torch.zeros(2, 512)
    x[1, 64:80] = 1.0  # one block beside blocks of zeros
    expected = x.double() @ matrix.dequantize().double().T
    torch.testing.assert_close(multiply(matrix, x, teams[0]).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_in_its_row(
    tmp_path: Path, teams: list[Team], kind: Kind, value: float
) -> None:
    matrix = from_blocks(tmp_path, kind, scaled_blocks(kind, 32, 512, 0.1))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    clean = multiply(matrix, x, teams[1])
    x[3, 100] = value
    got = multiply(matrix, x, teams[1])
    assert not bool(got[3].isfinite().any())
    others = [0, 1, 2, 4]
    assert torch.equal(got[others], clean[others])


def test_this_processor_gets_them_by_default(tmp_path: Path) -> None:
    blocks = scaled_blocks("Q8_0", 16, 32, 1.0)
    assert pack([raw_tensor(tmp_path / "w", "Q8_0", blocks)], Arena()).family == "dot"
    assert pack_dense(torch.ones(16, 32), "Q8_0", Arena()).family == "dot"
    assert pack_dense(torch.ones(16, 32), "Q8_0", Arena(), dot=False).family == "float"
