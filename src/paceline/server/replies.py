"""Plain ASGI replies for this server's two kinds of answer: JSON, and a stream of server-sent events.

Both watch for the client to hang up, while they wait and while they send. Starlette's own streaming
response spends a task group and two tasks a request on that, and a call through each layer a chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_encode = msgspec.json.Encoder().encode


def json_reply(content: object, status: int = 200) -> Response:
    """A JSON body."""
    return Response(_encode(content), status, media_type="application/json")


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def on_disconnect(receive: Receive, action: Callable[[], None]) -> AsyncIterator[None]:
    """Call `action` when the client hangs up within the block. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        action()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class EventStream(Response):
    """Sends what `events` yields, as it comes; `close` is called once, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with on_disconnect(receive, self._close):
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                async for chunk in self._events:
                    if not chunk:  # to ASGI an empty piece is nothing; to us a step that only held text back
                        continue
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
