"""Refuses a grammar before its request reaches the engine, and off the event loop.

Knows nothing of the fields that a grammar came from.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from paceline.grammar import validate
from paceline.request import Grammar

_NUM_THREADS = 2
_MAX_KNOWN = 256


class GrammarCheck:
    """Remembers the grammars that passed last."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._passed: OrderedDict[Grammar, None] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises RequestError, with `param` "grammar", when it cannot be compiled within the limits."""
        if grammar not in self._passed:
            await asyncio.get_running_loop().run_in_executor(self._threads, validate, grammar)
        self._passed[grammar] = None
        self._passed.move_to_end(grammar)
        if len(self._passed) > _MAX_KNOWN:
            self._passed.popitem(last=False)
