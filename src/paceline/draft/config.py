"""What an EAGLE-3 head is: one frozen record for every option of every checkpoint format.

Each option has one meaning here, whatever the format that it came from calls it. Does not know
configuration files (`format_sglang`, `format_speculators`) or tensor names (`schema`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.errors import ModelError, UnsupportedModelError
from paceline.models.config import ModelConfig
from paceline.models.rope_config import RopeConfig

EmbeddingSource = Literal["own", "target"]
HeadSource = Literal["own", "target", "embedding"]

EMBEDDINGS = -1  # as a capture layer id

_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """One transformer layer that reads a token and the target's features and predicts the next token.

    `capture_layer_ids`: the features of a position are the target's residual stream after these
    layers, 0-based and in this order. After layer i is the same as the input of layer i + 1; after
    the last layer is the stream before the final norm; -1 is the embeddings. Formats count
    differently, and only their readers and writers know how.

    The order of the forward pass, with the options where they act:

        f = features                                     [k T]  k captured layers, T target_hidden_size
        f = rms(f)                   if input_norm       one norm over all k T
        f = rms of each T            if fc_norm          k norms
        h = fc f (+ bias             if fc_bias)         [H]
        x = rms(embed token) ; rms(h)                    [2 H]
        r = rms(h)                   if norm_before_residual, else h
        q, k, v = W x (+ bias        if qkv_bias; rms of each head of q and k if qk_norm), RoPE on q, k
        r = r + o(attention) (+ bias if o_bias)
        r = r + mlp(rms(r)) (biases  if mlp_bias)
        logits = head(rms(r));  the next draft step reads h = rms(r) if norm_output, else r

    Raises:
        ModelError: sizes that contradict each other or are out of range; named.
        UnsupportedModelError: a combination that no engine gives a meaning to; named.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int  # rows of the head; vocab_size where nothing is pruned
    max_position_embeddings: int
    rope: RopeConfig
    capture_layer_ids: tuple[int, ...]
    embedding: EmbeddingSource = "target"
    head: HeadSource = "own"  # embedding: the table that `embedding` names, used as the head
    fc_bias: bool = False
    fc_norm: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(f"{name} must be a whole number above 0, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not self.rms_norm_eps > 0:
            raise ModelError(f"rms_norm_eps must be above 0, got {self.rms_norm_eps!r}")
        self._check_capture_layers()
        self._check_vocabulary()

    def _check_capture_layers(self) -> None:
        ids = self.capture_layer_ids
        if not ids or ids[0] < EMBEDDINGS:
            raise ModelError(f"capture_layer_ids must name layers from {EMBEDDINGS} on, got {list(ids)}")
        # Engines collect features in the layers' order, trainers in the list's: only one order is safe.
        if any(a >= b for a, b in pairwise(ids)):
            raise UnsupportedModelError(f"capture_layer_ids must increase, got {list(ids)}")

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ModelError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.head != "own" and self.draft_vocab_size != self.vocab_size:
            raise ModelError(
                f"draft_vocab_size is {self.draft_vocab_size}, but a head taken from the "
                f"{self.head} has {self.vocab_size} rows"
            )
        shared = [name for name in ("embedding", "head") if getattr(self, name) == "target"]
        if shared and self.target_hidden_size != self.hidden_size:
            raise ModelError(
                f"the target's {shared[0]} has {self.target_hidden_size} columns and cannot be shared with "
                f"hidden_size {self.hidden_size}: the draft needs its own"
            )

    @property
    def feature_size(self) -> int:
        """k T: width of the captured features of one position."""
        return len(self.capture_layer_ids) * self.target_hidden_size


def check_target(config: Eagle3Config, target: ModelConfig, target_name: str | None = None) -> None:
    """Check that the head was made for a target of this shape.

    Args:
        target_name: what its user calls the target, for messages.

    Raises:
        ModelError: another target's vocabulary, hidden size or number of layers; named.
    """
    another = "made for another target" + ("" if target_name is None else f" than {target_name}")
    if config.vocab_size != target.vocab_size:
        raise ModelError(f"{another}: vocab_size is {config.vocab_size}, the target's {target.vocab_size}")
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"{another}: target_hidden_size is {config.target_hidden_size}, "
            f"the target's hidden_size {target.hidden_size}"
        )
    last = config.capture_layer_ids[-1]
    if last >= target.num_layers:
        raise ModelError(
            f"{another}: features are read after layer {last} (0-based), "
            f"the target has {target.num_layers} layers"
        )
