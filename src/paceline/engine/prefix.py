"""Names for full pages of tokens: a chain of digests, so that equal prefixes have equal names.

A page's digest covers its own tokens and its parent's digest, hence every token before it. Two
different prefixes with one digest would let one user read another's K/V, so digests are matched
without comparing tokens only because that cannot happen: BLAKE2b with 128 bits makes an accident
among 2**32 pages less likely than 2**-64, and the secret key, drawn at start, leaves nobody
anything to search for a collision with. (Python's `hash` of a tuple of ints has 64 bits, no key
and known collisions.)

Knows nothing of page ids, requests or who holds what.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_SIZE = 16  # bytes


class PrefixHasher:
    """Extends chains of page digests; digests of two hashers have nothing in common."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._key = secrets.token_bytes(DIGEST_SIZE)

    def extend(self, digests: list[bytes], token_ids: Sequence[int], num_pages: int) -> None:
        """Lengthen `digests`, the chain of `token_ids`'s first pages, to `num_pages` of them.

        Only the tokens of the added pages are read. A chain that is long enough stays as it is.
        """
        for page in range(len(digests), num_pages):
            tokens = array("q", token_ids[page * self._page_size : (page + 1) * self._page_size])
            assert len(tokens) == self._page_size, f"page {page} is not full"
            parent = digests[-1] if digests else bytes(DIGEST_SIZE)
            digests.append(
                blake2b(parent + tokens.tobytes(), digest_size=DIGEST_SIZE, key=self._key).digest()
            )
