"""One HTTP connection: uvicorn's own, with a bound on the bytes that come before a body.

The parser under it has none: without this a header without an end would fill the memory.
"""

from __future__ import annotations

import http

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.server.responses import ErrorBody, ErrorDetail


def connection_class(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """The protocol that uvicorn makes one of for each connection."""

    class Connection(HttpToolsProtocol):
        """Answers 431 to a head that is too large, and closes."""

        _in_head = True
        _head_len = 0  # bytes received of a head that is not complete
        _header_len = 0  # bytes of the headers that are

        def data_received(self, data: bytes) -> None:
            self._head_len += len(data)
            super().data_received(data)
            if self._in_head and self._head_len > max_header_bytes and not self.transport.is_closing():
                self._refuse()

        def on_message_begin(self) -> None:
            self._in_head, self._header_len = True, 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            self._header_len += len(name) + len(value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head, self._head_len = False, 0
            if len(self.url) + self._header_len > max_header_bytes:
                self._refuse()
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._head_len = 0
            if not self.transport.is_closing():
                super().on_message_complete()

        def _refuse(self) -> None:
            status = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            message = f"the request line and headers are larger than {max_header_bytes} bytes"
            body = msgspec.json.encode(ErrorBody(ErrorDetail(message, "invalid_request_error", None, None)))
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Connection
