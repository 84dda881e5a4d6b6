"""From a model's name to a path on this machine.

A name is, in this order: a file or folder that exists; a built-in model's name; a Hugging Face id
`owner/name`, or `owner/name:file.gguf` for one GGUF file of a repository. Downloads go through
`huggingface_hub`: its cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply.

Does not know what is in the files.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from paceline.models.builtin import BUILTINS, fetch_builtin

_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+\.gguf))?", re.ASCII)
_WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]
PICKLE = "pytorch_model.bin"
# Subfolders hold other formats; consolidated*.safetensors is Mistral's second copy of the weights.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def resolve_model(
    name: str, revision: str | None = None, progress: bool = True, *, allow_pickles: bool = False
) -> Path:
    """A folder with config.json and safetensors, or a `.gguf` file; downloaded if need be.

    Args:
        name: a path, a built-in name, or a Hugging Face id (see the module).
        revision: branch, tag or commit of a Hugging Face id; only valid for one.
        progress: show download bars on stderr.
        allow_pickles: take `pytorch_model.bin` from a repository without safetensors; for a caller that
            reads it without running code from it.

    Raises:
        ModelNotFoundError: nothing of this name, or it cannot be had: gated, offline, no network.
        UnsupportedModelError: a repository with pickled weights only.
        ModelError: `revision` for something that has none, or a download that could not be stored.
    """
    path = Path(name).expanduser()
    match = _ID.fullmatch(name)
    is_here = bool(name) and path.exists()
    is_hub_id = match is not None and not is_here and not _looks_like_path(name)
    if revision is not None and not is_hub_id:
        raise ModelError(f"revision {revision!r} needs a Hugging Face id owner/name, got {name!r}")
    if is_here:
        return _local(path)
    if name in BUILTINS:
        return fetch_builtin(BUILTINS[name], progress)
    if match is None or not is_hub_id:
        raise ModelNotFoundError(_unknown(name))
    with _bars(progress), _hub_errors(name, revision):
        return _download(match["repo"], match["file"], revision, allow_pickles)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (name.endswith(".gguf") and ":" not in name)


def _unknown(name: str) -> str:
    if "/" in name or _looks_like_path(name):
        return (
            f"{name}: no such file or folder, and not a Hugging Face id (owner/name or owner/name:file.gguf)"
        )
    near = difflib.get_close_matches(name.lower(), BUILTINS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"built-in models: {', '.join(BUILTINS)}"
    return f"no model {name!r}: not a file or folder, not built in; {hint}"


def _local(path: Path) -> Path:
    """A folder that holds a single GGUF file and no config.json means that file."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(
                f"{path}: a model file must be a .gguf; for safetensors, name the folder"
            )
        return path
    files = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not files:
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ModelNotFoundError(f"{path}: {len(files)} GGUF files and no config.json; name one ({names})")
    return files[0]


def _download(repo: str, file: str | None, revision: str | None, allow_pickles: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    if file is not None:
        return Path(hf_hub_download(repo, file, revision=revision))
    folder = Path(
        snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    )
    if any(folder.glob("*.safetensors")):
        return folder
    if allow_pickles:
        snapshot_download(repo, revision=revision, allow_patterns=[PICKLE])
        if (folder / PICKLE).is_file():
            return folder
    raise _without_safetensors(repo, revision)


def _without_safetensors(repo: str, revision: str | None) -> ModelError:
    from huggingface_hub import HfApi, constants

    files = [] if constants.HF_HUB_OFFLINE else HfApi().list_repo_files(repo, revision=revision)
    ggufs = [name for name in files if name.endswith(".gguf")]
    if ggufs:
        return ModelNotFoundError(
            f"{repo}: no safetensors but {len(ggufs)} GGUF files; name one: {repo}:{ggufs[0]}"
        )
    if any(name.endswith(".bin") for name in files):
        return UnsupportedModelError(
            f"{repo}: only pickled weights (.bin), which can run code when loaded, are there"
        )
    return ModelNotFoundError(f"{repo}: no safetensors there")


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn the client's errors, which differ between its versions, into one line each."""
    from huggingface_hub import constants, errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        yield
        return
    except ModelError:
        raise
    except errors.GatedRepoError:
        reason = "gated: accept its terms on its page, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"not found at {constants.ENDPOINT}, or private: check the name, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = "no such revision"
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            reason = "not complete in the cache, and HF_HUB_OFFLINE is set"
        else:
            reason = f"not complete in the cache, and {_unreachable(error.__cause__ or error)}"
    except errors.EntryNotFoundError:
        reason = "no such file in this repository"
    except errors.HfHubHTTPError as error:
        reason = f"{constants.ENDPOINT} refused it with HTTP {error.response.status_code}; is HF_TOKEN right?"
    except OSError as error:
        if error.errno is not None and error.filename is not None:
            reason = f"cannot be stored: {os.strerror(error.errno)}: {error.filename}"
        else:
            reason = _unreachable(error)
    except Exception as error:  # the transport's own errors: requests in old versions, httpx in new ones
        reason = _unreachable(error)
    raise ModelNotFoundError(f"{name}{at}: {reason}")


def _unreachable(error: BaseException) -> str:
    from huggingface_hub import constants

    first_line = (str(error).splitlines() or [""])[0]
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {first_line})"
