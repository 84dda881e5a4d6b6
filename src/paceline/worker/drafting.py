"""Choosing drafts with the target's own noise: y' = argmax over v of log q(v) + G(seed, choice, position, v).

q is the drafter's distribution after the row's processors, G the very noise with which the target will
choose its token at that position. The nearer q is to the target's p, the more often the two agree, at
every temperature. Whatever is chosen here costs time at most: words are the target's.

A drafter may know a part of the vocabulary only: noise, biases, penalties and grammar go by the target's
ids. Rows without biases, penalties and grammar are drawn among the drafter's columns; for the others the
columns are spread over the vocabulary, and `sample` does what it does for the target.

Knows nothing of drafters, or of what the target makes of the drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.draft.protocol import NO_DRAFT, Round
from paceline.worker import sampling_cpu
from paceline.worker.grammar import Cursor, masked
from paceline.worker.sampling import Prefix, SamplerState, draw_torch, sample, without_nan

_OWN_NAMES = np.empty(0, np.int64)  # each column is its own token


class CoupledChoice:
    """The `paceline.draft.protocol.Choose` of one round.

    Args:
        state: holds, for rows with penalties, the counts of all known tokens.
        drafting: the B rows. Drafts are chosen in the order of its steps, each step once.
        cursors: of the rows with a grammar, by index in the round; moved on by the drafts chosen.
        asking: indices in the round, ascending, of the rows whose top probabilities are wanted.

    Attributes:
        probs: fp32 [B, D], the drafter's greatest probability (temperature 1, before processors) at each
            draft of the rows that ask; None if none does, or while nothing was drawn from logits.
    """

    def __init__(
        self,
        state: SamplerState,
        drafting: Round,
        cursors: Mapping[int, Cursor] | None = None,
        asking: Sequence[int] = (),
    ) -> None:
        self._shape, device = (len(drafting.depths), drafting.depths[0]), state.device
        self.probs: Tensor | None = None
        self._state, self._rows, self._lengths = state, drafting.rows, drafting.lengths
        self._cursors = dict(cursors or {})
        self._asking = np.array(asking, np.int64)
        if device.type == "cpu":
            rows = drafting.rows.tolist()
            self._special = [i for i, r in enumerate(rows) if i in self._cursors or state.changes_logits(r)]
        else:  # which rows these are would have to be read back: all of them, if any
            special = self._cursors or state.any_biased or state.any_penalized
            self._special = list(range(self._shape[0])) if special else []
        if self._special:  # for those rows' counts
            self._chosen = torch.zeros(self._shape, dtype=torch.int64, device=device)

    def __call__(self, step: int, logits: Tensor, vocabulary: Tensor | None) -> Tensor:
        """See `paceline.draft.protocol.Choose`."""
        num = len(logits)
        if len(self._asking):
            if self.probs is None:
                self.probs = torch.zeros(self._shape, device=logits.device)
            self._note_probabilities(step, logits, self.probs)
        special = [i for i in self._special if i < num]
        if len(special) == num:
            token_ids = torch.empty(num, dtype=torch.int64, device=logits.device)
        else:
            rows, lengths = self._rows, self._lengths
            if num < self._shape[0]:
                rows, lengths = rows[:num], lengths[:num]
            token_ids = _draw(logits, rows, lengths + (1 + step), self._state, vocabulary)
        if special:
            self._choose_special(step, special, logits, vocabulary, token_ids)
        return token_ids

    def _choose_special(
        self, step: int, special: list[int], logits: Tensor, vocabulary: Tensor | None, token_ids: Tensor
    ) -> None:
        """Write the tokens of the `special` rows into `token_ids`."""
        at = torch.tensor(special, device=logits.device)
        spread = _spread(logits.index_select(0, at), vocabulary, self._state.vocab_size)
        cursors = {k: self._cursors[i] for k, i in enumerate(special) if i in self._cursors}
        going = {k: cursor for k, cursor in cursors.items() if _goes_on(cursor, step)}
        if going:
            spread = masked(spread, {k: cursor.masks[step] for k, cursor in going.items()})
        depth = self._chosen.shape[1]
        prefix = Prefix(self._chosen.view(-1), torch.full_like(at, step), at * depth + step)
        rows, positions = self._rows.index_select(0, at), self._lengths.index_select(0, at) + (1 + step)
        chosen = sample(spread, rows, positions, self._state, prefix)
        self._chosen[at, step] = chosen
        for k, cursor in cursors.items():
            # -inf everywhere, as where the grammar takes nothing that the drafter knows, gives token 0.
            if k not in going or not cursor.take(int(chosen[k])):
                chosen[k] = NO_DRAFT
        token_ids[at] = chosen

    def _note_probabilities(self, step: int, logits: Tensor, probs: Tensor) -> None:
        at = self._asking[self._asking < len(logits)]
        if logits.device.type == "cpu":
            sampling_cpu.top_probabilities(logits.numpy(), at, step, probs.numpy())
        else:
            asked = logits[torch.from_numpy(at).to(logits.device)]
            probs[torch.from_numpy(at).to(logits.device), step] = torch.softmax(asked, dim=1).amax(dim=1)


def _goes_on(cursor: Cursor, step: int) -> bool:
    """Whether the row has a place behind `step` drafts: a cursor that once took no draft has none."""
    return cursor.num_drafts == step and bool(cursor.masks)


def _draw(
    logits: Tensor, rows: Tensor, positions: Tensor, state: SamplerState, vocabulary: Tensor | None
) -> Tensor:
    """Tokens int64 [B] of rows that have neither biases nor penalties nor a grammar."""
    if logits.device.type != "cpu":
        if vocabulary is None:
            vocabulary = torch.arange(logits.shape[1], device=logits.device)
        return draw_torch(without_nan(logits), rows, positions, state, vocabulary)
    assert logits.is_contiguous(), "another layout would compile, and cache, a slower kernel"
    token_ids = torch.empty(len(rows), dtype=torch.int64)
    if state.team is not None:
        state.team.draft(logits, vocabulary, rows, positions, state.arrays(), token_ids)
        return token_ids
    names = _OWN_NAMES if vocabulary is None else vocabulary.numpy()
    floats, ints, *_ = state.arrays()
    sampling_cpu.draft_positions(
        logits.numpy(), names, rows.numpy(), positions.numpy(), floats, ints, token_ids.numpy()
    )
    return token_ids


def _spread(logits: Tensor, vocabulary: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [B, C] over the target's vocabulary: fp32 [B, V], -inf for tokens that are no column."""
    if vocabulary is None:
        return logits
    full = torch.full((len(logits), vocab_size), -torch.inf, device=logits.device)
    return full.index_copy_(1, vocabulary, logits)
