"""The rows a governor decides for: what it knows of each, and how it sorts them into groups that are alike.

A row's *code* is one small integer that says all that matters for its depth: whether its depth is its own,
who drafts for it, how deep it may go and what kind of row it has shown to be. Rows of one code are
interchangeable, and 256 codes are counted faster than 256 rows are looked at. Codes of rows with their own
depth are negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from paceline.policy.acceptance import NUM_KINDS, RowEvidence
from paceline.policy.types import RowView, clamp_depth

_MANY = 4096  # rows remembered beyond those of the step


class RowState(RowEvidence):
    """A row and what it has shown."""

    __slots__ = ("drafter", "last_drafted", "slot", "view")

    def __init__(self, view: RowView) -> None:
        super().__init__()
        self.view = view
        self.slot = self.drafter = 0
        self.last_drafted = -1  # the observation in which it last drafted


class Code(NamedTuple):
    """A code, spelled out."""

    is_own: bool  # its depth is pinned, or it has no room
    drafter: int
    depth: int  # its own depth, or the deepest that it may go to
    kind: int


class RowBook:
    """All rows that are known, and those of the latest step in their order."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = tuple(depths)
        self._known: dict[Hashable, RowState] = {}
        self._codes: dict[int, Code] = {}
        self.drafters: list[str] = []
        self.views: tuple[RowView, ...] = ()
        self.states: list[RowState] = []

    def take(self, rows: tuple[RowView, ...]) -> None:
        """These are the rows of the step."""
        if rows is self.views or rows == self.views:
            return
        find = self._find
        pairs = zip(self.views, self.states, rows, strict=False)
        states = [state if old is view else find(view) for old, state, view in pairs]
        states += [find(view) for view in rows[len(states) :]]
        self.views, self.states = rows, states
        if len(self._known) > len(rows) + _MANY:
            self._known = {state.view.key: state for state in states}

    def find(self, rows: tuple[RowView, ...]) -> Sequence[RowState | None]:
        """The states of these rows; None for one that is forgotten."""
        if rows is self.views:
            return self.states
        return [self._known.get(view.key) for view in rows]

    def get(self, key: Hashable) -> RowState | None:
        """A row by its key."""
        return self._known.get(key)

    def drafter_of(self, name: str) -> int:
        """The number of a drafter."""
        if name not in self.drafters:
            self.drafters.append(name)
        return self.drafters.index(name)

    def codes(self) -> list[int]:
        """The codes of the step's rows, in their order."""
        return [state.slot + state.kind for state in self.states]

    def decode(self, code: int) -> Code:
        """What a code says."""
        known = self._codes.get(code)
        if known is None:
            is_own = code < 0
            number = (-code - 1) // NUM_KINDS if is_own else code // NUM_KINDS - 1
            drafter, index = divmod(number, len(self._depths))
            kind = code + (number + 1) * NUM_KINDS if is_own else code % NUM_KINDS
            known = self._codes[code] = Code(is_own, drafter, self._depths[index], kind)
        return known

    def unlimited(self, code: int) -> int:
        """The code of rows like these that may go as deep as any; that of rows with their own depth stays."""
        spelled = self.decode(code)
        return code if spelled.is_own else self._slot(spelled.drafter, len(self._depths) - 1) + spelled.kind

    def _slot(self, drafter: int, index: int) -> int:
        """The code of the first kind, for rows that may go down to a depth."""
        return (drafter * len(self._depths) + index + 1) * NUM_KINDS

    def _find(self, view: RowView) -> RowState:
        state = self._known.get(view.key)
        if state is None or (state.view is not view and state.view != view):
            return self._enter(view, state)
        return state

    def _enter(self, view: RowView, state: RowState | None) -> RowState:
        if state is None:
            state = self._known[view.key] = RowState(view)
        state.view = view
        limit = clamp_depth(self._depths[-1], view, self._depths)
        is_own = view.pinned is not None or limit == 0
        state.drafter = self.drafter_of(view.drafter)
        state.slot = self._slot(state.drafter, self._depths.index(limit)) * (-1 if is_own else 1)
        return state
