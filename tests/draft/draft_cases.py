"""Tiny heads of every kind, and EAGLE-3 written out by hand, one pair at a time, to compare with."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from paceline.draft.build import DenseTable, TargetTables, build_head
from paceline.draft.checkpoint import Draft
from paceline.draft.config import Eagle3Config
from paceline.draft.eagle3 import Eagle3Head
from paceline.draft.schema import weight_shapes
from paceline.models.config import ModelConfig
from paceline.models.rope import rope_frequencies
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Matrix

VOCAB = 40
NUM_TARGET_LAYERS = 12
ROPES = (
    RopeConfig(theta=10000.0),
    RopeConfig(theta=50000.0, type="linear", factor=2.0),
    RopeConfig(
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=32),
)
PLAIN: dict[str, Any] = {
    "hidden_size": 16,
    "target_hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "draft_vocab_size": 12,
    "max_position_embeddings": 128,
    "rope": ROPES[0],
    "capture_layer_ids": (1, 5, 8),
}
FLAGS = (
    "fc_bias",
    "fc_norm",
    "input_norm",
    "norm_before_residual",
    "norm_output",
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "qk_norm",
)


def config(**changes: Any) -> Eagle3Config:
    """The plain head with `changes`."""
    return Eagle3Config(**(PLAIN | changes))


@st.composite
def configs(draw: st.DrawFn) -> Eagle3Config:
    """Heads of every combination of options."""
    heads, kv_heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    width = draw(st.sampled_from([16, 24]))
    embedding = "own" if width != 16 else draw(st.sampled_from(["own", "target"]))
    head = draw(st.sampled_from(["own", "own", "embedding", *(["target"] if width == 16 else [])]))
    layers = st.lists(st.integers(-1, NUM_TARGET_LAYERS - 1), min_size=1, max_size=4, unique=True)
    return config(
        num_heads=heads,
        num_kv_heads=kv_heads,
        target_hidden_size=width,
        head_dim=draw(st.sampled_from([4, 6])),
        rope=draw(st.sampled_from(ROPES)),
        capture_layer_ids=tuple(sorted(draw(layers))),
        embedding=embedding,
        head=head,
        draft_vocab_size=draw(st.sampled_from([12, VOCAB])) if head == "own" else VOCAB,
        **{name: draw(st.booleans()) for name in FLAGS},
    )


def random_draft(config: Eagle3Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Draft:
    """Weights of sizes that keep activations near 1, and a random draft vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        is_norm = "norm" in name
        tensors[name] = (1 + 0.3 * noise if is_norm else noise * shape[-1] ** -0.5).to(dtype)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return Draft(config, tensors)


def target_of(config: Eagle3Config, **changes: Any) -> ModelConfig:
    """A target that the head fits."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.target_hidden_size,
        "intermediate_size": 32,
        "num_layers": NUM_TARGET_LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope": ROPES[0],
    }
    return ModelConfig(**(fields | changes))


def target_tables(config: Eagle3Config) -> tuple[torch.Tensor, torch.Tensor, TargetTables]:
    """The target's embedding and head [vocab, T], and both as a head takes them."""
    generator = torch.Generator().manual_seed(99)
    embedding, head = (
        torch.randn(config.vocab_size, config.target_hidden_size, generator=generator) for _ in range(2)
    )
    tables = TargetTables(DenseTable(Matrix(None, embedding)), DenseTable(Matrix(None, head)))
    return embedding, head, tables


def head_of(draft: Draft, dtype: torch.dtype = torch.float32) -> Eagle3Head:
    return build_head(draft, target_tables(draft.config)[2], dtype=dtype)


class ByHand:
    """One sequence, pair after pair, in float64, from the checkpoint's own tensors."""

    def __init__(self, draft: Draft) -> None:
        self.config = draft.config
        self.tensors = {name: t.double() if t.is_floating_point() else t for name, t in draft.tensors.items()}
        embedding, head, _ = target_tables(draft.config)
        self.embedding = self.tensors.get("embed_tokens.weight", embedding.double())
        own = self.tensors.get("lm_head.weight")
        self.head = {"own": own, "target": head.double(), "embedding": self.embedding}[draft.config.head]
        frequencies, factor = rope_frequencies(draft.config.rope, draft.config.head_dim)
        self.rope = (frequencies.double(), factor)
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.tensors[name + ".weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.tensors[name + ".weight"] @ x + self.tensors.get(name + ".bias", torch.zeros(()))

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Each (i, i + D/2) as one complex number."""
        frequencies, factor = self.rope
        turn = torch.polar(torch.full_like(frequencies, factor), position * frequencies)
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def fuse(self, feature: torch.Tensor) -> torch.Tensor:
        x = feature.double()
        if self.config.input_norm:
            x = self.norm(x, "input_norm")
        if self.config.fc_norm:
            parts = x.split(self.config.target_hidden_size)
            x = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)])
        return self.linear(x, "fc")

    def pair(self, token: int, h: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and the next h; leaves the pair's K and V behind."""
        c, layer = self.config, "midlayer."
        normed = self.norm(h, layer + "hidden_norm")
        residual = normed if c.norm_before_residual else h
        x = torch.cat((self.norm(self.embedding[token], layer + "input_layernorm"), normed))
        q, k, v = (self.linear(x, f"{layer}self_attn.{n}_proj").view(-1, c.head_dim) for n in "qkv")
        if c.qk_norm:
            q, k = self.norm(q, layer + "self_attn.q_norm"), self.norm(k, layer + "self_attn.k_norm")
        self.keys[position], self.values[position] = self.rotate(k, position), v
        residual = residual + self.linear(
            self.attend(self.rotate(q, position), position), layer + "self_attn.o_proj"
        )
        x = self.norm(residual, layer + "post_attention_layernorm")
        gate, up = self.linear(x, layer + "mlp.gate_proj"), self.linear(x, layer + "mlp.up_proj")
        residual = residual + self.linear(gate * gate.sigmoid() * up, layer + "mlp.down_proj")
        normed = self.norm(residual, "norm")
        assert self.head is not None
        return self.head @ normed, normed if c.norm_output else residual

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        group = self.config.num_heads // self.config.num_kv_heads
        mixed = []
        for i, query in enumerate(q):
            keys = torch.stack([self.keys[t][i // group] for t in range(position + 1)])
            values = torch.stack([self.values[t][i // group] for t in range(position + 1)])
            mixed.append((keys @ query * self.config.head_dim**-0.5).softmax(0) @ values)
        return torch.cat(mixed)


class PlainCache:
    """A `DraftAttention` that owns dense K and V: [rows, length, kv_heads, D]."""

    def __init__(self, config: Eagle3Config, num_rows: int, length: int) -> None:
        # Not zeros: reading what nobody wrote must show.
        self.k = torch.full((num_rows, length, config.num_kv_heads, config.head_dim), 1e3)
        self.v = torch.full_like(self.k, 1e3)

    def write(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [rows, n, kv_heads, D] at positions [n] of every row."""
        self.k[:, positions], self.v[:, positions] = k, v

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.arange(len(q))
        self.k[rows, positions], self.v[rows, positions] = k, v
        visible = torch.arange(self.k.shape[1]) <= positions[:, None]
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, None],
            self.k.transpose(1, 2),
            self.v.transpose(1, 2),
            attn_mask=visible[:, None, None],
            enable_gqa=True,
        )
        return mixed[:, :, 0]
