"""Opens a model on disk: configuration and tensors, from safetensors or GGUF, checked as a whole.

Does not know how a name becomes a path (`hub`) or what becomes of the weights (the decoder).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from paceline.errors import CheckpointError, ModelError, ModelNotFoundError
from paceline.json_file import read_json
from paceline.models.config import ModelConfig, config_from_hf
from paceline.models.gguf import read_gguf
from paceline.models.safetensors_files import read_safetensors
from paceline.models.schema import check_shapes
from paceline.models.tensors import RawTensor
from paceline.tokenizer import hf_eos_token_ids

__all__ = ["Checkpoint", "RawTensor", "open_checkpoint"]

_COMPARE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open model. `tensors` is exactly what `config` asks for, read when asked.

    Close it (or use it as a context manager) when the weights are loaded; tensors cannot be read
    afterwards, and nothing of the files stays in memory.
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, RawTensor]
    _files: ExitStack = field(repr=False)

    def close(self) -> None:
        """Close the files. Twice is fine."""
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file, or a folder with config.json and safetensors.

    Every tensor's name, shape and type, and every file's size, is checked before this returns.

    Raises:
        ModelNotFoundError: nothing is there, or it is neither of the two.
        UnsupportedModelError: something in it that Paceline does not run; named.
        CheckpointError: a tensor or file is missing, extra, misshapen or truncated; named.
        ModelError: a configuration field is missing or out of range; named.
    """
    with ExitStack() as stack:
        try:
            if path.is_file():
                config, tensors, file = read_gguf(path)
                stack.enter_context(file)
            else:
                config, tensors = _read_folder(path, stack)
        except ModelError as error:
            if str(path) in str(error):
                raise
            raise type(error)(f"{path}: {error}") from None
        check_shapes(config, {name: tensor.shape for name, tensor in tensors.items()}, str(path))
        return Checkpoint(path, config, tensors, stack.pop_all())
    raise AssertionError("an ExitStack swallowed an exception")


def _read_folder(folder: Path, stack: ExitStack) -> tuple[ModelConfig, dict[str, RawTensor]]:
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: no such file or folder")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder}: no config.json in this folder")
    config = config_from_hf(read_json(folder / "config.json"), hf_eos_token_ids(folder))
    tensors = read_safetensors(folder, stack)
    if config.tie_word_embeddings and "lm_head.weight" in tensors and "embed_tokens.weight" in tensors:
        _check_tied(tensors["embed_tokens.weight"], tensors.pop("lm_head.weight"))
    return config, tensors


def _check_tied(embedding: RawTensor, head: RawTensor) -> None:
    """Some tied models store the head as well. The same bytes are harmless; others are a riddle."""
    same = (embedding.shape, embedding.kind) == (head.shape, head.kind)
    for start in range(0, embedding.num_bytes if same else 0, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, embedding.num_bytes - start)
        ours, theirs = (
            embedding.file.read(embedding.offset + start, count),
            head.file.read(head.offset + start, count),
        )
        same = same and bool((ours == theirs).all())
    if not same:
        raise CheckpointError(
            f"{head.file.path}: tensor lm_head.weight differs from embed_tokens.weight, "
            "but config.json says tie_word_embeddings"
        )
