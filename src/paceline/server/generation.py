"""The mailbox between the engine's outputs and the one reader of a request.

The receiving side never waits: it drops deltas here, and a slow reader finds them joined, one per
choice. A mailbox counts the tokens that wait in it; how many may is for its owner to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from paceline.errors import PacelineError, RequestError
from paceline.output import Delta, merge
from paceline.request import EngineRequest
from paceline.server.metrics import Arrival


class Generation:
    """All choices of one accepted request, read as batches of deltas."""

    def __init__(self, group: str, requests: Sequence[EngineRequest]) -> None:
        self.group = group
        self.prompt_len = len(requests[0].prompt_ids)
        self.open_ids = {r.request_id for r in requests}  # choices still running
        self.num_unread = 0  # tokens that wait for the reader
        self._arrivals: list[Arrival] = []
        self._mail: dict[int, list[Delta]] = {}  # by index of the choice
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
        self._arrivals.append(Arrival.of(delta, time.monotonic()))
        if delta.error is not None:
            blamed = delta.error_param is not None
            self.fail(RequestError(delta.error_param, delta.error) if blamed else PacelineError(delta.error))
            return
        self._mail.setdefault(delta.index, []).append(delta)
        self.num_unread += len(delta.token_ids)
        self._changed.set()

    def take_arrivals(self) -> list[Arrival]:
        """When what came since the last call, read or not."""
        taken, self._arrivals = self._arrivals, []
        return taken

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
                self.num_unread = 0
                self._changed.clear()
                yield [merge(mail[index]) for index in sorted(mail)]
            elif self._error is not None:
                raise self._error
            elif not self.open_ids:
                return
            else:
                await self._changed.wait()
                self._changed.clear()

    async def collect(self, batches: AsyncIterator[list[Delta]]) -> list[Delta]:
        """The whole answer from its `batches`: one delta per choice, in order. Empty once cancelled."""
        deltas: dict[int, list[Delta]] = {}
        async for batch in batches:
            for delta in batch:
                deltas.setdefault(delta.index, []).append(delta)
        return [] if self._cancelled else [merge(deltas[index]) for index in sorted(deltas)]
