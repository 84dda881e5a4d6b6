"""The attention kernel against float64, over drawn ragged steps, and what it leaves alone in the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.paged_attention import paged_attention, paged_write, scratch_floats
from paceline.kernels.parallel import Program, Team

EPS = 1e-6
MAX_LEN = 160


@dataclass(frozen=True)
class Case:
    """Sizes of a model and a step: `segments` holds (start, q_len) of each row."""

    segments: tuple[tuple[int, int], ...]
    page_size: int = 16
    head_dim: int = 64
    num_kv_heads: int = 2
    group: int = 3
    has_bias: bool = False
    has_norm: bool = False
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class Step:
    """The tensors of a case: random activations, a cache full of other people's values, scattered pages."""

    def __init__(self, case: Case) -> None:
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        c, dim, size = case, case.head_dim, case.page_size
        num_rows, pages_a_row = len(c.segments), -(-MAX_LEN // size)
        num_pages = num_rows * pages_a_row + 2
        order = torch.randperm(num_pages, generator=g)[: num_rows * pages_a_row]
        self.tables = order.view(num_rows, pages_a_row).int()
        self.k = torch.randn(num_pages, c.num_kv_heads, size // 16, dim, 16, generator=g).bfloat16()
        self.v = torch.randn(num_pages, c.num_kv_heads, size, dim, generator=g).bfloat16()
        num_tokens, width = sum(q_len for _, q_len in c.segments), (c.num_heads + 2 * c.num_kv_heads) * dim
        self.qkv = torch.randn(num_tokens, width, generator=g)
        self.bias = torch.randn(width, generator=g) if c.has_bias else None
        self.q_norm, self.k_norm = (
            (torch.rand(dim, generator=g) + 0.5 if c.has_norm else None) for _ in range(2)
        )
        angles = torch.arange(MAX_LEN)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()

    def run(
        self, team: Team, segments: list[list[int]], qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        c = self.case
        out = torch.full((len(qkv), c.num_heads * c.head_dim), torch.nan)
        scratch = torch.full((team.num_threads, scratch_floats(c.head_dim)), torch.nan)
        phase = paged_attention.bind(
            *(qkv, 0 if self.bias is None else self.bias, out, k, v, self.cos, self.sin),
            *(0 if norm is None else norm for norm in (self.q_norm, self.k_norm)),
            *(EPS, np.array(segments, np.int64), self.tables, self.tables.stride(0) * 4),
            *(c.page_size, c.num_heads, c.num_kv_heads, c.head_dim, scratch, scratch.stride(0) * 4),
            num_tasks=len(segments) * c.num_kv_heads,
        )
        team.run(Program([phase]))
        return out

    def segments(self) -> list[list[int]]:
        begins = np.cumsum([0, *(q_len for _, q_len in self.case.segments)]).tolist()
        return [[begins[row], q_len, start, row] for row, (start, q_len) in enumerate(self.case.segments)]

    def whole(self, team: Team) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All segments at once: the output and the caches after it."""
        k, v = self.k.clone(), self.v.clone()
        return self.run(team, self.segments(), self.qkv, k, v), k, v

    def write(self, team: Team) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches after K and V alone are written."""
        c, k, v = self.case, self.k.clone(), self.v.clone()
        at = c.num_heads * c.head_dim  # what stands before K
        kv = self.qkv[:, at:].contiguous()
        bias: torch.Tensor | int = 0 if self.bias is None else self.bias[at:].contiguous()
        scratch = torch.full((team.num_threads, scratch_floats(c.head_dim)), torch.nan)
        phase = paged_write.bind(
            *(kv, bias, k, v, self.cos, self.sin, 0 if self.k_norm is None else self.k_norm, EPS),
            *(np.array(self.segments(), np.int64), self.tables, self.tables.stride(0) * 4),
            *(c.page_size, c.num_kv_heads, c.head_dim, scratch, scratch.stride(0) * 4),
            num_tasks=len(c.segments) * c.num_kv_heads,
        )
        team.run(Program([phase]))
        return k, v

    def one_by_one(self, team: Team) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Every token in a step of its own."""
        k, v, out, token = self.k.clone(), self.v.clone(), [], 0
        for row, (start, q_len) in enumerate(self.case.segments):
            for j in range(q_len):
                qkv = self.qkv[token : token + 1].clone()
                out.append(self.run(team, [[0, 1, start + j, row]], qkv, k, v))
                token += 1
        return torch.cat(out), k, v

    def slots(
        self, cache_k: torch.Tensor, cache_v: torch.Tensor, row: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A row's K and V by position: [positions, kv_heads, D], in the caches' own dtype."""
        c, table = self.case, self.tables[row].long()
        k = cache_k[table].permute(0, 2, 4, 1, 3).reshape(-1, c.num_kv_heads, c.head_dim)
        return k, cache_v[table].transpose(1, 2).reshape(-1, c.num_kv_heads, c.head_dim)

    def projected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v [M, heads, D] in float64, with bias, norm and RoPE."""
        c = self.case
        x = self.qkv.double() + (0 if self.bias is None else self.bias.double())
        q, k, v = x.view(len(x), -1, c.head_dim).split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        positions = torch.cat([torch.arange(start, start + q_len) for start, q_len in c.segments])
        cos, sin = (table[positions].double()[:, None] for table in (self.cos, self.sin))

        def turn(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            if norm is not None:
                x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
            low, high = x.chunk(2, dim=-1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

        return turn(q, self.q_norm), turn(k, self.k_norm), v


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Plain causal attention in float64: q [n, heads, D] from position `start`, k and v [.., kv_heads, D]."""
    group, seen = q.shape[1] // k.shape[1], start + len(q)
    k, v = (x[:seen].double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.arange(seen)[None] > torch.arange(start, seen)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


segment_lists = st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), min_size=1, max_size=5)
cases = st.builds(
    Case,
    segments=segment_lists.map(tuple),
    page_size=st.sampled_from((16, 32, 64)),
    head_dim=st.sampled_from((32, 64, 96, 128)),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    has_bias=st.booleans(),
    has_norm=st.booleans(),
    seed=st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@given(case=cases, num_threads=st.integers(1, 3))
def test_agrees_with_float64(teams: list[Team], case: Case, num_threads: int) -> None:
    step = Step(case)
    out, k_cache, v_cache = step.whole(teams[num_threads - 1])
    q, k, v = step.projected()
    begin = 0
    for row, (start, q_len) in enumerate(case.segments):
        mine, written = slice(begin, begin + q_len), slice(start, start + q_len)
        k_row, v_row = step.slots(k_cache, v_cache, row)
        # K is rounded after RoPE in float32, so a value at a tie may round the other way: one part in 2^8.
        torch.testing.assert_close(k_row[written].double(), k[mine], rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(v_row[written].double(), v[mine], rtol=2**-8, atol=1e-6)
        expected = attention(q[mine], k_row, v_row, start)  # over what the cache holds, rounding included
        torch.testing.assert_close(out[mine].double(), expected, rtol=1e-5, atol=5e-6)
        begin += q_len


@settings(max_examples=25, deadline=None)
@given(case=cases)
def test_a_token_has_the_same_bits_alone_and_in_any_step(teams: list[Team], case: Case) -> None:
    step = Step(case)
    alone = step.one_by_one(teams[0])
    for team in teams[1:]:
        for got, expected in zip(step.whole(team), alone, strict=True):
            assert torch.equal(got, expected)


@settings(max_examples=25, deadline=None)
@given(case=cases)
def test_writes_its_own_positions_and_nothing_else(teams: list[Team], case: Case) -> None:
    step = Step(case)
    _, k_cache, v_cache = step.whole(teams[1])
    k_kept, v_kept = step.k.clone(), step.v.clone()
    for row, (start, q_len) in enumerate(case.segments):
        for position in range(start, start + q_len):
            page, slot = int(step.tables[row, position // case.page_size]), position % case.page_size
            k_kept[page, :, slot // 16, :, slot % 16] = k_cache[page, :, slot // 16, :, slot % 16]
            v_kept[page, :, slot] = v_cache[page, :, slot]
    assert torch.equal(k_cache, k_kept)
    assert torch.equal(v_cache, v_kept)


@settings(max_examples=25, deadline=None)
@given(case=cases, num_threads=st.integers(1, 3))
def test_writing_alone_leaves_the_same_bits(teams: list[Team], case: Case, num_threads: int) -> None:
    step = Step(case)
    _, k_cache, v_cache = step.whole(teams[0])
    k_written, v_written = step.write(teams[num_threads - 1])
    assert torch.equal(k_written, k_cache)
    assert torch.equal(v_written, v_cache)


def test_large_scores_do_not_overflow(teams: list[Team]) -> None:
    step = Step(replace(Case(((70, 9), (0, 1))), seed=5))
    step.qkv *= 100.0
    out, k_cache, v_cache = step.whole(teams[1])
    q, _, _ = step.projected()
    k_row, v_row = step.slots(k_cache, v_cache, 0)
    # Scores reach tens of thousands, so float32's rounding of one is worth a few percent of a weight.
    torch.testing.assert_close(out[:9].double(), attention(q[:9], k_row, v_row, 70), rtol=0.05, atol=1.0)


@pytest.mark.parametrize("start", [15, 16, 17, 31, 32])
def test_borders_of_blocks_and_pages(teams: list[Team], start: int) -> None:
    for q_len in (1, 2, 15, 16, 17):
        step = Step(Case(((start, q_len),), page_size=16, head_dim=32, num_kv_heads=1, group=1))
        out, k_cache, v_cache = step.whole(teams[0])
        expected = attention(step.projected()[0], *step.slots(k_cache, v_cache, 0), start)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=5e-6)
