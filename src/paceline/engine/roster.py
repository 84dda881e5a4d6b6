"""Who waits, who runs, who is leaving, and the rows and pages that they hold.

Older requests come first everywhere: out of pages, the youngest running one gives up its pages, waits at the
front of the queue and is computed again later, so the oldest always gets on and nothing is lost. A request
that ends or is preempted with a step in flight keeps its row and its pages until that step is committed:
nobody else's K/V can be written over.

Knows nothing of budgets, depths or results.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from paceline.engine.pages import PagePool, ensure
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import Sequence, Status
from paceline.step import RowStart


class Roster:
    """Moves requests, rows and pages; each request is in one place at a time, or in none once it is gone."""

    def __init__(self, pool: PagePool, prefixes: PrefixCache, num_rows: int) -> None:
        self._pool, self._prefixes, self._num_rows = pool, prefixes, num_rows
        self._free_rows = list(range(num_rows))  # a heap: low rows first keeps batches compact
        self._waiting: deque[Sequence] = deque()  # oldest first, all younger than every running one
        self._running: dict[str, Sequence] = {}  # oldest first
        self._leaving: set[Sequence] = set()  # preempted or ended, with a step in flight
        self._ended_rows: list[int] = []  # to tell the worker with the next plan
        self.num_preemptions = 0

    @property
    def running(self) -> list[Sequence]:
        """Who runs at this moment, oldest first."""
        return list(self._running.values())

    @property
    def num_running(self) -> int:
        """Requests that hold a row and go on."""
        return len(self._running)

    @property
    def first(self) -> Sequence | None:
        """Who comes next; None: nobody waits, or there is no row."""
        return self._waiting[0] if self._waiting and self._free_rows else None

    @property
    def coming(self) -> list[Sequence]:
        """Who comes next, oldest first: as many as there are rows."""
        return list(itertools.islice(self._waiting, len(self._free_rows)))

    @property
    def is_held_up(self) -> bool:
        """Whether a preempted request is on its way to the front: older than the queue, nobody passes it."""
        return any(seq.status is Status.PREEMPTED for seq in self._leaving)

    def enter(self, seq: Sequence) -> None:
        """A new request waits."""
        self._waiting.append(seq)

    def admit(self, chunk_budget: int) -> RowStart | None:
        """Give `first` a row and its cached pages, if there are pages for its first chunk."""
        seq = self._waiting[0]
        hits = self._prefixes.match(seq)
        hit_len = len(hits) * self._pool.page_size
        # A preempted request comes back when all it knows fits, or it would be preempted again for nothing.
        first_len = seq.known_len if seq.num_preemptions else min(seq.known_len, hit_len + chunk_budget)
        missing = self._pool.pages_for(first_len) - len(hits)
        if missing > self._pool.num_available - self._pool.num_idle(hits):
            return None
        self._pool.share(hits)
        self._waiting.popleft()
        self._running[seq.request_id] = seq
        start = seq.occupy(heapq.heappop(self._free_rows), hits, hit_len)
        if not seq.num_preemptions:
            seq.num_cached_tokens = hit_len
        return start

    def reserve(self, seq: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Lengthen a row's block table to `num_tokens` tokens, preempting the youngest for it.

        None: it was itself the youngest, or it sits this step out for pages that one in flight holds.
        """
        missing = self._pool.pages_for(num_tokens) - len(seq.page_ids)
        if missing <= 0:
            return ()
        while missing > self._pool.num_available:
            if self._leaving:
                return None  # younger rows cannot profit: a decoding row lacks one page at most
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            if youngest is seq:
                return None
        new_page_ids = self._pool.allocate(missing)
        seq.page_ids.extend(new_page_ids)
        return new_page_ids

    def end(self, seq: Sequence) -> None:
        """A request is over; row and pages follow when no step is in flight."""
        if seq.status is Status.WAITING:
            self._waiting.remove(seq)
            seq.status = Status.ENDED
        else:
            self._leave(seq, Status.ENDED)

    def settled(self, seq: Sequence) -> None:
        """A step of this request has come back."""
        if seq.num_in_flight == 0 and seq in self._leaving:
            self._vacate(seq)

    def nothing_in_flight(self) -> None:
        """No step will come back any more."""
        for seq in list(self._leaving):
            self._vacate(seq)

    def take_ended_rows(self) -> tuple[int, ...]:
        """Rows given back since this was asked."""
        ended, self._ended_rows = tuple(self._ended_rows), []
        return ended

    def check(self) -> list[Sequence]:
        """Prove that pages, rows and queue agree with each other; returns who holds something.

        Raises:
            InvariantError: names what does not.
        """
        holders = [*self._running.values(), *self._leaving]
        self._pool.check(seq.page_ids for seq in holders)
        rows = sorted([*self._free_rows, *(seq.row for seq in holders)])
        ensure(rows == list(range(self._num_rows)), f"rows are lost or doubled: {rows}")
        for seq in self._waiting:
            ensure(not seq.page_ids, f"request {seq.request_id} waits and holds pages {seq.page_ids}")
        ages = [seq.arrival for seq in [*self._running.values(), *self._waiting]]
        ensure(ages == sorted(ages), f"requests are out of order: arrivals {ages}")
        for seq in holders:
            seq.check(self._pool.page_size)
        return holders

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._leave(seq, Status.PREEMPTED)

    def _leave(self, seq: Sequence, status: Status) -> None:
        """Stop running, for good or for now."""
        seq.status = status
        self._running.pop(seq.request_id, None)
        self._leaving.add(seq)
        self.settled(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Take row and pages back from a request that leaves."""
        self._leaving.remove(seq)
        self._pool.release(seq.page_ids)
        heapq.heappush(self._free_rows, seq.row)
        self._ended_rows.append(seq.row)
        seq.vacate()
        if seq.status is Status.PREEMPTED:
            seq.status = Status.WAITING
            self._waiting.appendleft(seq)
