"""What other servers do about depth, under the same Protocol: to choose from, and to be measured against.

Each knows only what the original knows; none learns what a round costs. Rows with their own depth keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.policy.checks import MAX_TOKENS, check_depths, check_load, whole
from paceline.policy.types import (
    Decision,
    Load,
    Observation,
    PolicyError,
    Reason,
    RowView,
    clamp_depth,
)

SGLANG_SLOTS: Mapping[int, tuple[int, ...]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
SGLANG_DOWN: Mapping[int, float] = {1: -0.25}  # of slots where it is not 0


def decision(load: Load, rows: tuple[RowView, ...], depth: int, depths: Sequence[int]) -> Decision:
    """The same depth for all rows, as far as each has room, of declared depths.

    Raises:
        PolicyError: the load is of another number of rows, or none that can be.
    """
    check_load(load, len(rows))
    declared = tuple(depths)
    found = tuple([clamp_depth(depth, row, declared) for row in rows])
    if all(row.max_depth <= 0 for row in rows):
        reason = Reason.CAPACITY
    elif all(row.pinned is not None for row in rows):
        reason = Reason.PINNED
    else:
        reason = Reason.PAYS if depth else Reason.COSTS
    return Decision(load, rows, found, reason)


class Fixed:
    """Always the same depth.

    Raises:
        PolicyError: it is negative.
    """

    def __init__(self, depth: int) -> None:
        if depth < 0:
            raise PolicyError(f"depth must be at least 0, got {depth}")
        self._depth = depth

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """See `types.Policy`."""
        pins = [row.pinned for row in rows if row.pinned is not None]
        return decision(load, rows, self._depth, range(max([self._depth, *pins]) + 1))

    def observe(self, observation: Observation) -> None:
        """It does not learn."""


class BatchTable:
    """A depth by the number of rows, as a person wrote it.

    Args:
        table: (first, last, depth) by rising numbers of rows, as vLLM's
            `num_speculative_tokens_per_batch_size`: the first begins at 1, and a gap, or what lies beyond
            the last range, has the depth of the range before.

    Raises:
        PolicyError: ranges overlap or are out of order, the first does not begin at 1, a depth is negative.
    """

    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None:
        if not table or table[0][0] != 1:
            raise PolicyError("a batch table must begin at 1 row")
        before = 0
        for first, last, depth in table:
            if not before < first <= last:
                raise PolicyError(f"a batch table's ranges must rise, got {first}-{last} behind {before}")
            if depth < 0:
                raise PolicyError(f"depth must be at least 0, got {depth}")
            before = last
        self._table = tuple(table)
        self._depths = check_depths((0, *(depth for _, _, depth in table)))

    @classmethod
    def from_upper_bounds(cls, schedule: Mapping[int, int]) -> BatchTable:
        """From TensorRT-LLM's `draft_len_schedule`: a depth up to each number of rows, and 0 beyond."""
        table, first = [], 1
        for last in sorted(schedule):
            table.append((first, last, schedule[last]))
            first = last + 1
        return cls([*table, (first, first, 0)])

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """See `types.Policy`."""
        depth = 0
        for first, _, declared in self._table:
            if first <= load.num_rows:
                depth = declared
        return decision(load, rows, depth, self._depths)

    def observe(self, observation: Observation) -> None:
        """It does not learn."""


class Threshold:
    """Drafts below a number of requests, plain decoding above another: "turn it off when busy".

    Args:
        depth: while it is on.
        off_above: rows beyond which it turns off.
        on_below: rows below which it turns on again; between the two it stays as it is.

    Raises:
        PolicyError: `on_below` is over `off_above` + 1, `depth` is less than 1, or `off_above` than 0.
    """

    def __init__(self, depth: int, off_above: int, on_below: int) -> None:
        if depth < 1:
            raise PolicyError(f"depth must be at least 1, got {depth}")
        if off_above < 0:
            raise PolicyError(f"off_above must be at least 0, got {off_above}")
        if on_below > off_above + 1:
            raise PolicyError(f"on_below ({on_below}) must be at most off_above + 1 ({off_above + 1})")
        self._depth, self._off_above, self._on_below = depth, off_above, on_below
        self._is_on = True

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """See `types.Policy`."""
        if load.num_rows > self._off_above:
            self._is_on = False
        elif load.num_rows < self._on_below:
            self._is_on = True
        return decision(load, rows, self._depth if self._is_on else 0, range(self._depth + 1))

    def observe(self, observation: Observation) -> None:
        """It does not learn."""


class AcceptanceEma:
    """The rule of SGLang's `--speculative-adaptive`: steps follow what was accepted, whatever it costs.

    A slot holds for its number of rows and more, up to the next. Each keeps e, an average of the accepted
    drafts a row (weight `alpha` for the newest batch; batches at depth 0 leave it alone). After `warmup`
    batches, at every `interval`-th, with the slot's candidates in order:

        at 0             try the next candidate
        down while       e <= previous - 0.5 + down     (0.5 + down where the previous one is 0)
        else up while    e > current - 0.5

    Read in sglang 0.5.23 and its main branch, `speculative/adaptive_spec_params.py`; padding to captured
    batch sizes is left out.

    Raises:
        PolicyError: there is no slot for 1 row, or one without candidates; or an interval is not positive.
    """

    def __init__(
        self,
        slots: Mapping[int, Sequence[int]] = SGLANG_SLOTS,
        down: Mapping[int, float] = SGLANG_DOWN,
        alpha: float = 0.2,
        warmup: int = 10,
        interval: int = 5,
    ) -> None:
        if 1 not in slots or not all(slots.values()):
            raise PolicyError("every slot needs candidates, and there must be one for 1 row")
        whole("interval", interval, 1, MAX_TOKENS)
        self._slots = {
            rows: _Slot(sorted(set(candidates)), down.get(rows, 0.0), alpha, warmup, interval)
            for rows, candidates in sorted(slots.items())
        }
        self._depths = check_depths((0, *(depth for candidates in slots.values() for depth in candidates)))

    def decide(self, load: Load, rows: tuple[RowView, ...]) -> Decision:
        """See `types.Policy`."""
        return decision(load, rows, self._slot(load.num_rows).depth, self._depths)

    def observe(self, observation: Observation) -> None:
        """See `types.Policy`."""
        if observation.accepted:
            mean = sum(observation.accepted) / len(observation.accepted)
            self._slot(len(observation.accepted)).update(mean)

    def _slot(self, num_rows: int) -> _Slot:
        return self._slots[max((rows for rows in self._slots if rows <= num_rows), default=1)]


class _Slot:
    """One slot of `AcceptanceEma`."""

    def __init__(
        self, candidates: Sequence[int], down: float, alpha: float, warmup: int, interval: int
    ) -> None:
        self._candidates, self._down, self._alpha = candidates, down, alpha
        self._warmup, self._interval = warmup, interval
        self.depth = candidates[len(candidates) // 2]
        self._mean = float(self.depth - 1)
        self._num = 0

    def update(self, accepted: float) -> None:
        """A batch accepted so many drafts a row."""
        if self.depth:
            self._mean += self._alpha * (accepted - self._mean)
        self._num += 1
        if self._num > self._warmup and not (self._num - self._warmup) % self._interval:
            self.depth = self._candidates[self._next(self._candidates.index(self.depth))]

    def _next(self, index: int) -> int:
        last = len(self._candidates) - 1
        if not self.depth:
            index = min(index + 1, last)
            if self._mean < 0:
                self._mean = float(self._candidates[index] - 1)
            return index
        before = index
        while index and self._mean <= (self._candidates[index - 1] or 1) - 0.5 + self._down:
            index -= 1
        while index >= before and index < last and self._mean > self._candidates[index] - 0.5:
            index += 1
        return index
