"""From what clients saw to numbers: the stretch of a run in which every client was busy.

    submit          all clients have a first token                a client finds no job left
      |---- not counted ----|=============== window ================|---- not counted ----|

Inside the window the load is what the column says. Prompts of later jobs are worked on inside it, as in
service. Tokens are counted when they are delivered, so answers may be of any lengths. Knows nothing of
engines.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from paceline.errors import PacelineError


@dataclass(slots=True)
class Trace:
    """One request as its client saw it; times in seconds on the run's clock.

    A piece is what came at once: `num` tokens, or a share of the answer where only its total is known.
    """

    begin: float
    pieces: list[tuple[float, float]] = field(default_factory=list)  # (time, num)
    end: float | None = None  # None: given up

    @property
    def num_tokens(self) -> float:
        return sum(num for _, num in self.pieces)

    @property
    def first(self) -> float | None:
        """When the answer began, or ended without anything to read; None: neither was seen."""
        return self.pieces[0][0] if self.pieces else self.end

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first piece; None for answers without a second one."""
        if self.end is None or len(self.pieces) < 2:
            return None
        first_time, first_num = self.pieces[0]
        return (self.pieces[-1][0] - first_time) / (self.num_tokens - first_num)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counters of drafting over a run: those of `SpeculationStats`, or a server's metrics.

    `rounds_by_depth` counts rows by the depth they ran at, depth 0 included; empty where nobody says.
    """

    num_rounds: int  # in which something was drafted
    num_drafted: int
    num_accepted: int
    accepted_per_pos: tuple[int, ...]
    rounds_by_depth: tuple[int, ...] = ()

    def since(self, earlier: Speculation) -> Speculation:
        """What was counted after `earlier`."""
        return Speculation(
            self.num_rounds - earlier.num_rounds,
            self.num_drafted - earlier.num_drafted,
            self.num_accepted - earlier.num_accepted,
            _minus(self.accepted_per_pos, earlier.accepted_per_pos),
            _minus(self.rounds_by_depth, earlier.rounds_by_depth),
        )

    def __add__(self, other: Speculation) -> Speculation:
        return Speculation(
            self.num_rounds + other.num_rounds,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            _plus(self.accepted_per_pos, other.accepted_per_pos),
            _plus(self.rounds_by_depth, other.rounds_by_depth),
        )

    @property
    def accept_len(self) -> float | None:
        """Tokens a drafted round, the bonus token included. None without such rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None

    @property
    def mean_depth(self) -> float | None:
        """Drafts let a row and step; None where nobody counts the rounds at depth 0."""
        num_rows = sum(self.rounds_by_depth)
        if not num_rows:
            return None
        return sum(depth * num for depth, num in enumerate(self.rounds_by_depth)) / num_rows

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Of the rounds that drafted this far, the share whose draft at this position was accepted."""
        shares = []
        for i, accepted in enumerate(self.accepted_per_pos):
            num = sum(self.rounds_by_depth[i + 1 :]) if self.rounds_by_depth else self.num_rounds
            if not num:
                break
            shares.append(accepted / num)
        while shares and not self.rounds_by_depth and shares[-1] == 0:
            shares.pop()  # a server that names positions it never drafted
        return shares


def _minus(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip_longest(left, right, fillvalue=0))


def _plus(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(left, right, fillvalue=0))


@dataclass(frozen=True, slots=True)
class Sample:
    """One arm, one round."""

    rate: float  # tokens a second, over all clients
    seconds: float  # of the window
    num_tokens: float  # in it
    tpot: float  # seconds a token of one request, median over requests
    ttft: float  # seconds to the first token, likewise
    num_preemptions: int = 0
    speculation: Speculation | None = None
    num_steps: int | None = None  # of the engine, inside the window and before it; None: nobody counts them


def sample(
    traces: Sequence[Trace],
    concurrency: int,
    num_preemptions: int = 0,
    speculation: Speculation | None = None,
    num_steps: int | None = None,
) -> Sample:
    """What a run comes to.

    Args:
        traces: of what was submitted, in that order; the first `concurrency` at once, a client each, and
            then one for each that ended, until a client found no job left.

    Raises:
        PacelineError: there is no such window.
    """
    firsts = [first for trace in traces[:concurrency] if (first := trace.first) is not None]
    ends = sorted(trace.end for trace in traces if trace.end is not None)
    place = len(traces) - concurrency
    if len(firsts) < concurrency or place >= len(ends) or ends[place] <= max(firsts):
        raise PacelineError(
            f"{concurrency} clients were never busy together: answers are too short (--answer-len)"
        )
    begin, end = max(firsts), ends[place]
    num_tokens = sum(num for trace in traces for time, num in trace.pieces if begin < time <= end)
    if not num_tokens:
        raise PacelineError("answers are empty: the model ends them at once")
    paces = [trace.tpot for trace in traces if trace.tpot is not None]
    waits = [trace.pieces[0][0] - trace.begin for trace in traces if trace.pieces]
    return Sample(
        rate=num_tokens / (end - begin),
        seconds=end - begin,
        num_tokens=num_tokens,
        tpot=statistics.median(paces) if paces else concurrency * (end - begin) / num_tokens,
        ttft=statistics.median(waits),
        num_preemptions=num_preemptions,
        speculation=speculation,
        num_steps=num_steps,
    )
