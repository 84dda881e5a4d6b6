"""EAGLE-3 heads on disk: read from either format, checked as a whole; written to either.

In memory a draft is one record with one meaning for every option and one name for every tensor, so
that reading, running and writing need to know nothing of each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from paceline.draft import format_sglang, format_speculators
from paceline.draft.config import Eagle3Config, check_target
from paceline.draft.fields import Overrides
from paceline.draft.files import read_tensors
from paceline.draft.format_speculators import Verifier
from paceline.draft.schema import (
    D2T,
    EMBEDDING,
    LAYER,
    T2D,
    canonical_name,
    check_weights,
    weight_shapes,
)
from paceline.draft.vocabulary import resolve_vocabulary
from paceline.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from paceline.json_file import read_json
from paceline.models.config import ModelConfig
from paceline.models.hub import PICKLE, resolve_model
from paceline.models.safetensors_files import INDEX

Format = Literal["sglang", "speculators"]
FORMATS: tuple[Format, ...] = get_args(Format)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"

# Buffers that some trainers save; they are computed from the configuration.
_HARMLESS = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class Draft:
    """A head as a checkpoint holds it: complete and checked when made.

    `tensors`, on the CPU, are those of `schema.weight_shapes(config)` in the file's types and the
    vocabulary's map: `d2t` int64 [draft_vocab_size] of offsets and `t2d` bool [vocab_size], made
    where they may be left out. A trained module's state_dict will do.

    Raises:
        CheckpointError, UnsupportedModelError: see `check_weights` and `resolve_vocabulary`.
    """

    config: Eagle3Config
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        tensors = {name: tensor.detach().cpu() for name, tensor in self.tensors.items()}
        check_weights(self.config, tensors)
        d2t, t2d = resolve_vocabulary(
            tensors.get(D2T), tensors.get(T2D), self.config.draft_vocab_size, self.config.vocab_size
        )
        object.__setattr__(self, "tensors", {**tensors, D2T: d2t, T2D: t2d})


def open_draft(
    name: str,
    target: ModelConfig,
    *,
    target_name: str | None = None,
    revision: str | None = None,
    overrides: Overrides | None = None,
    progress: bool = True,
) -> Draft:
    """Read the head `name`, a folder or a Hugging Face id, for `target`.

    Args:
        target_name: what its user calls the target, for messages.

    Raises:
        ModelNotFoundError: nothing of this name, or no config.json in it.
        UnsupportedModelError: an option or type that Paceline does not run; named.
        CheckpointError: a tensor or file is missing, extra, misshapen or damaged; named.
        ModelError: a configuration field is missing or out of range, or it is another target's head.
    """
    path = resolve_model(name, revision, progress, allow_pickles=True)
    try:
        return _read_folder(path, target, target_name, overrides or Overrides())
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from None


def _read_folder(folder: Path, target: ModelConfig, target_name: str | None, overrides: Overrides) -> Draft:
    if not (folder / CONFIG).is_file():
        raise ModelNotFoundError(f"{folder}: no {CONFIG} there; a draft head is a folder that has one")
    raw = read_json(folder / CONFIG)
    read_config = _reader(raw)
    tensors, file_names = _canonical(read_tensors(folder))
    config = read_config(raw, tensors, target, overrides)
    check_target(config, target, target_name)
    check_weights(config, tensors, file_names)
    return Draft(config, tensors)


def _reader(raw: Mapping[str, Any]) -> Callable[..., Eagle3Config]:
    if format_speculators.MODEL_TYPE in raw:
        return format_speculators.read_config
    architectures = raw.get("architectures") or []
    if format_sglang.ARCHITECTURE in architectures:
        return format_sglang.read_config
    shown = ", ".join(map(str, architectures)) or "nothing"
    raise UnsupportedModelError(
        f"not an EAGLE-3 head: {CONFIG} names {shown}; supported: {format_sglang.ARCHITECTURE} "
        f"and speculators' eagle3"
    )


def _canonical(found: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors under canonical names, and what the file calls each."""
    tensors: dict[str, torch.Tensor] = {}
    file_names: dict[str, str] = {}
    for file_name, tensor in found.items():
        if file_name.endswith(_HARMLESS):
            continue
        name = canonical_name(file_name)
        if name in tensors:
            raise CheckpointError(f"tensors {file_names[name]} and {file_name} are two names of one")
        tensors[name], file_names[name] = tensor, file_name
    return tensors, file_names


def share_embedding(draft: Draft, table: torch.Tensor) -> Draft:
    """The draft without its embedding where that is only a copy of the target's, `table` [vocab, T].

    speculators stores one always, SGLang never uses one of the target's width.
    """
    config = draft.config
    if config.embedding != "own" or config.target_hidden_size != config.hidden_size:
        return draft
    own = draft.tensors[EMBEDDING]
    if not torch.equal(own, table.to(own.dtype)):
        return draft
    rest = {name: tensor for name, tensor in draft.tensors.items() if name != EMBEDDING}
    return Draft(replace(config, embedding="target"), rest)


def export_draft(
    draft: Draft,
    folder: Path,
    fmt: Format = "sglang",
    *,
    verifier: Verifier | None = None,
    overwrite: bool = False,
) -> None:
    """Write config.json and model.safetensors for the engines that read `fmt`.

    Args:
        folder: made if need be.
        verifier: the target, which speculators' format names.
        overwrite: replace a checkpoint that is there.

    Raises:
        UnsupportedModelError: the head has an option that the format cannot express; named.
        ModelError: a checkpoint is there already, or the folder cannot be written.
    """
    dtype = str(draft.tensors["fc.weight"].dtype).removeprefix("torch.")
    if fmt == "sglang":
        format_sglang.refuse(draft.config)
        config = format_sglang.write_config(draft.config, dtype)
    else:
        format_speculators.refuse(draft.config)
        config = format_speculators.write_config(draft.config, dtype, verifier or Verifier())
    tensors = _tensors_to_write(draft, fmt)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = [name for name in (CONFIG, WEIGHTS, INDEX, PICKLE) if (folder / name).exists()]
        if there and not overwrite:
            raise ModelError(f"{folder}: holds a checkpoint already ({there[0]})")
        # Whole files take each other's place: a run that is cut short leaves a head that can be read.
        save_file(tensors, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
        (folder / f"{CONFIG}.part").write_text(json.dumps(config, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            (folder / f"{name}.part").replace(folder / name)
        for name in (INDEX, PICKLE):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error.strerror or error}") from None


def _tensors_to_write(draft: Draft, fmt: Format) -> dict[str, torch.Tensor]:
    """Under the format's names. SpecForge has the map for every own head, speculators for a pruned one."""
    config = draft.config
    pruned = config.draft_vocab_size < config.vocab_size
    with_map = pruned or (fmt == "sglang" and config.head == "own")
    names = [*weight_shapes(config), *((D2T, T2D) if with_map else ())]
    prefix = format_sglang.LAYER_PREFIX if fmt == "sglang" else format_speculators.LAYER_PREFIX
    return {
        prefix + name.removeprefix(LAYER) if name.startswith(LAYER) else name: draft.tensors[
            name
        ].contiguous()
        for name in names
    }
