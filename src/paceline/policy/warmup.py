"""Warm-up: depths that might pay run out of turn until it is known, from served rounds, whether they do.

*Cost*, per load (bucket of rows). A calibration may be wrong, and a depth that looks too dear would never
be corrected. So a depth is served in a timed round of its own, as long as its rate, in tokens a second, might
beat the best by more than the dead band:

    rate(k) reach(n) > best (1 + dead band)      n rounds of k were timed at this load
    reach(0) = insurance (`doubt`), with acceptance at its upper bound;   reach(n) = exp(2 noise / sqrt(n))

where plain decoding always has the greatest insurance: depths whose costs are wrong alike confirm each
other, and who drafts has to know what plain decoding takes. A depth is served so at most `NUM_CLOSE` times.
One round is enough for a depth that does as expected. If the first ones surprise by more than noise, there
are `NUM_SURE` of them, so that a round in which the machine stood still prices nothing out. A depth that
cannot be timed is given up.

*Acceptance*, of a drafter, at whatever load. As long as too few rounds say how drafts are accepted
(`Acceptance.is_known`), and drafting does not pay by the estimate but would at its upper bound, rows draft
`LONG` rounds at a time, all but the first of which count. Where drafting pays, the next deeper depth is tried
like this until rows have done so in `NUM_TRIED` rounds, if it would be best at its upper bound.

*Again.* The machine changes, and what a depth cost relative to others may have been learnt in a bad moment.
So a depth that by the estimate makes a share `gap` fewer tokens a second than the choice is served again
every gap / `SHARE` rounds, but at most every `SPACING_AGAIN`: close rivals soon, others rarely, and looking
at one costs the share `SHARE` at most. Those behind by more than `FAR_BEHIND` are left alone. After each the
choice is made anew, as `SPACING` rounds later this is asked again, unless it was behind by more than `CLOSE`.

Warm-up rounds are interleaved, with `SPACING` rounds as chosen between them: a load that is met for the
first time runs at its predicted best at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

NUM_CLOSE = 8
NUM_SURE = 3
NUM_TRIED = 32
SPACING = 5
_SIGMAS = 2.0
_SURPRISE = 3.0  # times the noise
SHARE = 0.00025
SPACING_AGAIN = 160  # more than the rounds within which a cell counts as served again
FAR_BEHIND = 0.2
CLOSE = 0.05  # behind: nearer rivals may turn out to be the best
LONG = 4  # rounds at a time, for acceptance
_MAX_RUNS = 20  # of a depth, for cost
_MAX_LONG_RUNS = 40
_DONE = 50  # rounds until it is asked again whether something is to be learnt


def reach(num_visits: int, insurance: float, noise: float) -> float:
    """How many times better than estimated a depth's rate may be, as far as its cost goes."""
    return math.exp(_SIGMAS * noise / math.sqrt(num_visits)) if num_visits else insurance


def is_sure(num_visits: int, surprise: float, noise: float) -> bool:
    """Whether so many rounds say what a depth costs, or it takes more to tell a wrong table from a stall."""
    return num_visits >= NUM_SURE or abs(surprise) <= _SURPRISE * noise


class _Site:
    __slots__ = ("current", "last_at", "left", "next_at", "num_long", "runs")

    def __init__(self, now: int) -> None:
        self.runs: dict[int, int] = {}
        self.last_at: dict[int, int] = {}  # round in which a depth ran
        self.current = self.left = self.num_long = 0
        self.next_at = now + SPACING


class Warmup:
    """Which depth to run out of turn. Rounds are counted by the caller."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        self._sites: dict[int, _Site] = {}

    def is_due(self, rows: int, now: int) -> bool:
        """Whether `depth` might give one in round `now`."""
        return self.next_at(rows, now) == now

    def next_at(self, rows: int, now: int) -> int:
        """The first round, from `now` on, in which it is due."""
        site = self._sites.setdefault(rows, _Site(now))
        return now if site.left else max(now, site.next_at)

    def depth(
        self,
        rows: int,
        now: int,
        num_visits: Callable[[int], int],
        may_pay: Callable[[int], bool],
        in_doubt: Callable[[], int | None],
        gap: Callable[[int], float | None],
    ) -> int | None:
        """The depth to warm up in round `now`, in which it is due; None: run as chosen.

        Args:
            rows: bucket of rows.
            num_visits: timed rounds that a depth has had there, of which `NUM_CLOSE` are enough.
            may_pay: whether a depth might be the best for all that is known of its cost.
            in_doubt: the depth that might pay if acceptance is better than it seems; None: there is none.
            gap: by what share a depth makes fewer tokens a second than the choice, by the estimate; None: it
                is the choice.
        """
        site = self._sites.setdefault(rows, _Site(now))
        if site.left:
            site.left -= 1
            return site.current
        site.next_at = now + SPACING
        doubtful = in_doubt() if site.num_long < _MAX_LONG_RUNS else None
        if doubtful is not None:
            site.num_long += 1
            return self._begin(site, doubtful, LONG, now)
        lacking = [
            (num_visits(depth), depth)
            for depth in self._depths
            if num_visits(depth) < NUM_CLOSE and site.runs.get(depth, 0) < _MAX_RUNS and may_pay(depth)
        ]
        if not lacking:
            return self._again(site, now, num_visits, gap)
        _, depth = min(lacking)  # shallow ones first: they are cheap, and what they show holds for their like
        site.runs[depth] = site.runs.get(depth, 0) + 1
        return self._begin(site, depth, 1, now)

    def _again(
        self,
        site: _Site,
        now: int,
        num_visits: Callable[[int], int],
        gap: Callable[[int], float | None],
    ) -> int | None:
        """The depth that is due to be served again, the one that has been for longest."""
        gaps = {depth: gap(depth) for depth in self._depths}
        near = {depth: behind for depth, behind in gaps.items() if behind is not None and behind < FAR_BEHIND}
        spans = {depth: max(SPACING_AGAIN, round(behind / SHARE)) for depth, behind in near.items()}
        dues = {depth: site.last_at.setdefault(depth, now) + span for depth, span in spans.items()}
        first = min(dues, key=dues.__getitem__, default=None)
        if first is None or dues[first] > now:
            site.next_at = min([now + _DONE, *dues.values()])
            return None
        dues[first] = now + spans[first]
        self._begin(site, first, 1, now)
        if num_visits(first) >= NUM_CLOSE and near[first] > CLOSE:  # else it may change the choice at once
            site.next_at = max(site.next_at, min([now + _DONE, *dues.values()]))
        return first

    @staticmethod
    def _begin(site: _Site, depth: int, num_rounds: int, now: int) -> int:
        site.current, site.left = depth, num_rounds - 1
        site.last_at[depth] = now
        site.next_at += num_rounds
        return depth
