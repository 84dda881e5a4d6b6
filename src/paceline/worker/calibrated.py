"""What steps cost on this machine: known from an earlier start, or measured now.

Knows nothing of how a calibration is made (`calibration`) or what its file looks like (`calibration_cache`).
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline._version import __version__
from paceline.config import EngineConfig
from paceline.draft.load import NGRAM
from paceline.models.builtin import cache_dir
from paceline.models.hub import resolve_model
from paceline.policy import CostModel, PolicyError, TargetSample
from paceline.worker.build import ModelInfo
from paceline.worker.calibration import BUDGET_SECONDS, Limits, Samples, measure, plan_cells
from paceline.worker.calibration_cache import (
    Identity,
    RefusedError,
    Stored,
    identity_of_files,
    read,
    write,
)
from paceline.worker.tuning import processor
from paceline.worker.worker import ModelWorker

logger = logging.getLogger(__name__)

NOISY = 0.15  # spread above which a calibration is not to be relied on


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Costs, and where they come from."""

    costs: CostModel
    path: Path  # where they are stored
    measured_on: Mapping[str, str]
    seconds: float | None  # that measuring took; None: they were known
    spread: float | None  # of repeated timings of a step, relative; None: not known


def calibrate(
    worker: ModelWorker,
    info: ModelInfo,
    config: EngineConfig,
    deepest: int,
    *,
    progress: bool = False,
    force: bool = False,
    budget_seconds: float = BUDGET_SECONDS,
) -> Calibrated:
    """The costs of steps up to depth `deepest`; measured if they are not known, or with `force` in any case.

    Args:
        worker: idle, with a drafter; as `build_worker` made it from `config`, with `info`.

    Raises:
        ConfigError, ModelError: see `calibration.measure`.
        OSError: the model's files cannot be looked at.
    """
    limits = Limits(
        num_rows=config.max_num_seqs,
        num_tokens=config.max_num_batched_tokens,
        max_len=info.max_model_len,
        num_pages=info.num_pages,
        page_size=config.page_size,
        deepest=deepest,
        vocab_size=info.vocab_size,
    )
    identity = _identity(worker, info, config, limits)
    path = identity.path(cache_dir())
    measured_on = {**identity.settings, **identity.facts}
    known = None if force else _known(path, identity)
    if known is not None:
        return Calibrated(known.costs, path, measured_on, None, known.spread)
    logger.info("timing the model once, for at most %.0f s", budget_seconds)
    begun = time.perf_counter()
    samples = measure(worker, limits, budget_seconds=budget_seconds, progress=progress)
    costs = fit_costs(samples)
    seconds = time.perf_counter() - begun
    if samples.spread > NOISY:
        logger.warning(
            "timings of the same step differ by %.0f %% (up to %.0f %% is usual): something else runs here; "
            "the costs are corrected while serving, or measured again by paceline calibrate --force",
            100 * samples.spread,
            100 * NOISY,
        )
    try:
        write(path, identity, costs, samples.spread)
        logger.info("timed %d kinds of steps in %.1f s, kept in %s", len(samples.target), seconds, path)
    except OSError as error:
        reason = error.strerror or error
        logger.warning("cannot write %s, so the model is timed again at the next start: %s", path, reason)
    return Calibrated(costs, path, measured_on, seconds, samples.spread)


def fit_costs(samples: Samples) -> CostModel:
    """The cost model of these samples, also of noisy ones.

    Where noise is larger than what rows and contexts add to a step, fitting these to it can leave less than
    nothing for the tokens. Then they count as nothing: a sample for each number of tokens says it all.
    """
    try:
        return CostModel.fit(samples.target, samples.drafts)
    except PolicyError:
        logger.warning("the machine is busy: what rows and contexts cost cannot be told from noise")
    by_tokens: dict[int, list[TargetSample]] = {}
    for sample in samples.target:
        if not sample.num_prompt_tokens:
            by_tokens.setdefault(sample.num_tokens, []).append(sample)
    middle = [
        sorted(group, key=lambda sample: sample.seconds)[(len(group) - 1) // 2]
        for group in by_tokens.values()
    ]
    prompts = [sample for sample in samples.target if sample.num_prompt_tokens]
    return CostModel.fit(middle + prompts, samples.drafts)


def _known(path: Path, identity: Identity) -> Stored | None:
    try:
        return read(path, identity)
    except RefusedError as refusal:
        logger.warning("the model is timed again: %s", refusal)
        return None


def _identity(worker: ModelWorker, info: ModelInfo, config: EngineConfig, limits: Limits) -> Identity:
    on_cpu = worker.device.type == "cpu"
    cells = plan_cells(limits)
    settings = {
        # The server has replaced a built-in's name by its path: one calibration for both.
        "model": str(resolve_model(config.model, config.revision, progress=False)),
        "draft": info.draft,
        "device": config.device,
        "threads": str(torch.get_num_threads()),
        "precision": config.precision,
        "reproducible": str(config.reproducible).lower(),
        "page_size": str(config.page_size),
        "largest_step": str(max(cell.size for cell in cells)),
        "most_rows": str(max(cell.num_rows for cell in cells)),
        "longest_context": str(max(cell.context_len for cell in cells)),
        "deepest_draft": str(limits.deepest),
    }
    if info.draft == NGRAM:
        settings["ngram"] = f"{config.ngram_min} to {config.ngram_max}"
    model = resolve_model(config.model, config.revision, progress=False)
    facts = {
        "version": __version__,
        "torch": torch.__version__,
        "numba": importlib.metadata.version("numba"),
        "processor": processor() if on_cpu else torch.cuda.get_device_name(worker.device),
        "model_files": identity_of_files(model),
    }
    if info.draft != NGRAM:
        head = resolve_model(info.draft, config.draft_revision, progress=False, allow_pickles=True)
        facts["draft_files"] = identity_of_files(head)
    return Identity(settings=settings, facts=facts)
