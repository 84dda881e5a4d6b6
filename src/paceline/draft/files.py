"""A draft head's tensors from a folder: safetensors, one file or many, or `pytorch_model.bin`.

Heads are small, so whole tensors are read at once, under the names that the file has. Does not know
which tensors a head needs.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import CheckpointError
from paceline.models.hub import PICKLE
from paceline.models.safetensors_files import INDEX, list_files


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the folder's checkpoint, on the CPU, in its own type.

    Raises:
        CheckpointError: no weights, or a file that is missing, damaged, or holds more than tensors.
        UnsupportedModelError: pickled weights in several files.
    """
    has_safetensors = (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))
    if not has_safetensors and (folder / PICKLE).is_file():
        return _read_pickle(folder / PICKLE)
    files, index = list_files(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in files:
        found = _read_safetensors(folder / name)
        misplaced = [key for key in found if index and index.get(key) != name]
        if misplaced:
            raise CheckpointError(f"{folder / name}: tensor {misplaced[0]} is not where {INDEX} says")
        tensors |= found
    lost = [key for key in index if key not in tensors]
    if lost:
        raise CheckpointError(f"{folder / index[lost[0]]}: tensor {lost[0]} is missing, {INDEX} lists it")
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from None
    return tensors


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Through torch's reader that builds tensors and runs nothing."""
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(f"{path}: damaged, or holds more than tensors, which is not read") from None
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: truncated or not a torch file ({first_line})") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: must hold tensors by name, got {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{path}: {name!r} is {type(value).__name__}, only tensors are read")
    return loaded
