"""The mailbox between the engine's outputs and the one reader of a request.

The receiving side never waits: it drops deltas here, and a slow reader finds them joined, one per
choice. So a mailbox never holds more than the rest of its own answer, which `max_tokens` bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from paceline.errors import PacelineError
from paceline.output import Delta, merge
from paceline.request import EngineRequest


class Generation:
    """All choices of one accepted request, read as batches of deltas."""

    def __init__(self, group: str, requests: Sequence[EngineRequest]) -> None:
        self.group = group
        self.prompt_len = len(requests[0].prompt_ids)
        self.open_ids = {r.request_id for r in requests}  # choices still running
        self._mail: dict[int, list[Delta]] = {}  # by choice
        self._changed = asyncio.Event()
        self._error: PacelineError | None = None
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody reads any more."""
        return self._cancelled

    def deliver(self, delta: Delta) -> None:
        """Leave a delta for the reader."""
        if delta.finish_reason is not None:
            self.open_ids.discard(delta.request_id)
        if delta.error is not None:
            self.fail(PacelineError(delta.error))
            return
        self._mail.setdefault(delta.choice, []).append(delta)
        self._changed.set()

    def fail(self, error: PacelineError) -> None:
        """End the reading with `error`; the first one counts."""
        self._error = self._error or error
        self._changed.set()

    def cancel(self) -> None:
        """End the reading: the client is gone."""
        self._cancelled = True
        self._mail.clear()
        self._changed.set()

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """What is new, at most one delta per choice, until every choice has finished or nobody reads.

        Raises:
            PacelineError: the request failed; EngineDeadError when the whole engine did.
        """
        while not self._cancelled:
            if self._mail:
                mail, self._mail = self._mail, {}
                self._changed.clear()
                yield [merge(mail[choice]) for choice in sorted(mail)]
            elif self._error is not None:
                raise self._error
            elif not self.open_ids:
                return
            else:
                await self._changed.wait()
                self._changed.clear()

    async def collect(self) -> list[Delta]:
        """The whole answer: one delta per choice, in order. Empty once cancelled."""
        deltas: dict[int, list[Delta]] = {}
        async for batch in self.batches():
            for delta in batch:
                deltas.setdefault(delta.choice, []).append(delta)
        return [] if self._cancelled else [merge(deltas[choice]) for choice in sorted(deltas)]
