"""The packed products of both families against float64, and two promises: exact packing, and bits that no
batch changes. What only the family in integers does is in test_packed_dot.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_blocks import QUANTIZED, block_len, raw_tensor, scaled_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import random_blocks

from paceline.kernels.memory import Arena
from paceline.kernels.packed_gemm import ADD, STORE, SWIGLU
from paceline.kernels.parallel import Program, Team
from paceline.models.packed import HAS_DOT, PackedMatrix, pack, pack_dense, packs
from paceline.models.tensors import Kind

EPS = 1e-5
GUARD = 1e30
FAMILIES = (False, True) if HAS_DOT else (False,)  # `dot` of `pack`


@functools.cache
def packed(kind: Kind, num_rows: int, num_columns: int, dot: bool, seed: int = 0) -> PackedMatrix:
    blocks = scaled_blocks(kind, num_rows, num_columns, num_columns**-0.5, seed)
    with tempfile.TemporaryDirectory() as folder:
        return pack([raw_tensor(Path(folder) / "w", kind, blocks)], Arena(), dot=dot)


def multiply(
    matrix: PackedMatrix,
    x: torch.Tensor,
    team: Team,
    epilogue: int = STORE,
    gamma: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    step: int = 1,
) -> torch.Tensor:
    """One product in scratch of exactly the stated size, with a guard behind it."""
    num_rows = matrix.num_rows // (2 if epilogue == SWIGLU else 1)
    out = torch.full((len(x), num_rows), torch.nan) if out is None else out.clone()
    floats = matrix.scratch_floats(len(x))
    scratch = torch.zeros(team.num_threads * floats + 512)
    scratch[-512:] = GUARD
    phase = matrix.gemm.bind(
        *(matrix.codes, matrix.scales, 0 if gamma is None else gamma, EPS),
        *(matrix.num_rows, matrix.num_columns, epilogue),
        *(x, out, out.stride(0) * 4, len(x), scratch, floats * 4),
        num_tasks=num_rows // 16,
        step=step,
    )
    team.run(Program([phase]))
    assert bool((scratch[-512:] == GUARD).all()), "wrote beyond its scratch"
    return out


@dataclass(frozen=True)
class Exact:
    """A product in float64, and how far a kernel may be from it."""

    value: torch.Tensor
    allowed: torch.Tensor


def exact_product(matrix: PackedMatrix, x: torch.Tensor, gamma: torch.Tensor | None) -> Exact:
    x = x.double()
    if gamma is not None:
        x = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * gamma
    weights = matrix.dequantize().double()
    sizes = weights.abs()
    if matrix.format.bits == 4:  # w = d q + m cancels: both parts count
        offsets = matrix.scales[:, :, 1].double().abs().permute(0, 2, 1).reshape(matrix.num_rows, -1)
        sizes = sizes + 2 * offsets.repeat_interleave(32, dim=1)
    allowed = 4e-7 * (x.abs() @ sizes.T)
    if matrix.family == "dot":  # x in 16 bits
        lost = x.view(len(x), -1, matrix.format.block).abs().amax(2) / 65_000
        allowed += lost.repeat_interleave(matrix.format.block, dim=1) @ weights.abs().T
    return Exact(x @ weights.T, allowed)


def swiglu(exact: Exact) -> Exact:
    (gate, up), (gate_error, up_error) = exact.value.chunk(2, dim=1), exact.allowed.chunk(2, dim=1)
    silu = torch.nn.functional.silu(gate)
    value = silu * up  # the slope of silu is at most 1.1
    return Exact(value, 1.1 * up.abs() * gate_error + silu.abs() * up_error + 1e-6 * value.abs() + 1e-30)


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(QUANTIZED),
    dot=st.sampled_from(FAMILIES),
    epilogue=st.sampled_from((STORE, ADD, SWIGLU)),
)
def test_products_agree_with_float64(
    data: st.DataObject, teams: list[Team], kind: Kind, dot: bool, epilogue: int
) -> None:
    tiles = data.draw(st.integers(1, 7)) * (2 if epilogue == SWIGLU else 1)
    num_columns = max(32, block_len(kind)) * data.draw(st.integers(1, 3))
    matrix = packed(kind, tiles * 16, num_columns, dot)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(data.draw(st.integers(1, 20)), num_columns, generator=generator)
    gamma = torch.rand(num_columns, generator=generator) + 0.5 if data.draw(st.booleans()) else None
    residual = torch.randn(len(x), matrix.num_rows, generator=generator)

    team, step = data.draw(st.sampled_from(teams)), data.draw(st.integers(1, 5))
    out = multiply(matrix, x, team, epilogue, gamma, residual if epilogue == ADD else None, step)

    exact = exact_product(matrix, x, gamma)
    value, allowed = exact.value, exact.allowed
    if epilogue == ADD:
        value, allowed = value + residual, allowed + 1e-7 * (value + residual).abs()
    elif epilogue == SWIGLU:
        gated = swiglu(exact)
        value, allowed = gated.value, gated.allowed
    assert bool(((out - value).abs() <= allowed).all()), float(((out - value).abs() / allowed).max())


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dot", FAMILIES)
@pytest.mark.parametrize("epilogue", [STORE, ADD, SWIGLU])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    teams: list[Team], kind: Kind, dot: bool, epilogue: int
) -> None:
    matrix = packed(kind, 160, 512, dot)
    generator = torch.Generator().manual_seed(1)
    x, gamma = torch.randn(20, 512, generator=generator), torch.rand(512, generator=generator)
    start = torch.randn(20, matrix.num_rows // (2 if epilogue == SWIGLU else 1), generator=generator)
    alone = torch.cat(
        [multiply(matrix, x[i : i + 1], teams[0], epilogue, gamma, start[i : i + 1]) for i in range(20)]
    )
    for num_tokens in range(2, 21):
        team, step = teams[num_tokens % 3], 1 + num_tokens % 4
        begin = 20 - num_tokens  # so that tokens change their place in the batch, too
        out = multiply(matrix, x[begin:], team, epilogue, gamma, start[begin:], step)
        assert torch.equal(out, alone[begin:])


@pytest.mark.parametrize("dot", FAMILIES)
def test_swiglu_of_extreme_gates_is_finite(teams: list[Team], dot: bool) -> None:
    matrix = packed("Q8_0", 64, 64, dot)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1e4
    out = multiply(matrix, x, teams[1], SWIGLU)
    exact = exact_product(matrix, x, None)
    gate = exact.value.chunk(2, dim=1)[0]
    assert float(gate.min()) < -1000
    assert float(gate.max()) > 1000
    expected = swiglu(exact)
    assert bool(((out - expected.value).abs() <= expected.allowed).all())


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(QUANTIZED),
    dot=st.sampled_from(FAMILIES),
    tiles=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    num_blocks=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_packing_loses_nothing(kind: Kind, dot: bool, tiles: list[int], num_blocks: int, seed: int) -> None:
    columns = block_len(kind) * num_blocks
    parts = [random_blocks(kind, 16 * n, columns, seed + i) for i, n in enumerate(tiles)]
    with tempfile.TemporaryDirectory() as folder:
        tensors = [raw_tensor(Path(folder) / f"w{i}", kind, part) for i, part in enumerate(parts)]
        assert packs(tensors)
        matrix = pack(tensors, Arena(), dot=dot)
    expected = gguf.dequantize(np.concatenate(parts), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(matrix.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_weights_are_rounded_as_gguf_rounds_them(kind: Kind, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    as_type = gguf.GGMLQuantizationType[kind]
    expected = gguf.dequantize(gguf.quantize(weight.float().numpy(), as_type), as_type)
    np.testing.assert_array_equal(pack_dense(weight, kind, Arena()).dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dot", FAMILIES)
def test_rows_of_a_matrix_are_one_too(teams: list[Team], kind: Kind, dot: bool) -> None:
    whole = packed(kind, 64, 512, dot)
    part = whole.rows(48)
    assert torch.equal(part.dequantize(), whole.dequantize()[48:])
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(part, x, teams[1]), multiply(whole, x, teams[1])[:, 48:])


def test_what_cannot_be_packed_is_known_beforehand(tmp_path: Path) -> None:
    def tensor(kind: Kind, rows: int, columns: int) -> object:
        return raw_tensor(tmp_path / f"{kind}_{rows}", kind, random_blocks(kind, rows, columns))

    assert not packs([tensor("Q8_0", 24, 64)])  # rows that do not fill a vector
    assert not packs([tensor("F16", 16, 64)])  # a format without a kernel
    assert not packs([tensor("Q8_0", 16, 256), tensor("Q6_K", 16, 256)])  # two formats


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
@pytest.mark.parametrize("dot", FAMILIES)
def test_embedding_rows_are_the_dequantised_ones(teams: list[Team], kind: Kind, dot: bool) -> None:
    matrix = packed(kind, 208, 512, dot)
    assert matrix.format.embed is not None
    ids = torch.tensor([0, 207, 15, 16, 99, 99, 1])
    for team in teams:
        out = torch.full((len(ids), 512), torch.nan)
        phase = matrix.format.embed.bind(
            matrix.codes, matrix.scales, 512, ids, out, num_tasks=len(ids), step=2
        )
        team.run(Program([phase]))
        assert torch.equal(out, matrix.dequantize()[ids])
