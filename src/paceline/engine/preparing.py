"""Requests that cannot start yet: what they need is being made in the background (grammars compile).

They wait here, beside the queue, so that one that takes long keeps nobody behind it from running.
Knows futures, not what is being made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from paceline.errors import QueueFullError
from paceline.request import EngineRequest, RequestOutput

PATIENCE = 0.01  # seconds that an otherwise idle step waits; a request that comes meanwhile waits as long


class Preparing:
    """Requests with their futures, in the order they came."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[EngineRequest, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: EngineRequest, future: Future[Any]) -> None:
        """Keep the request until its future is done."""
        self._waiting[request.request_id] = (request, future)

    def drop(self, request_id: str) -> RequestOutput | None:
        """Give a request up; its final output, or None if it is not here."""
        if self._waiting.pop(request_id, None) is None:
            return None
        return RequestOutput(request_id, finish_reason="abort")

    def wait(self) -> None:
        """Sleep until a future is done, but not for long."""
        wait([future for _, future in self._waiting.values()], PATIENCE, FIRST_COMPLETED)

    def start_ready(self, start: Callable[[EngineRequest], object]) -> list[RequestOutput]:
        """Hand those that are done to `start`; those for which it raises QueueFullError wait on.

        Returns:
            The final outputs of those that cannot start.
        """
        failed: list[RequestOutput] = []
        for request_id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                try:
                    start(request)
                except QueueFullError:  # it was not full when the request came, so it is not refused now
                    continue
            else:
                failed.append(
                    RequestOutput(request_id, finish_reason="error", error=str(error), error_param="grammar")
                )
            del self._waiting[request_id]
        return failed

    def abandon(self, reason: str) -> list[RequestOutput]:
        """End all of them by an error."""
        request_ids = list(self._waiting)
        self._waiting.clear()
        return [RequestOutput(i, finish_reason="error", error=reason) for i in request_ids]
