"""What a user's word for a drafter means: none, ngram, the head shipped for a model, or a head by name.

Does not know what is in a head's files (`checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError, ModelNotFoundError
from paceline.models.builtin import BUILTINS

NONE = "none"
NGRAM = "ngram"

_SHIPPED = Path(__file__).parent.parent / "drafts"


def resolve_draft(draft: str | None, model: str, revision: str | None = None) -> str:
    """`NONE`, `NGRAM`, or a name for `open_draft`.

    Args:
        draft: the user's word: one of these two (a folder of that name is `./ngram`), a folder or a Hugging
            Face id. None: the head shipped for a built-in model, else none.
        model: the target, as its user names it.
        revision: branch, tag or commit of a Hugging Face id; only valid for one.

    Raises:
        ModelNotFoundError: no such thing, or this installation lacks a shipped head.
        ConfigError: `revision` for something that has none.
    """
    found = _shipped(model) if draft is None else draft
    if revision is not None and (draft is None or draft in (NONE, NGRAM)):
        raise ConfigError(f"draft_revision {revision!r} needs draft to be a Hugging Face id, got {found}")
    if draft in (None, NONE, NGRAM) or "/" in found or Path(found).expanduser().exists():
        return found
    raise ModelNotFoundError(
        f"no draft head {found!r}: not a folder, not a Hugging Face id (owner/name), not {NGRAM} or {NONE}"
    )


def _shipped(model: str) -> str:
    builtin = BUILTINS.get(model)
    # As for models, a file or folder that exists goes before the built-in of its name.
    if builtin is None or builtin.draft is None or Path(model).expanduser().exists():
        return NONE
    folder = _SHIPPED / builtin.draft
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"{folder}: the draft head of {model} is missing from this installation; "
            f"install Paceline again, or set draft to {NONE}"
        )
    return str(folder)
