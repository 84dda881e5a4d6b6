"""From a target to a trained head in a folder: the command `paceline train eagle3`.

Time is shared between making conversations and training. Everything is logged to the folder, so that a run
that was cut short can be continued with the same command.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.draft.checkpoint import Draft, export_draft
from paceline.draft.config import Eagle3Config
from paceline.draft.schema import D2T, canonical_name
from paceline.errors import ConfigError, ModelError, UnsupportedModelError
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.hub import resolve_model
from paceline.models.weights import Weights, load_weights
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.train.corpus import CorpusMaker, CorpusPlan
from paceline.train.generate import Conversations
from paceline.train.head import HeadShape, TrainableHead
from paceline.train.loop import Report, Trainer, TrainPlan
from paceline.train.scripts import Turn
from paceline.train.target import Target, default_capture_layers

logger = logging.getLogger(__name__)

_MIN_LAYERS = 7  # from here on the three layers that are read differ
_MAKING_SHARE = 0.25  # of the time goes into making conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that a run depends on, besides the target and the machine.

    Raises:
        ConfigError: a value is out of range.
    """

    minutes: float = 30.0
    draft_vocab_size: int = 8192
    intermediate_size: int | None = None  # None: the target's
    num_rows: int = 1024  # conversations made at a time, on CUDA
    short_len: int = 512
    long_len: int = 2048
    max_turn_tokens: int = 256
    batch_tokens: int = 32_768
    learning_rate: float = 1e-3
    max_updates: int | None = None
    held_out_share: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "minutes",
            "draft_vocab_size",
            "num_rows",
            "max_turn_tokens",
            "batch_tokens",
            "learning_rate",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("short_len", "long_len"):
            if getattr(self, name) < 64:
                raise ConfigError(f"{name} must be at least 64, got {getattr(self, name)}")


def train_eagle3(
    target_name: str,
    out: Path,
    recipe: Recipe,
    device: str,
    own_prompts: Sequence[str] = (),
    on_report: Callable[[Report], None] = lambda report: None,
) -> TrainableHead:
    """Make conversations with the target, train a head on them, and leave it in `out/head`.

    `out/conversations.npz` and `out/checkpoint.pt`, when there, are continued from; the head is written
    anew with every report.

    Raises:
        ConfigError: the device is missing or a setting out of range.
        ModelError: the target cannot be loaded, or has no chat template.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device on this machine")
    out.mkdir(parents=True, exist_ok=True)
    config, weights, tokenizer = _load_target(target_name, device)
    conversations = _conversations(
        out / "conversations.npz", config, weights, tokenizer, recipe, device, own_prompts
    )
    if device == "cuda":
        torch.cuda.empty_cache()
    train, held_out = split(conversations, recipe.held_out_share, recipe.seed)
    draft_ids, covered = frequent_ids(train, recipe.draft_vocab_size, config.vocab_size)
    logger.info(
        "%d conversations, %.1f M answer tokens; %d draft ids cover %.2f %% of them",
        len(train.kinds), train.num_answer_tokens / 1e6, len(draft_ids), 100 * covered,
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    shape = HeadShape(
        draft_vocab_size=len(draft_ids),
        intermediate_size=recipe.intermediate_size or config.intermediate_size,
    )
    head = TrainableHead(config, shape, torch.from_numpy(draft_ids)).to(device)
    target = Target(config, weights, default_capture_layers(config.num_layers), device)
    trainer = Trainer(head, target, train, held_out, out)
    train_plan = TrainPlan(
        seconds=recipe.minutes * 60 * (1 - _MAKING_SHARE),
        batch_tokens=recipe.batch_tokens,
        learning_rate=recipe.learning_rate,
        max_updates=recipe.max_updates,
        seed=recipe.seed,
    )
    (out / "recipe.json").write_text(json.dumps({"target": target_name, **asdict(recipe)}, indent=1))
    for report in trainer.run(train_plan):
        on_report(report)
        export_draft(to_draft(head, target.capture), out / "head", "sglang", overwrite=True)
    return head


def _load_target(name: str, device: str) -> tuple[ModelConfig, Weights, Tokenizer]:
    """A model that a head can be trained for."""
    path = resolve_model(name)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with open_checkpoint(path) as checkpoint:
        _check_target(checkpoint.config)
        weights = load_weights(checkpoint, dtype=dtype, device=device, packed=False)
    tokenizer = load_tokenizer(path)
    if not tokenizer.has_chat_template:
        raise ModelError(f"{name} has no chat template, which conversations are made with")
    return checkpoint.config, weights, tokenizer


def _conversations(
    saved: Path,
    config: ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    recipe: Recipe,
    device: str,
    own_prompts: Sequence[str],
) -> Conversations:
    """Those of an earlier run, or new ones, saved."""
    if saved.exists():
        logger.info("continuing with %s", saved)
        return load_conversations(saved)
    plan = CorpusPlan(
        seconds=recipe.minutes * 60 * _MAKING_SHARE,
        num_rows=recipe.num_rows,
        short_len=recipe.short_len,
        long_len=recipe.long_len,
        max_turn_tokens=recipe.max_turn_tokens,
    )
    conversations = CorpusMaker(config, weights, tokenizer, plan, device, recipe.seed, own_prompts).run()
    save_conversations(saved, conversations)
    return conversations


def _check_target(config: ModelConfig) -> None:
    """Refuse at once what would fail after minutes.

    Raises:
        UnsupportedModelError: a head for this target could not be written, or has too few layers to read.
    """
    if config.num_layers < _MIN_LAYERS:
        raise UnsupportedModelError(
            f"the target has {config.num_layers} layers; EAGLE-3 reads three of them and needs {_MIN_LAYERS}"
        )
    if config.rope.type == "factors":
        raise UnsupportedModelError(
            "the target's RoPE comes from rope_freqs.weight, which no draft format can express; "
            "train on the safetensors release of the same model"
        )


def to_draft_config(c: ModelConfig, shape: HeadShape, capture: Sequence[int]) -> Eagle3Config:
    """The configuration of a head of this shape. `capture`: layers before which features are read."""
    return Eagle3Config(
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        vocab_size=c.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        rope=c.rope,
        capture_layer_ids=tuple(layer - 1 for layer in capture),
    )


def to_draft(head: TrainableHead, capture: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Draft:
    """The head as a checkpoint, matrices and norms in `dtype`."""
    tensors = {canonical_name(n): t.detach().cpu() for n, t in head.state_dict().items()}
    held = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    return Draft(to_draft_config(head.config, head.shape, capture), held)


def from_draft(draft: Draft, config: ModelConfig, device: str) -> TrainableHead:
    """A checkpoint's head, to measure or to train on.

    Raises:
        UnsupportedModelError: it has an option that training does not have.
    """
    shape = HeadShape(
        draft_vocab_size=draft.config.draft_vocab_size,
        intermediate_size=draft.config.intermediate_size,
        num_features=len(draft.config.capture_layer_ids),
    )
    plain = to_draft_config(config, shape, [layer + 1 for layer in draft.config.capture_layer_ids])
    if draft.config != plain:
        raise UnsupportedModelError(
            "training supports plain EAGLE-3 heads only, and this one has other options"
        )
    draft_ids = draft.tensors[D2T] + torch.arange(plain.draft_vocab_size)
    head = TrainableHead(config, shape, draft_ids)
    names = {canonical_name(name): name for name in head.state_dict()}
    head.load_state_dict({names[name]: tensor for name, tensor in draft.tensors.items()})
    return head.to(device)


def split(conversations: Conversations, share: float, seed: int) -> tuple[Conversations, Conversations]:
    """(train, held out): a few rows of every kind are kept away from training."""
    rng = np.random.default_rng(seed)
    kinds = np.array(conversations.kinds)
    held = np.zeros(len(kinds), np.bool_)
    for kind in sorted(set(conversations.kinds)):
        rows = np.flatnonzero(kinds == kind)
        held[rng.permutation(rows)[: max(1, int(len(rows) * share))]] = True
    return _rows(conversations, ~held), _rows(conversations, held)


def _rows(c: Conversations, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Conversations:
    kinds = tuple(kind for kind, kept in zip(c.kinds, keep, strict=True) if kept)
    return Conversations(c.token_ids[keep], c.turns[keep], c.lengths[keep], kinds)


def frequent_ids(
    conversations: Conversations, count: int, vocab_size: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], float]:
    """The ids that answers use most, ascending, and the share of answer tokens that they are."""
    used = Counter(conversations.token_ids[conversations.turns == Turn.ANSWER].tolist())
    chosen = [token_id for token_id, _ in used.most_common(count)]
    spare = (i for i in range(vocab_size) if i not in used)
    chosen += [next(spare) for _ in range(min(count, vocab_size) - len(chosen))]
    covered = sum(used[i] for i in chosen) / max(1, used.total())
    return np.array(sorted(chosen), np.int64), covered


def save_conversations(path: Path, c: Conversations) -> None:
    """Write them uncompressed; whole or not at all."""
    new = path.with_name("conversations.tmp.npz")
    np.savez(new, token_ids=c.token_ids, turns=c.turns, lengths=c.lengths, kinds=np.array(c.kinds))
    new.replace(path)


def load_conversations(path: Path) -> Conversations:
    """What `save_conversations` wrote."""
    with np.load(path) as data:
        return Conversations(data["token_ids"], data["turns"], data["lengths"], tuple(data["kinds"].tolist()))
