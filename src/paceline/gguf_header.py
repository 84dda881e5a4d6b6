"""Reads a GGUF file's header: its metadata and where each tensor lies. Standard library only.

Both processes need it (the tokenizer is in the metadata), so it imports neither torch nor numpy.
The `gguf` package's own reader keeps one numpy view per token and merge: two seconds and 190 MB
for a vocabulary of 49,152, where this takes a tenth of a second. Dequantising is still that
package's work (`paceline.models.tensors`).

Does not know: what the keys mean, which tensor types Paceline runs, or how names map to layers.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensorInfo:
    """Where one tensor lies. `shape` is in numpy's order (rows first), the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    type_id: int  # ggml's enumeration
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header. Arrays in `metadata` are lists; strings are str."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensorInfo, ...]
    file_size: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse the header of `path`.

    Raises:
        CheckpointError: not a GGUF file, or truncated or inconsistent in the header.
        UnsupportedModelError: a GGUF version, byte order or split file that is not read here.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: not a GGUF file: {size} bytes are too few for a header")
    with path.open("rb") as file, closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        return _parse(path, _Cursor(path, data, size))


class _Cursor:
    """A position in the mapped file. Every read is checked against the file's end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.pos = path, data, size, 0

    def take(self, num_bytes: int) -> int:
        """Move past `num_bytes` and return where they start."""
        start, self.pos = self.pos, self.pos + num_bytes
        if self.pos > self.size:
            raise CheckpointError(
                f"{self.path}: truncated in its header: {self.size} bytes, "
                f"at least {self.pos - self.size} are missing"
            )
        return start

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.take(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array()
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        raise CheckpointError(f"{self.path}: metadata value of unknown type {type_id} at byte {self.pos}")

    def _array(self) -> list[Any]:
        item_type, count = self.scalar("I"), self.scalar("Q")
        code = _SCALARS.get(item_type)
        if item_type == _ARRAY:
            raise UnsupportedModelError(
                f"{self.path}: metadata has an array of arrays, which is not supported"
            )
        if code is None:
            return [self.value(item_type) for _ in range(count)]
        # The bound is checked before anything of `count`'s size is allocated.
        start = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))


def _parse(path: Path, cursor: _Cursor) -> GgufHeader:
    start = cursor.take(4)
    magic = cursor.data[start : start + 4]
    if magic != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path}: GGUF version {version} is not supported (or big-endian); "
            f"supported: {', '.join(map(str, _VERSIONS))}"
        )
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    splits = metadata.get("split.count", 0)
    if splits > 1:
        raise UnsupportedModelError(
            f"{path}: one of {splits} parts of a split GGUF; join them first (llama-gguf-split --merge)"
        )
    tensors = _tensor_infos(cursor, num_tensors, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    return GgufHeader(path=path, metadata=metadata, tensors=tuple(tensors), file_size=cursor.size)


def _tensor_infos(cursor: _Cursor, num_tensors: int, alignment: int) -> Iterator[GgufTensorInfo]:
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar("I")
        if num_dims > _MAX_DIMS:
            raise CheckpointError(
                f"{cursor.path}: tensor {name} has {num_dims} dimensions, at most {_MAX_DIMS} are allowed"
            )
        dims = [cursor.scalar("Q") for _ in range(num_dims)]
        if name in found:
            raise CheckpointError(f"{cursor.path}: tensor {name} is listed twice")
        found[name] = (tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q"))
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{cursor.path}: general.alignment must be a power of two, got {alignment}")
    data_start = -(-cursor.pos // alignment) * alignment
    for name, (shape, type_id, offset) in found.items():
        yield GgufTensorInfo(name, shape, type_id, data_start + offset)
