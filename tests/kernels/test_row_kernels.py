"""Row kernels against float64, in memory with guards around it."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.parallel import Phase, Program, Team
from paceline.kernels.rows import copy_rows, move_rows, norm_rows, pair_rows, segment_rows

EPS, GUARD = 1e-5, 1e30
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return (x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * gamma).float()


def run_all(teams: list[Team], phase: Phase) -> None:
    for team in teams:
        team.run(Program([phase]))


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_copies_go_side_by_side(teams: list[Team], num_rows: int) -> None:
    parts = [noise(num_rows, 48, seed=i) for i in range(3)]
    out = torch.full((num_rows + 1, 3 * 48 + 16), GUARD)
    for i, part in enumerate(parts):
        columns = out[:, i * 48 :]
        run_all(
            teams,
            copy_rows.bind(part, 48 * 4, columns, out.stride(0) * 4, 48 * 4, num_tasks=num_rows, step=2),
        )
    assert torch.equal(out[:-1, :-16], torch.cat(parts, dim=1))
    assert (out[-1] == GUARD).all()
    assert (out[:, -16:] == GUARD).all()


def test_rows_are_moved_by_index(teams: list[Team]) -> None:
    source, sources, outs = noise(9, 48), torch.tensor([8, 0, 3]), torch.tensor([1, 5, 0])
    for taken, placed in ((sources, outs), (None, outs), (sources, None)):
        out = torch.full((7, 48), GUARD)
        at_from, at_to = (0 if index is None else index for index in (taken, placed))
        run_all(teams, move_rows.bind(source, at_from, out, at_to, 48 * 4, num_tasks=3, step=2))
        expected = torch.full_like(out, GUARD)
        expected[outs if placed is not None else slice(3)] = source[
            sources if taken is not None else slice(3)
        ]
        assert torch.equal(out, expected)


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_norms(teams: list[Team], num_rows: int) -> None:
    x, gamma = 3 * noise(num_rows, 96), noise(96, seed=1)
    out = torch.full((num_rows + 1, 96), GUARD)
    run_all(teams, norm_rows.bind(x, gamma, EPS, 96, out, num_tasks=num_rows))
    torch.testing.assert_close(out[:-1], normed(x, gamma), **CLOSE)
    assert (out[-1] == GUARD).all()


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("kept", ["nothing", "second", "normed"])
def test_pairs(teams: list[Team], num_rows: int, kept: str) -> None:
    first, second = noise(num_rows, 64), 5 * noise(num_rows, 64, seed=1)
    gammas = noise(64, seed=2), noise(64, seed=3)
    out = torch.full((num_rows + 1, 128), GUARD)
    stream = torch.full((num_rows + 1, 64), GUARD)
    to = 0 if kept == "nothing" else stream
    run_all(
        teams,
        pair_rows.bind(
            first, second, *gammas, EPS, 64, out, to, int(kept == "normed"), num_tasks=num_rows, step=3
        ),
    )
    expected = torch.cat((normed(first, gammas[0]), normed(second, gammas[1])), dim=1)
    torch.testing.assert_close(out[:-1], expected, **CLOSE)
    expected_stream = {
        "nothing": torch.full_like(second, GUARD),
        "second": second,
        "normed": out[:-1, 64:],
    }[kept]
    assert torch.equal(stream[:-1], expected_stream)
    assert (out[-1] == GUARD).all()
    assert (stream[-1] == GUARD).all()


def test_segments_of_one_token_each(teams: list[Team]) -> None:
    rows, positions = torch.tensor([4, 0, 7]), torch.tensor([9, 80, 1])
    segments = torch.full((4, 4), -1)
    run_all(teams, segment_rows.bind(rows, positions, segments, num_tasks=3))
    assert segments.tolist() == [[0, 1, 9, 4], [1, 1, 80, 0], [2, 1, 1, 7], [-1] * 4]
