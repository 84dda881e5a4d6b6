"""Which tokens a row's grammar allows next, and where it ends.

`GrammarRows` keeps a matcher for each row and moves it on by the tokens that settle; a `Cursor` goes
ahead of one along the drafts of a step, and keeps a mask for each place to be sampled.

The rules where a grammar meets other parameters:
- EOS is allowed exactly where the grammar may end; `stop_token_ids` are too, beside the places where
  the grammar takes their text;
- where nothing can follow, the answer is complete: it ends there, with `ignore_eos` too, and before
  `min_tokens`. Where only tokens that `min_tokens` forbids could follow, `min_tokens` is lifted;
- a grammar that fails, by its limits or because no token of the vocabulary continues it, ends its own
  row with an error and nothing else: rows of the same grammar, and rows whose drafts alone went too
  far, go on with a matcher that shares nothing.

Knows nothing of requests, schemas or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.request import Grammar
from paceline.step import GrammarEnd, RowStart
from paceline.worker.matcher import (
    NO_TOKEN,
    GrammarCompiler,
    GrammarFailure,
    LimitReached,
    Mask,
    Matcher,
)

__all__ = ["Cursor", "GrammarCompiler", "GrammarRows", "Mask", "masked"]


@dataclass(slots=True)
class _Row:
    grammar: Grammar
    matcher: Matcher
    ends: NDArray[np.int64]  # what ends the answer: EOS, unless ignored, and the request's stop tokens
    ignored: NDArray[np.int64]  # EOS, if ignored
    min_tokens: int
    token_ids: list[int]  # what the matcher has taken
    alone: bool = False  # the matcher shares nothing


class GrammarRows:
    """The grammars of the rows that have one."""

    def __init__(self, compiler: GrammarCompiler, eos_token_ids: Sequence[int]) -> None:
        self._compiler = compiler
        self._eos = np.array(eos_token_ids, np.int64)
        self._rows: dict[int, _Row] = {}
        self._failed: dict[int, str] = {}  # rows whose grammar failed, with the reason

    def __contains__(self, row: int) -> bool:
        return row in self._rows or row in self._failed

    def prepare(self, grammar: Grammar) -> Future[Matcher]:
        """Compile in the background what a row will start with."""
        return self._compiler.prepare(grammar)

    def start(self, start: RowStart) -> None:
        """A request takes a row; after a preemption its grammar is where its tokens left it."""
        self.end(start.row)
        params = start.params
        if params.grammar is None:
            return
        stop_ids = np.array(params.stop_token_ids, np.int64)
        try:
            state = _Row(
                params.grammar,
                self._compiler.matcher(params.grammar),
                ends=stop_ids if params.ignore_eos else np.concatenate((self._eos, stop_ids)),
                ignored=self._eos if params.ignore_eos else self._eos[:0],
                min_tokens=params.min_tokens,
                token_ids=[],
            )
            for token_id in start.token_ids[start.prompt_len :]:
                self._take(state, token_id)
        except GrammarFailure as failure:
            self._failed[start.row] = str(failure)
        else:
            self._rows[start.row] = state

    def end(self, row: int) -> None:
        """A row is given back, however its request ended."""
        self._rows.pop(row, None)
        self._failed.pop(row, None)

    def cursor(self, row: int) -> Cursor:
        """The places of the row's next step, beginning at its newest known token."""
        if row in self._failed:
            return Cursor(None, end=GrammarEnd(0, self._failed[row]))
        state = self._rows[row]
        try:
            mask, lifts = self._allowed(state)
        except GrammarComplete:
            return Cursor(None, end=GrammarEnd(0))
        except GrammarFailure as failure:
            return Cursor(None, end=GrammarEnd(0, str(failure)))
        return Cursor(state, [mask], lifts)

    def settle_block(self, row: int, token_ids: Sequence[int]) -> GrammarEnd | None:
        """Go on by the tokens that were chosen, in order, as if each had come in a step of its own.

        A stop token, whatever the grammar, moves nothing, and what follows it is not looked at. Only for
        rows whose grammar has not ended or failed.
        """
        state = self._rows[row]
        for num_tokens, token_id in enumerate(token_ids, start=1):
            if token_id in state.ends:
                return None  # the scheduler ends the request there
            try:
                self._take(state, token_id)
            except GrammarFailure as failure:
                self._failed[row] = str(failure)
                return GrammarEnd(num_tokens, str(failure))
            if state.matcher.must_end:
                return GrammarEnd(num_tokens)
        return None

    def _take(self, state: _Row, token_id: int) -> None:
        state.token_ids.append(token_id)
        try:
            if state.alone:
                _take_alone(state.matcher, token_id)
            else:
                state.matcher.take(token_id)
        except LimitReached as failure:
            self._leave(state, failure)

    def _allowed(self, state: _Row) -> tuple[Mask, bool]:
        try:
            return _allowed(state, state.matcher, 0)
        except LimitReached as failure:
            self._leave(state, failure)
            return _allowed(state, state.matcher, 0)

    def _leave(self, state: _Row, failure: LimitReached) -> None:
        """Go on without what the row's matcher shares: another's tokens, or drafts, may have hit the limit.

        Raises:
            GrammarFailure: the row's own tokens hit a limit.
        """
        self._compiler.forget(state.grammar)
        if state.alone:
            raise failure
        state.alone = True
        state.matcher = self._compiler.alone(state.grammar)
        for token_id in state.token_ids:
            _take_alone(state.matcher, token_id)


def _take_alone(matcher: Matcher, token_id: int) -> None:
    """Take a token as plain decoding does, after a mask: limits are of the work between two tokens."""
    matcher.allowed()
    matcher.take(token_id)


class Cursor:
    """A row's grammar along the places of one step: place 0, and one behind each draft taken so far.

    A fork of the row's matcher goes ahead and the row's own stays, so that a rejected draft leaves no
    trace. A place that could not be sampled as plain decoding would sample it does not exist, and the
    draft before it is not taken: behind a stop token, where the grammar is complete or fails, and where
    `min_tokens` would have to give way, which is for the next step to do, when it is known that the
    answer got there. A row that has met limits takes no drafts any more.

    Attributes:
        masks: of each place, bool [V], the tokens that may be chosen there. Empty if there is an end.
        lifts: `min_tokens` must give way, at place 0 and ever after.
        end: the answer has ended before place 0, completely or by failing.
    """

    def __init__(
        self,
        row: _Row | None,
        masks: Sequence[Mask] = (),
        lifts: bool = False,
        end: GrammarEnd | None = None,
    ) -> None:
        self.masks, self.lifts, self.end = list(masks), lifts, end
        self._row = row
        self._drafts: list[int] = []
        self._ahead: Matcher | None = None

    @property
    def num_drafts(self) -> int:
        """Drafts taken so far: the row has this many places behind its first."""
        return len(self._drafts)

    def take(self, draft: int) -> bool:
        """Go on by a draft, if there can be a place behind it; else everything stays as it is."""
        row = self._row
        if row is None or row.alone:
            return False
        if draft < 0 or draft in row.ends or not self.masks[-1][draft]:
            return False
        ahead, self._ahead = self._fork(row), None
        try:
            ahead.take(draft)
            mask, lifts = _allowed(row, ahead, len(self._drafts) + 1)
        except (GrammarComplete, GrammarFailure):
            return False
        if lifts:
            return False
        self._ahead = ahead
        self._drafts.append(draft)
        self.masks.append(mask)
        return True

    def follow(self, drafts: Sequence[int]) -> int:
        """Take, of these drafts, as many as there can be places behind; returns how many those are.

        They count from place 0: what had been taken before and differs is given up.
        """
        num_same = 0
        while num_same < min(len(drafts), len(self._drafts)) and drafts[num_same] == self._drafts[num_same]:
            num_same += 1
        if num_same < len(self._drafts):
            del self._drafts[num_same:], self.masks[num_same + 1 :]
            self._ahead = None
        for draft in drafts[num_same:]:
            if not self.take(draft):
                break
        return len(self._drafts)

    def _fork(self, row: _Row) -> Matcher:
        """A matcher behind the drafts taken so far. One that went further, or failed, is not used again."""
        if self._ahead is not None:
            return self._ahead
        ahead = row.matcher.fork()
        for draft in self._drafts:
            ahead.take(draft)
        return ahead


def _allowed(row: _Row, matcher: Matcher, num_drafts: int) -> tuple[Mask, bool]:
    """The tokens that may come next, bool [V], at least one; and whether `min_tokens` must give way.

    Args:
        matcher: the row's, or a fork of it that is `num_drafts` tokens ahead.

    Raises:
        GrammarFailure: the grammar cannot go on.
        GrammarComplete: the answer ends here.
    """
    if matcher.must_end:
        raise GrammarComplete
    mask = matcher.allowed()
    mask[row.ends] = mask[row.ends] | matcher.may_end
    mask[row.ignored] = False
    if not mask.any():
        if matcher.may_end:
            raise GrammarComplete
        raise GrammarFailure(NO_TOKEN)
    num_generated = len(row.token_ids) + num_drafts
    return mask, row.min_tokens > num_generated and not np.delete(mask, row.ends).any()


class GrammarComplete(Exception):
    """Nothing can follow, and nothing needs to."""


def masked(logits: torch.Tensor, masks: dict[int, Mask]) -> torch.Tensor:
    """A copy of `logits` fp32 [P, V] with -inf where the mask of a position, bool [V], forbids a token."""
    places = torch.tensor(list(masks), device=logits.device)
    forbidden = torch.from_numpy(~np.stack(list(masks.values()))).to(logits.device)
    result = logits.clone()
    result[places] = logits[places].masked_fill(forbidden, -torch.inf)
    return result
