"""What every request passes before it reaches the application: the API key and the size of its body.

Also tells clients that were refused for the moment when to come again. Knows neither routes, but for
those that need no key, nor what a body means.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import PacelineError
from paceline.server.failures import RETRY_AFTER, BadKeyError, BodyTooLargeError, body_of, status_of
from paceline.server.replies import json_reply

OPEN_PATHS = ("/health", "/")  # load balancers have no keys; the page at / holds nothing, and asks for one

Headers = Iterable[tuple[bytes, bytes]]


class Gate:
    """An ASGI application around another.

    Args:
        app: what is behind the gate.
        api_keys: any of them opens it; none: it is open.
        max_body_bytes: of a request.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error: PacelineError | None = None
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope["headers"]):
            error = BadKeyError()
        elif _content_length(scope["headers"]) > self._max_body_bytes:
            error = self._too_large()
        if error is None:
            await self._app(scope, self._counted(receive), _with_retry_after(send))
            return
        reply = json_reply(body_of(error), status_of(error))
        if isinstance(error, BadKeyError):
            reply.headers["WWW-Authenticate"] = "Bearer"
        await reply(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, sent = _header(headers, b"authorization").partition(b" ")
        sent = sent.strip()
        # Every key is compared, to its end: the time taken tells nothing of how near a guess was.
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _counted(self, receive: Receive) -> Receive:
        """A body may come in chunks without a length: count it, and refuse where it grows too long."""
        size = 0

        async def counting() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise self._too_large()
            return message

        return counting

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(None, f"the body is larger than {self._max_body_bytes} bytes")


def _with_retry_after(send: Send) -> Send:
    # Not async itself: it is on the path of every chunk of every stream.
    def sending(message: Message) -> object:
        if message["type"] == "http.response.start" and (seconds := RETRY_AFTER.get(message["status"])):
            headers = [*message["headers"], (b"retry-after", str(seconds).encode())]
            message = {**message, "headers": headers}
        return send(message)

    return sending  # type: ignore[return-value]


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for key, value in headers if key == name), b"")


def _content_length(headers: Headers) -> int:
    """0 if there is none; the HTTP parser has refused anything but digits."""
    return int(_header(headers, b"content-length") or 0)
