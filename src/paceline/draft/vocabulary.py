"""The draft vocabulary: which target token each draft token is.

Checkpoints hold offsets, `target_id = draft_id + d2t[draft_id]`, and a mask `t2d` over the target's
vocabulary. A file with target ids in place of offsets would draft nonsense and never say so: since
outputs stay right whatever is drafted, this check is the only one there is.
"""

from __future__ import annotations

import torch

from paceline.errors import CheckpointError

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def resolve_vocabulary(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_vocab_size: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The checked map: d2t int64 [draft_vocab_size], t2d bool [vocab_size]; made where a file may omit them.

    With `t2d`, offsets are told from target ids by which of the two reaches exactly the marked
    tokens. Without it, by repeats: offsets repeat wherever neighbours in the target's vocabulary
    are both drafted, ids never do.

    Raises:
        CheckpointError: the map is missing, misshapen, no map of offsets, or contradicts `t2d`.
    """
    _check("d2t", d2t, draft_vocab_size)
    _check("t2d", t2d, vocab_size)
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"tensor d2t is missing: {draft_vocab_size} draft tokens of {vocab_size} need it"
            )
        d2t = torch.zeros(vocab_size, dtype=torch.int64)
    offsets = d2t.to(torch.int64)
    target_ids = torch.arange(draft_vocab_size) + offsets
    marked = None if t2d is None else t2d.to(torch.bool)
    if draft_vocab_size > 1 and _reaches(offsets, vocab_size, marked):
        doubt = "" if marked is not None else " or, as there is no t2d, cannot be told from them"
        raise CheckpointError(
            f"tensor d2t holds target ids{doubt}; offsets (target id - draft id) are needed"
        )
    _check_reached(target_ids, vocab_size, marked)
    reached = torch.zeros(vocab_size, dtype=torch.bool)
    reached[target_ids] = True
    return offsets, reached


def _check(name: str, tensor: torch.Tensor | None, size: int) -> None:
    if tensor is None:
        return
    if tuple(tensor.shape) != (size,):
        raise CheckpointError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the configuration needs ({size},)"
        )
    if tensor.dtype not in _INTEGERS:
        raise CheckpointError(f"tensor {name} must hold whole numbers, got {tensor.dtype}")


def _reaches(target_ids: torch.Tensor, vocab_size: int, marked: torch.Tensor | None) -> bool:
    """Whether these are distinct ids of the vocabulary, and those marked if that is known."""
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= vocab_size:
        return False
    counts = torch.bincount(target_ids, minlength=vocab_size)
    return int(counts.max()) <= 1 and (marked is None or torch.equal(counts > 0, marked))


def _check_reached(target_ids: torch.Tensor, vocab_size: int, marked: torch.Tensor | None) -> None:
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise CheckpointError(
            f"tensor d2t maps draft token {first} to {int(target_ids[first])}, "
            f"outside the vocabulary [0, {vocab_size})"
        )
    counts = torch.bincount(target_ids, minlength=vocab_size)
    if int(counts.max()) > 1:
        raise CheckpointError(f"tensor d2t maps two draft tokens to target token {int(counts.argmax())}")
    if marked is not None and not torch.equal(counts > 0, marked):
        first = int(((counts > 0) != marked).nonzero()[0])
        raise CheckpointError(f"tensors d2t and t2d disagree about target token {first}")
