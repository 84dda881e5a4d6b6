"""A Hugging Face folder of safetensors, one file or many, as tensors under short names.

The format is a length, a JSON header and bytes; reading it here gives the exact number of missing
bytes and plain reads (see `tensors`). Does not know which tensors the model needs.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.json_file import read_json
from paceline.models.tensors import BLOCKS, Kind, RawTensor, TensorFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_KINDS: dict[str, Kind] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
# Buffers that old checkpoints saved; they are computed from the configuration.
_HARMLESS = "rotary_emb.inv_freq"
_MAX_HEADER = 100_000_000  # the format's own limit


def read_safetensors(folder: Path, stack: ExitStack) -> dict[str, RawTensor]:
    """Every tensor of the folder's checkpoint, without the leading `model.`.

    The files stay open until `stack` closes.

    Raises:
        CheckpointError: a file is missing, truncated or inconsistent; named.
        UnsupportedModelError: pickled weights only, or a tensor type that Paceline does not run.
    """
    files, index = list_files(folder)
    tensors: dict[str, RawTensor] = {}
    for file_name in files:
        file = stack.enter_context(TensorFile(folder / file_name))
        for full_name, tensor in _read_file(file).items():
            if index and index.get(full_name, file_name) != file_name:
                raise CheckpointError(
                    f"{file.path}: tensor {full_name} belongs in {index[full_name]}, says {INDEX}"
                )
            if tensor.name in tensors:
                raise CheckpointError(f"{file.path}: tensor {full_name} is in two files")
            if not full_name.endswith(_HARMLESS):
                tensors[tensor.name] = tensor
    return tensors


def list_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The checkpoint's files, all there, and with an index each tensor's file by its full name.

    Raises:
        CheckpointError: a file is missing; named.
        UnsupportedModelError: pickled weights only.
    """
    index = _read_index(folder)
    files = sorted(set(index.values())) if index else [_only_file(folder)]
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder / absent[0]}: missing, {INDEX} lists it ({len(absent)} of {len(files)} are)"
        )
    return files, index


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():  # the single file wins, as in transformers
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    outside = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{path}: {outside[0]!r} is not the name of a file in this folder")
    return weight_map


def _only_file(folder: Path) -> str:
    if (folder / SINGLE).is_file():
        return SINGLE
    names = sorted(
        path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")
    )
    if len(names) == 1:
        return names[0]
    if names:
        raise CheckpointError(f"{folder}: {len(names)} safetensors files but no {INDEX}")
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles:
        raise UnsupportedModelError(
            f"{folder / pickles[0]}: pickled weights can run code when loaded and are not read; "
            "convert the model to safetensors"
        )
    raise CheckpointError(f"{folder}: no weights: neither {SINGLE} nor {INDEX}")


def _read_file(file: TensorFile) -> dict[str, RawTensor]:
    """The tensors of one file by their full names, checked against the file's size."""
    size = file.path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{file.path}: truncated: {size} bytes are too few for a header")
    header_len = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if header_len > _MAX_HEADER:
        raise CheckpointError(f"{file.path}: not a safetensors file: header of {header_len} bytes")
    data_start = 8 + header_len
    if data_start > size:
        raise CheckpointError(
            f"{file.path}: truncated in its header: {data_start - size} of {data_start} bytes missing"
        )
    try:
        header: Any = json.loads(file.read(8, header_len).tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(file, name, entry, data_start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.path}: not a safetensors file: bad header ({error})") from None
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=data_start)
    if end > size:
        raise CheckpointError(f"{file.path}: truncated: {size} bytes, {end - size} of {end} are missing")
    return tensors


def _tensor(file: TensorFile, full_name: str, entry: dict[str, Any], data_start: int) -> RawTensor:
    kind = _KINDS.get(entry["dtype"])
    if kind is None:
        raise UnsupportedModelError(
            f"{file.path}: tensor {full_name} has type {entry['dtype']}, which is not supported; "
            f"supported: {', '.join(_KINDS)}"
        )
    shape = tuple(int(dim) for dim in entry["shape"])
    begin, end = entry["data_offsets"]
    num_bytes = math.prod(shape) * BLOCKS[kind][1]
    if begin < 0 or end - begin != num_bytes:
        raise CheckpointError(
            f"{file.path}: tensor {full_name} has {end - begin} bytes, "
            f"shape {shape} of {kind} needs {num_bytes}"
        )
    return RawTensor(full_name.removeprefix("model."), shape, kind, file, data_start + begin)
