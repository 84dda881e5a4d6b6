"""Warm-up: depths that might pay run out of turn until it is known, from served rounds, whether they do.

*Cost*, per load (bucket of rows). A calibration may be wrong, and a depth that looks too dear would never
be corrected. So each depth is served in `NUM_VISITS` timed rounds, two at a time, and in `NUM_CLOSE` if it
seems nearly as good as the best. A depth that could not pay even if its cost were `INSURANCE` times less
than predicted, and acceptance at its upper bound, is left out; one that cannot be timed is given up.

*Acceptance*. As long as fewer than `NUM_SEEN` rounds say how drafts are accepted, and drafting does not pay
by the estimate but would at its upper bound, rows draft `_LONG` rounds at a time, all but the first of
which count.

Warm-up rounds are interleaved, with `SPACING` rounds as chosen between them: a load that is met for the
first time runs at its predicted best at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

NUM_VISITS = 5
NUM_CLOSE = 16
CLOSE = 0.95  # of the best rate
NUM_SEEN = 60.0
INSURANCE = 3.0
SPACING = 5
_SHORT, _LONG = 2, 4  # rounds at a time, for cost and for acceptance
_MAX_RUNS = 10  # of a depth, for cost
_MAX_LONG_RUNS = 40
_DONE = 50  # rounds until it is asked again whether something is to be learnt


class _Site:
    __slots__ = ("current", "left", "next_at", "num_long", "runs")

    def __init__(self, now: int) -> None:
        self.runs: dict[int, int] = {}
        self.current = self.left = self.num_long = 0
        self.next_at = now + SPACING


class Warmup:
    """Which depth to run out of turn. Rounds are counted by the caller."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = depths
        self._sites: dict[int, _Site] = {}

    def is_due(self, rows: int, now: int) -> bool:
        """Whether `depth` might give one in round `now`."""
        site = self._sites.setdefault(rows, _Site(now))
        return site.left > 0 or now >= site.next_at

    def depth(
        self,
        rows: int,
        now: int,
        num_visits: Callable[[int], int],
        wanted: Callable[[int], int],
        in_doubt: Callable[[], int | None],
    ) -> int | None:
        """The depth to warm up in round `now`, in which it is due; None: run as chosen.

        Args:
            rows: bucket of rows. num_visits: timed rounds that a depth has had there. wanted: how many it
            should have. in_doubt: the depth that might pay if acceptance is better than it seems; None:
            none, or it is known.
        """
        site = self._sites.setdefault(rows, _Site(now))
        if site.left:
            site.left -= 1
            return site.current
        site.next_at = now + SPACING
        lacking = [
            (num_visits(depth), depth)
            for depth in self._depths
            if num_visits(depth) < NUM_CLOSE
            and site.runs.get(depth, 0) < _MAX_RUNS
            and num_visits(depth) < wanted(depth)
        ]
        if lacking:
            _, depth = min(lacking)
            site.runs[depth] = site.runs.get(depth, 0) + 1
            return self._begin(site, depth, _SHORT)
        doubtful = in_doubt() if site.num_long < _MAX_LONG_RUNS else None
        if doubtful is None:
            site.next_at = now + _DONE
            return None
        site.num_long += 1
        return self._begin(site, doubtful, _LONG)

    @staticmethod
    def _begin(site: _Site, depth: int, num_rounds: int) -> int:
        site.current, site.left = depth, num_rounds - 1
        site.next_at += num_rounds
        return depth
