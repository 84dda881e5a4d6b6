"""The packed head against `Eagle3Head` on the same values, over pages in no order and bfloat16 K/V in both.

What is left is the kernels' rounding of activations, far below bfloat16's, and now and then a key or value
that it pushes over to the next bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from draft_cases import ROPES, config, random_draft
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft import packed_head
from paceline.draft.build import TargetTables, build_head
from paceline.draft.checkpoint import Draft
from paceline.draft.config import Eagle3Config
from paceline.draft.eagle3 import DraftAttention, Eagle3Head
from paceline.draft.packed_head import PackedHead
from paceline.draft.packed_weights import PackedHeadWeights, misfit, pack_head
from paceline.draft.paged_head import PagedHead
from paceline.draft.protocol import Settled
from paceline.draft.schema import EMBEDDING, HEAD
from paceline.kernels.memory import Arena
from paceline.kernels.parallel import Phase, Program, Team
from paceline.models.batch import Batch
from paceline.models.packed import PackedMatrix, pack_dense
from paceline.models.rope import rope_tables
from paceline.models.tensors import Kind
from paceline.models.weights import Matrix, Weights
from paceline.worker.attention.cpu import CpuAttention

PAGE_SIZE, NUM_ROWS, MAX_LEN, DEPTH = 16, 4, 80, 4
VOCAB = 48
ROUNDING = 0.02  # logits have a standard deviation near 1


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """OpenMP's barriers cost more than tiny matrices do, above all on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def packable(**changes: Any) -> Eagle3Config:
    """A head of sizes that fill vectors."""
    sizes = {
        "hidden_size": 64,
        "target_hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": 32,
    }
    return config(**(sizes | changes))


@st.composite
def packables(draw: st.DrawFn) -> Eagle3Config:
    """Heads of every combination of the options that the kernels know."""
    head = draw(st.sampled_from(["own", "own", "target", "embedding"]))
    flags = ("norm_before_residual", "norm_output", "qkv_bias", "qk_norm")
    return packable(
        embedding=draw(st.sampled_from(["own", "target"])),
        head=head,
        draft_vocab_size=32 if head == "own" else VOCAB,
        rope=draw(st.sampled_from(ROPES)),
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        capture_layer_ids=draw(st.sampled_from([(1, 5, 8), (-1, 11)])),
        **{name: draw(st.booleans()) for name in flags},
    )


def packed_target(kind: Kind = "Q8_0") -> Weights:
    """A target of vocabulary alone: of it the head uses no more."""
    generator = torch.Generator().manual_seed(99)

    def table() -> Matrix:
        weight = torch.randn(VOCAB, 64, generator=generator) * 64**-0.5
        return Matrix(pack_dense(weight, kind, Arena()), None)

    return Weights(table(), (), torch.ones(64), table())


def reference(draft: Draft, weights: PackedHeadWeights, target: Weights) -> Eagle3Head:
    """The head with exactly the values that the kernels multiply by."""
    c, layer = draft.config, "midlayer."
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q, k, v = weights.qkv.dequantize().split([q_size, kv_size, kv_size])
    gate, up = weights.gate_up.dequantize().chunk(2)
    values = {
        "fc": weights.fc.dequantize(),
        f"{layer}self_attn.q_proj": q,
        f"{layer}self_attn.k_proj": k,
        f"{layer}self_attn.v_proj": v,
        f"{layer}self_attn.o_proj": weights.o.dequantize(),
        f"{layer}mlp.gate_proj": gate,
        f"{layer}mlp.up_proj": up,
        f"{layer}mlp.down_proj": weights.down.dequantize(),
    }
    tensors = dict(draft.tensors) | {f"{name}.weight": value for name, value in values.items()}
    if EMBEDDING in tensors:
        tensors[EMBEDDING] = weights.embedding.dequantize()
    if HEAD in tensors:
        tensors[HEAD] = weights.head.dequantize()
    return build_head(Draft(c, tensors), TargetTables.of(dense(target)))


def dense(target: Weights) -> Weights:
    def unpacked(matrix: Matrix) -> Matrix:
        assert matrix.packed is not None
        return Matrix(None, matrix.packed.dequantize())

    return Weights(unpacked(target.embedding), (), target.norm, unpacked(target.head))


class RoundedCache:
    """K and V by row and position, rounded to bfloat16; what nobody wrote shows."""

    def __init__(self, c: Eagle3Config) -> None:
        self.k = torch.full((NUM_ROWS, MAX_LEN + DEPTH, c.num_kv_heads, c.head_dim), 1e3)
        self.v = torch.full_like(self.k, 1e3)

    def write(self, rows: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[rows, positions], self.v[rows, positions] = k.bfloat16().float(), v.bfloat16().float()

    def of(self, rows: torch.Tensor) -> DraftAttention:
        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> torch.Tensor:
            self.write(rows, positions, k, v)
            visible = torch.arange(self.k.shape[1]) <= positions[:, None]
            keys, values = (x[rows].transpose(1, 2) for x in (self.k, self.v))
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q[:, :, None], keys, values, attn_mask=visible[:, None, None], enable_gqa=True
            )
            return mixed[:, :, 0]

        return attend


@dataclass(frozen=True)
class Piece:
    """What a row brings to a step."""

    row: int
    start: int
    q_len: int


class Pair:
    """A packed head and its reference, told and asked the same."""

    def __init__(
        self,
        c: Eagle3Config,
        team: Team,
        kind: Kind = "Q8_0",
        bulk_kind: Kind = "Q4_1",
        max_packed_tokens: int | None = None,
        dense: torch.dtype = torch.float32,
    ) -> None:
        draft, target = random_draft(c), packed_target()
        assert misfit(c, target) is None
        weights = pack_head(draft, target, kind=kind, bulk_kind=bulk_kind, dense=dense)
        pages_a_row = -(-(MAX_LEN + DEPTH) // PAGE_SIZE)
        order = torch.randperm(NUM_ROWS * pages_a_row, generator=torch.Generator().manual_seed(3)) + 1
        cache = CpuAttention(
            c, len(order) + 1, PAGE_SIZE, order.view(NUM_ROWS, pages_a_row).int(),
            rope_tables(c, MAX_LEN + DEPTH), [(weights.q_norm, weights.k_norm)], team,
        )  # fmt: skip
        self.head = PackedHead(c, weights, cache, team, NUM_ROWS, max_packed_tokens)
        self.plain, self.cache = reference(draft, weights, target), RoundedCache(c)
        self._config, self._generator = c, torch.Generator().manual_seed(7)

    def tokens(self, num: int) -> torch.Tensor:
        return torch.randint(VOCAB, (num,), generator=self._generator)

    def step_of_target(self, pieces: Sequence[Piece]) -> Settled:
        """A step of random tokens and features."""
        q_lens = np.array([p.q_len for p in pieces])
        ends = np.cumsum(q_lens)
        fields = (ends - q_lens, q_lens, [p.start for p in pieces], [p.row for p in pieces])
        positions = torch.cat([p.start + torch.arange(p.q_len) for p in pieces])
        num = int(ends[-1])
        return Settled(
            batch=Batch(self.tokens(num), positions, np.stack(fields, axis=1).astype(np.int64)),
            next_ids=self.tokens(num),
            features=3 * torch.randn(num, self._config.feature_size, generator=self._generator),
            rows=torch.tensor([p.row for p in pieces]),
            last=torch.from_numpy(ends - 1),
        )

    def settle(self, *pieces: Piece, bound: float = 1e-3) -> None:
        settled = self.step_of_target(pieces)
        before = self.head.h.clone()
        self.head.settle(settled)
        assert settled.features is not None
        expected = self.plain.fuse(settled.features)
        before[settled.rows] = expected[settled.last]
        torch.testing.assert_close(self.head.h, before, rtol=bound, atol=bound)
        rows = settled.rows.repeat_interleave(torch.from_numpy(settled.batch.segments[:, 1]))
        positions = settled.batch.positions
        self.cache.write(rows, positions, *self.plain.settle(settled.next_ids, expected, positions))

    def draft(self, rows: Sequence[int], lengths: Sequence[int], bound: float = ROUNDING) -> None:
        """A chain of DEPTH steps of both, each from what the packed one made before."""
        at, positions, token_ids = torch.tensor(rows), torch.tensor(lengths) - 1, self.tokens(len(rows))
        for step in range(DEPTH):
            h = (self.head._h_next if step else self.head.h)[at]
            expected = self.plain.step(token_ids, h, positions + step, self.cache.of(at))
            logits = self.head.step(at, token_ids, positions + step, MAX_LEN, step > 0)
            for ours, theirs in zip((logits, self.head._h_next[at]), expected, strict=True):
                error = (ours - theirs) / theirs.square().mean().sqrt()
                assert float(error.abs().max()) < bound
                assert float(error.square().mean().sqrt()) < bound / 5
            token_ids = self.head.vocabulary[logits.argmax(-1)]


@settings(max_examples=15, deadline=None)
@given(c=packables(), kind=st.sampled_from(("Q8_0", "Q4_1")), bulk_kind=st.sampled_from(("Q8_0", "Q4_0")))
def test_settling_and_chains_agree_with_the_plain_head(
    team: Team, c: Eagle3Config, kind: Kind, bulk_kind: Kind
) -> None:
    """Chunks of several rows, rejected drafts behind them, and chains that the next settling overwrites."""
    pair = Pair(c, team, kind, bulk_kind)
    pair.settle(Piece(2, 0, 37), Piece(0, 0, 3))
    pair.settle(Piece(1, 0, 1), Piece(2, 37, 20), Piece(0, 3, 1))
    pair.draft([1, 2, 0], [1, 57, 4])
    pair.settle(Piece(0, 4, 1 + DEPTH), Piece(2, 57, 1 + DEPTH), Piece(3, 0, 16), Piece(1, 1, 1))
    pair.draft([0, 3, 2], [6, 16, 58])  # two and one accepted of those
    pair.draft([2], [60])


def test_a_prepared_head_makes_no_program_while_it_runs(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(packable(qkv_bias=True, norm_output=True), team)
    pair.head.prepare(8)
    made: list[int] = []

    def make(phases: list[Phase]) -> Program:
        made.append(len(phases))
        return Program(phases)

    monkeypatch.setattr(packed_head, "Program", make)
    pair.settle(Piece(1, 0, 5), Piece(0, 0, 3))
    pair.draft([1, 0], [5, 3])
    pair.settle(Piece(1, 5, 1))
    pair.draft([1], [6])
    assert not made
    pair.settle(Piece(2, 0, 9))
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_steps_are_settled_by_the_dense_copies(team: Team, dtype: torch.dtype) -> None:
    pair = Pair(packable(qkv_bias=True, qk_norm=True), team, max_packed_tokens=8, dense=dtype)
    bound = 1e-3 if dtype == torch.float32 else 0.15
    pair.settle(Piece(1, 0, 40), Piece(0, 0, 9), bound=bound)
    pair.settle(Piece(0, 9, 1))
    pair.draft([0, 1], [10, 40], bound=max(bound, ROUNDING))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(team: Team, kind: Kind) -> None:
    c = packable(qkv_bias=True, qk_norm=True, norm_output=True)
    pieces = [Piece(3, 0, 19), Piece(0, 0, 1), Piece(2, 0, 33), Piece(1, 0, 6)]
    alone, together = Pair(c, team, kind), Pair(c, team, kind)
    step = together.step_of_target(pieces)
    assert step.features is not None
    together.head.settle(step)
    for begin, q_len, start, row in step.batch.segments.tolist():
        for i in range(q_len):
            at = slice(begin + i, begin + i + 1)
            batch = Batch(
                step.batch.token_ids[at], step.batch.positions[at], np.array([[0, 1, start + i, row]])
            )
            one = Settled(batch, step.next_ids[at], step.features[at], torch.tensor([row]), torch.tensor([0]))
            alone.head.settle(one)
    assert torch.equal(alone.head.h, together.head.h)

    rows, positions, token_ids = step.rows, step.batch.positions[step.last], together.tokens(len(pieces))
    for depth in range(DEPTH):
        logits = together.head.step(rows, token_ids, positions + depth, MAX_LEN, depth > 0).clone()
        for i in range(len(rows)):
            at = slice(i, i + 1)
            one_logits = alone.head.step(rows[at], token_ids[at], positions[at] + depth, MAX_LEN, depth > 0)
            assert torch.equal(one_logits, logits[at])
        assert torch.equal(alone.head._h_next, together.head._h_next)
        token_ids = together.head.vocabulary[logits.argmax(-1)]


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_first_rows_of_a_step_may_go_on(team: Team, norm_output: bool) -> None:
    """Deepest first: later steps are of fewer rows. Drafting anew begins where settling left off."""
    pair = Pair(packable(norm_output=norm_output), team)
    pair.settle(*(Piece(row, 0, 3 + row) for row in range(NUM_ROWS)))
    rows, positions = torch.arange(NUM_ROWS), torch.arange(NUM_ROWS) + 2
    token_ids = [pair.tokens(NUM_ROWS), pair.tokens(2)]

    def chain() -> list[torch.Tensor]:
        first = pair.head.step(rows, token_ids[0], positions, MAX_LEN, False).clone()
        return [first, pair.head.step(rows[:2], token_ids[1], positions[:2] + 1, MAX_LEN, True).clone()]

    free = chain()
    alone = pair.head.step(rows[:2], token_ids[0][:2], positions[:2], MAX_LEN, False).clone()
    assert torch.equal(alone, free[0][:2])
    assert torch.equal(pair.head.step(rows[:2], token_ids[1], positions[:2] + 1, MAX_LEN, True), free[1])
    assert all(torch.equal(a, b) for a, b in zip(chain(), free, strict=True))


def test_settling_keeps_what_it_was_given_until_it_is_done(team: Team) -> None:
    """It goes on beside the caller, who may drop or change everything but block tables meanwhile."""
    pieces = [Piece(0, 0, 60), Piece(2, 0, 40)]
    direct, dropped = Pair(packable(), team), Pair(packable(), team)
    for pair, waits in ((direct, True), (dropped, False)):
        settled = pair.step_of_target(pieces)
        copies = [x.clone() for x in (settled.next_ids, settled.features, settled.rows, settled.last)]
        pair.head.settle(Settled(settled.batch, *copies))
        if waits:
            pair.head.wait()
        del settled, copies
        rubbish = [torch.full((100, pair._config.feature_size), 1e9) for _ in range(4)]
        assert len(rubbish) == 4
    assert torch.equal(direct.head.h, dropped.head.h)


def test_what_the_drafter_must_know_of_the_head(team: Team) -> None:
    c = packable()
    head: PagedHead = Pair(c, team).head
    assert head.capture == (1, 5, 8)
    assert head.h.shape == (NUM_ROWS, 64)
    assert head.vocabulary.tolist() == random_draft(c).tensors["t2d"].nonzero()[:, 0].tolist()


def test_rounding_is_to_the_kinds_that_were_asked_for() -> None:
    draft = random_draft(packable(embedding="own"))

    def error(matrix: PackedMatrix, *names: str) -> float:
        exact = torch.cat([draft.tensors[name] for name in names])
        return float((matrix.dequantize() - exact).square().mean().sqrt() / exact.std())

    fine, coarse = (0.0, 0.01), (0.02, 0.12)
    for kinds, attention, bulk in (
        ({}, fine, coarse),
        ({"kind": "Q4_1", "bulk_kind": "Q8_0"}, coarse, fine),
    ):
        weights = pack_head(draft, packed_target(), **kinds)
        assert attention[0] < error(weights.fc, "fc.weight") < attention[1]
        assert attention[0] < error(weights.o, "midlayer.self_attn.o_proj.weight") < attention[1]
        assert bulk[0] < error(weights.down, "midlayer.mlp.down_proj.weight") < bulk[1]
        assert bulk[0] < error(weights.head, HEAD) < bulk[1]
        assert fine[0] < error(weights.embedding, EMBEDDING) < fine[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fc_bias": True}, "fc_bias"),
        ({"fc_norm": True}, "fc_norm"),
        ({"input_norm": True}, "input_norm"),
        ({"o_bias": True}, "o_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"intermediate_size": 100}, "sizes"),
        ({"draft_vocab_size": 24}, "sizes"),
    ],
)
def test_heads_that_the_kernels_do_not_run_are_named(changes: dict[str, Any], reason: str) -> None:
    found = misfit(packable(**changes), packed_target())
    assert found is not None
    assert reason in found


def test_a_target_whose_vocabulary_is_not_packed_shares_none() -> None:
    target = packed_target()
    shared = packable(head="target", draft_vocab_size=VOCAB)
    whole = {"embedding": "own", "head": "own"}
    assert "embedding" in str(misfit(packable(), dense(target)))
    assert "embedding" in str(misfit(packable(), packed_target("Q4_1")))  # a format without a look-up
    assert misfit(packable(**whole), dense(target)) is None
    half = Weights(target.embedding, (), target.norm, dense(target).head)
    assert "head" in str(misfit(shared, half))
    assert misfit(shared, target) is None
