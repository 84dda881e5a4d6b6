"""The pool of K/V pages: who holds each, which are free, and which a new prompt may hit.

    page 0           the trash page: the device sends writes beyond a row's reserved pages here
    refs > 0         held by that many block tables; a full page with a digest may be shared
    refs == 0        cached (has a digest): idle, may be hit, evicted least recently used first
                     else: on the free list

A page is *published* under the digest of its prefix (see `prefix`) once all of its tokens are
committed and computed; from then on nobody writes to it until it is evicted. Two requests that
compute the same page at once both keep theirs; the first to finish it publishes, the other copy
stays private and is simply freed in the end.

Knows page ids and digests only: nothing of tokens, requests, rows or K/V. Every method costs as
much as the pages it touches, except `check`, which looks at all.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from paceline.errors import ConfigError

TRASH_PAGE = 0


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself: a bug of ours, never a caller's fault."""


def ensure(condition: bool, message: str) -> None:
    """Raise `InvariantError(message)` unless `condition`; unlike `assert`, under -O too."""
    if not condition:
        raise InvariantError(message)


class PagePool:
    """Hands out pages `1 .. num_pages - 1` of `page_size` tokens each.

    Raises:
        ConfigError: `num_pages` leaves no page beside the trash page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"kv_cache_tokens is too small: the pool needs at least 2 pages, got {num_pages}"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))  # a stack: the page last freed is warm
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; next to evict first

    @property
    def capacity(self) -> int:
        """Pages that can be held, the trash page not among them."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give now: free ones and idle cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that a block table holds."""
        return self.capacity - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages under a digest, held or idle."""
        return len(self._index)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Take `num_pages` pages, evicting idle cached ones when none is free.

        The caller has looked at `num_available` first.
        """
        assert num_pages <= self.num_available, f"{num_pages} pages wanted, {self.num_available} available"
        taken = tuple(self._free.pop() if self._free else self._evict() for _ in range(num_pages))
        for page in taken:
            self._refs[page] = 1
        return taken

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Cached pages of the longest known beginning of a chain; takes none of them."""
        hits: list[int] = []
        for digest in digests:
            page = self._index.get(digest)
            if page is None:
                break
            hits.append(page)
        return hits

    def num_idle(self, page_ids: Iterable[int]) -> int:
        """How many of these pages `num_available` counts: those that sharing would take away."""
        return sum(self._refs[page] == 0 for page in page_ids)

    def share(self, page_ids: Iterable[int]) -> None:
        """Hold cached pages, as `match` found them, once more."""
        for page in page_ids:
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1

    def publish(self, page: int, digest: bytes) -> None:
        """Let prompts hit a held page that is full of committed, computed tokens.

        A no-op if another page has the digest.
        """
        assert self._refs[page] > 0, f"page {page} is published but not held"
        assert self._digests[page] is None, f"page {page} is published twice"
        if digest not in self._index:
            self._index[digest] = page
            self._digests[page] = digest

    def release(self, page_ids: Sequence[int]) -> None:
        """Give a block table back, in its order."""
        # Last page first, so that eviction eats a prefix from its end and what is left can still be hit.
        for page in reversed(page_ids):
            self._refs[page] -= 1
            assert self._refs[page] >= 0, f"page {page} is released more often than held"
            if self._refs[page]:
                continue
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        digest = self._digests[page]
        assert digest is not None
        del self._index[digest]
        self._digests[page] = None
        return page

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Prove that every page is held as often as `block_tables` say, or free, or idle and cached.

        Raises:
            InvariantError: names the first page that is not, and how.
        """
        held: Counter[int] = Counter()
        for table in block_tables:
            ensure(len(set(table)) == len(table), f"a block table holds a page twice: {list(table)}")
            held.update(table)
        outside = [page for page in held if not TRASH_PAGE < page < self.num_pages]
        ensure(not outside, f"a block table holds pages outside 1..{self.capacity}: {outside}")
        free = Counter(self._free)
        ensure(free[TRASH_PAGE] == 0 and TRASH_PAGE not in self._idle, "the trash page is on a list")
        for page in range(1, self.num_pages):
            refs, digest = self._refs[page], self._digests[page]
            ensure(
                refs == held[page],
                f"page {page} counts {refs} holders, block tables hold it {held[page]} times",
            )
            ensure(refs < 2 or digest is not None, f"page {page} has {refs} holders but no digest")
            ensure(digest is None or self._index.get(digest) == page, f"page {page} is not under its digest")
            is_free, is_idle = refs == 0 and digest is None, refs == 0 and digest is not None
            ensure(
                free[page] == int(is_free), f"page {page} is {free[page]} times on the free list ({refs=})"
            )
            ensure(
                (page in self._idle) == is_idle, f"page {page} is wrongly in or out of the idle set ({refs=})"
            )
        num_digests = sum(digest is not None for digest in self._digests)
        ensure(len(self._index) == num_digests, f"{len(self._index)} digests lead to {num_digests} pages")
