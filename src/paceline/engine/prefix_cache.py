"""The prefix cache as requests see it: pages to begin with, and pages that become others' to begin with.

Knows neither when a request starts nor what is in a page; naming (`prefix`) and keeping (`pages`) are
done elsewhere.
"""

from __future__ import annotations

from paceline.engine.pages import PagePool
from paceline.engine.prefix import PrefixHasher
from paceline.engine.sequence import Sequence


class PrefixCache:
    """Finds and publishes pages of one pool, unless it is not `enabled`."""

    def __init__(self, pool: PagePool, *, enabled: bool) -> None:
        self._pool = pool
        self._hasher = PrefixHasher(pool.page_size)
        self._enabled = enabled

    def match(self, seq: Sequence) -> list[int]:
        """Cached pages of its known tokens but the newest, which must be computed to go on from it.

        None for a prompt whose logprobs are asked for: they need every position computed.
        """
        if not self._enabled or seq.lacks_prompt_logprobs:
            return []
        num_pages = (seq.known_len - 1) // self._pool.page_size
        self._hasher.extend(seq.digests, seq.token_ids, num_pages)
        return self._pool.match(seq.digests)

    def publish(self, seq: Sequence) -> None:
        """Let prompts hit the pages that are now full of committed, computed tokens."""
        num_full = seq.computed_len // self._pool.page_size
        if num_full == seq.num_published or not self._enabled:
            return
        self._hasher.extend(seq.digests, seq.token_ids, num_full)
        for i in range(seq.num_published, num_full):
            self._pool.publish(seq.page_ids[i], seq.digests[i])
        seq.num_published = num_full
