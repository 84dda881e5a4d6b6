"""From settings to a worker: model files, arithmetic, K/V cache and rows."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from paceline.config import EngineConfig, available_cores
from paceline.draft.checkpoint import Draft, open_draft
from paceline.draft.load import NGRAM, NONE, resolve_draft
from paceline.draft.ngram import NgramDrafter
from paceline.draft.protocol import Drafter
from paceline.errors import ConfigError, ModelError
from paceline.kernels.parallel import Team
from paceline.models.batch import Attention, Batch
from paceline.models.builtin import cache_dir
from paceline.models.checkpoint import Checkpoint, open_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, captured
from paceline.models.hub import resolve_model
from paceline.models.program import PackedDecoder
from paceline.models.rope import rope_tables
from paceline.models.weights import Weights, can_pack, load_weights
from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.tokenizer import load_tokenizer
from paceline.worker.attention import cpu
from paceline.worker.attention.torch_paged import TorchAttention
from paceline.worker.drafter import Beside, eagle3_drafter
from paceline.worker.grammar import GrammarCompiler, GrammarRows
from paceline.worker.onednn import bound_caches
from paceline.worker.rows import RowState
from paceline.worker.sampling import SamplerState
from paceline.worker.sampling_team import SamplingTeam
from paceline.worker.tuning import max_packed_tokens
from paceline.worker.worker import Model, ModelWorker

logger = logging.getLogger(__name__)

_CPU_KV_TOKENS = 24_576
_NUM_PREPARED = 64  # tokens of a step: more are prompts, beside which making a program is nothing
_GPU_KV_SHARE = 0.8  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the scheduler must know of the model and its cache. Page 0 is the trash page."""

    max_model_len: int
    num_pages: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_depth: int = 0  # drafts of a row in a step, at most; 0: there is no drafter
    draft: str = NONE  # the drafter, as `resolve_draft` names it


class EagerModel:
    """A `Decoder` with its attention, as the worker drives it."""

    def __init__(self, decoder: Decoder, attention: Attention, capture: tuple[int, ...] = ()) -> None:
        self._decoder, self._attention, self._capture = decoder, attention, capture
        self._features: torch.Tensor | None = None

    @property
    def features(self) -> torch.Tensor | None:
        """See `Model`."""
        return self._features

    def forward(self, batch: Batch) -> torch.Tensor:
        """See `Model`."""
        h, self._features = captured(self._decoder, batch, self._attention, self._capture)
        return h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        return self._decoder.logits(h)


def build_worker(config: EngineConfig, progress: bool = False) -> tuple[ModelWorker, ModelInfo]:
    """Load the model and make a worker, warmed up.

    Raises:
        ModelError: the model cannot be found, read or run.
        ConfigError: a setting does not fit the model or the machine; named.
    """
    device = _device(config)
    num_threads = config.threads or available_cores()
    torch.set_num_threads(num_threads)
    bound_caches()
    path = resolve_model(config.model, config.revision, progress=progress)
    name = resolve_draft(config.draft, config.model, config.draft_revision)
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        model = checkpoint.config
        model.context_length(config.max_model_len)  # refused now, not after loading
        draft = None
        if name not in (NONE, NGRAM):
            draft = open_draft(
                name, model, revision=config.draft_revision, progress=progress, target_name=config.model
            )
        dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
        packed = _packed(config, checkpoint)
        if config.reproducible:
            _check_reproducible(config, model)
        weights = _load(checkpoint, packed, dtype, config, progress)
    _return_freed_memory()
    _log_loaded(path, weights, packed, dtype, time.perf_counter() - started)
    info = _sizes(config, model, draft, device, dtype)
    info = replace(info, draft=name, max_depth=0 if name == NONE else config.max_depth)
    rows = RowState(config.max_num_seqs, info.max_model_len, config.page_size, device)
    team = _team(config, model, device, dtype, num_threads)
    target = _Target(config, model, weights, info, rows, dtype, packed, team)
    decoder, drafter = _pair(target, draft, name)
    together = SamplingTeam(team, info.vocab_size) if packed and team is not None else None
    sampler = SamplerState(config.max_num_seqs, info.vocab_size, info.eos_token_ids, device, together)
    compiler = GrammarCompiler(lambda: load_tokenizer(path), info.vocab_size, info.eos_token_ids)
    grammars = GrammarRows(compiler, info.eos_token_ids)
    worker = ModelWorker(decoder, rows, sampler, grammars, drafter, trims=device.type == "cpu")
    _warm_up(worker, info)
    return worker, info


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device on this machine")
    return torch.device(config.device)


def _packed(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Whether the layers run on the packed kernels."""
    if config.precision not in ("auto", "packed"):
        return False
    obstacle = _obstacle_to_packing(config, checkpoint)
    if obstacle is not None and config.precision == "packed":
        raise ConfigError(f"precision packed {obstacle}")
    return obstacle is None


def _obstacle_to_packing(config: EngineConfig, checkpoint: Checkpoint) -> str | None:
    if config.device != "cpu":
        return "needs device cpu"
    if not can_pack(checkpoint):
        return (
            "needs a GGUF model whose layers are all of 4-, 6- or 8-bit types, one for q, k and v and one "
            "for gate and up, without biases but those of q, k and v"
        )
    if not cpu.fits(checkpoint.config, config.page_size):
        return _misfit(config, checkpoint.config)
    return None


def _misfit(config: EngineConfig, model: ModelConfig) -> str:
    return (
        f"needs a head_dim that is a multiple of 32 and a page_size that is one of 16, "
        f"got {model.head_dim} and {config.page_size}"
    )


def _check_reproducible(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse what sums in an order that depends on the batch: float32 products and torch's attention."""
    if config.device != "cpu":
        raise ConfigError("reproducible needs device cpu")
    if config.precision == "fp32":
        raise ConfigError(
            "reproducible needs precision packed or bf16: the order of fp32's sums is not pinned"
        )
    if not cpu.fits(model, config.page_size):
        raise ConfigError(f"reproducible {_misfit(config, model)}")


def _load(
    checkpoint: Checkpoint, packed: bool, dtype: torch.dtype, config: EngineConfig, progress: bool
) -> Weights:
    with tqdm(
        total=len(checkpoint.tensors), desc="loading", unit="tensor", disable=not progress, leave=False
    ) as bar:
        return load_weights(
            checkpoint,
            dtype=dtype,
            device=config.device,
            packed=packed,
            on_tensors=lambda n: bar.update(n) and None,
        )


def _return_freed_memory() -> None:
    """Hand the buffers that loading went through back to the system; glibc would keep them."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _log_loaded(path: Path, weights: Weights, packed: bool, dtype: torch.dtype, seconds: float) -> None:
    held = "packed" if packed else str(dtype).removeprefix("torch.")
    logger.info("loaded %s as %s in %.1f s", path.name, held, seconds)
    for loss in weights.losses:
        logger.info(
            "%d matrices of type %s are %sheld as %s: relative rms error %.1e",
            loss.num_tensors, loss.kind, "also " if packed else "", loss.held_as, loss.rms_error,
        )  # fmt: skip


def _sizes(
    config: EngineConfig, model: ModelConfig, draft: Draft | None, device: torch.device, dtype: torch.dtype
) -> ModelInfo:
    kv_tokens = config.kv_cache_tokens or _default_kv_tokens(config, model, draft, device, dtype)
    num_pages = -(-kv_tokens // config.page_size)
    capacity = num_pages * config.page_size
    length, asked = model.context_length(config.max_model_len), config.max_model_len
    if asked is not None and asked > capacity:
        raise ConfigError(f"max_model_len {asked} needs kv_cache_tokens of at least as many, got {kv_tokens}")
    return ModelInfo(min(length, capacity), num_pages + 1, model.eos_token_ids, model.vocab_size)


def _default_kv_tokens(
    config: EngineConfig, model: ModelConfig, draft: Draft | None, device: torch.device, dtype: torch.dtype
) -> int:
    if device.type == "cpu":
        return _CPU_KV_TOKENS
    width = model.num_layers * model.num_kv_heads * model.head_dim
    if draft is not None:
        width += draft.config.num_kv_heads * draft.config.head_dim
    free, _ = torch.cuda.mem_get_info(device)
    wanted = config.max_num_seqs * model.max_position_embeddings
    return max(config.page_size, min(wanted, int(free * _GPU_KV_SHARE) // (2 * width * dtype.itemsize)))


@dataclass(frozen=True, slots=True)
class _Target:
    """A loaded model and what runs beside it must fit."""

    config: EngineConfig
    model: ModelConfig
    weights: Weights
    info: ModelInfo
    rows: RowState
    dtype: torch.dtype
    packed: bool  # its layers run on the packed kernels
    team: Team | None  # the threads of its kernels; None: it has none


def _team(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, num_threads: int
) -> Team | None:
    on_kernels = device.type == "cpu" and dtype != torch.float32 and cpu.fits(model, config.page_size)
    return Team(num_threads) if on_kernels else None


def _pair(target: _Target, draft: Draft | None, name: str) -> tuple[Model, Drafter | None]:
    """The model as the worker drives it, and its drafter."""
    config, rows, team = target.config, target.rows, target.team
    capture = () if draft is None else draft.config.capture_layer_ids
    limit = None
    if target.packed and team is not None and not config.reproducible:
        limit = max_packed_tokens(target.weights.layers[0], team, cache_dir() / "packed_tokens.json")
    decoder = _decoder(target, capture, limit)
    if name == NGRAM:
        return decoder, NgramDrafter(rows.token_ids, config.ngram_min, config.ngram_max)
    if draft is None:
        return decoder, None
    beside = Beside(
        weights=target.weights,
        rows=rows,
        num_pages=target.info.num_pages,
        page_size=config.page_size,
        max_len=target.info.max_model_len,
        dtype=target.dtype,
        team=team if target.packed else None,
        max_packed_tokens=limit,
        num_prepared=_num_prepared(config, limit),
    )
    return decoder, eagle3_drafter(draft, beside, config.max_depth)


def _decoder(target: _Target, capture: tuple[int, ...], limit: int | None) -> Model:
    model, weights, rows, info, team = target.model, target.weights, target.rows, target.info, target.team
    cos, sin = (table.to(rows.tables.device).contiguous() for table in rope_tables(model, info.max_model_len))
    norms = [(layer.q_norm, layer.k_norm) for layer in weights.layers]
    pages = (info.num_pages, target.config.page_size, rows.tables)
    if team is None:
        attention = TorchAttention(model, *pages, (cos, sin), norms, target.dtype)
        return EagerModel(Decoder(model, weights), attention, capture)
    on_kernels = cpu.CpuAttention(model, *pages, (cos, sin), norms, team)
    if not target.packed:
        return EagerModel(Decoder(model, weights), on_kernels, capture)
    decoder = PackedDecoder(model, weights, on_kernels, team, limit, capture)
    decoder.prepare(_num_prepared(target.config, limit))
    return decoder


def _num_prepared(config: EngineConfig, limit: int | None) -> int:
    """Steps of up to so many tokens find their programs made."""
    return min(_NUM_PREPARED, config.max_num_batched_tokens, _NUM_PREPARED if limit is None else limit)


def _warm_up(worker: ModelWorker, info: ModelInfo) -> None:
    """Compile kernels and touch every path's code before the first request, in a row without pages: all it
    writes goes to the trash page.

    Raises:
        ModelError: the drafter does not run.
    """
    params = SamplingParams(temperature=1.0, seed=0)
    start = RowStart(0, (0,), 1, 0, (), params, 0, info.max_model_len)
    worker.launch(Plan(-2, (), (start,), (RowStep(0, 1, samples=True),))).result()
    depth = min(2, info.max_depth, info.max_model_len - 3)
    if depth > 0:
        drafted = worker.launch(Plan(-1, (), (), (RowStep(0, 1, samples=True, depth=depth),))).result()
        if drafted.drafter_error is not None:
            raise ModelError(f"draft {info.draft} does not run: {drafted.drafter_error}")
    worker.launch(Plan(0, (0,), (), ()))
