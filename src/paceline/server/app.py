"""The HTTP application: routes, and the path of one request through the others' parts.

    body -> protocol record -> prompt ids -> engine requests -> generation -> reply

Knows nothing of processes or sockets; the engine client is given to it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from paceline._version import __version__
from paceline.errors import PacelineError, RequestError
from paceline.prepare import prepare
from paceline.server.bridge import EngineClient
from paceline.server.failures import BodyTooLargeError, UnknownModelError, body_of, status_of
from paceline.server.generation import Generation
from paceline.server.protocol import ChatRequest, CompletionRequest, ErrorBody, ErrorDetail, GenerationRequest
from paceline.server.render import ChatShape, Renderer, Shape, TextShape
from paceline.server.replies import DONE, EventStream, event, json_reply, on_disconnect
from paceline.server.validation import decode
from paceline.tokenizer import Tokenizer

MAX_BODY = 32 * 2**20  # bytes
LONG_TEXT = 16_384  # characters; tokenizing more than this takes milliseconds and leaves the event loop


class Api:
    """The endpoints, for one model served by one engine."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, model_name: str) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._started = int(time.time())
        self._chat_shape = ChatShape(tokenizer)
        self._text_shape = TextShape(tokenizer)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/health", self.health),
                Route("/version", self.version),
            ],
            exception_handlers={
                PacelineError: _failed,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
                Exception: _fault,
            },
        )

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        body = decode(await _read_body(request), ChatRequest)
        self._check_model(body.model)
        text = self._tokenizer.apply_chat_template([m.for_template() for m in body.messages])
        return await self._generate(
            request, body, await self._encode(text, add_special_tokens=False), self._chat_shape
        )

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = decode(await _read_body(request), CompletionRequest)
        self._check_model(body.model)
        prompt_ids = body.prompt if isinstance(body.prompt, list) else await self._encode(body.prompt)
        return await self._generate(request, body, prompt_ids, self._text_shape)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_reply({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return json_reply(self._model_card())

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while the engine runs, 503 with the reason when it does not."""
        if self._client.death is not None:
            return json_reply({"status": "unavailable", "reason": self._client.death}, 503)
        return json_reply({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_reply({"version": __version__})

    async def _generate(
        self, request: Request, body: ChatRequest | CompletionRequest, prompt_ids: list[int], shape: Shape
    ) -> Response:
        group = f"{shape.id_prefix}-{secrets.token_hex(12)}"
        with _errors_named_as_in(body):
            requests = prepare(group, prompt_ids, body.sampling_params(), self._client.limits)
            generation = await self._client.submit(group, requests)
        renderer = Renderer(group, self._model_name, len(prompt_ids), shape)

        def close() -> None:
            self._client.abort(generation)

        if body.stream:
            return EventStream(_events(generation, renderer, body, len(requests)), close)
        try:
            async with on_disconnect(request.receive, close):
                deltas = await generation.collect()
        finally:
            close()
        return json_reply(renderer.whole(deltas))

    async def _encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise UnknownModelError(
                "model", f"the model {name!r} does not exist; this server has {self._model_name!r}"
            )

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "paceline",
            "max_model_len": self._client.limits.max_model_len,
        }


@contextmanager
def _errors_named_as_in(body: ChatRequest | CompletionRequest) -> Iterator[None]:
    """Let a RequestError name the field as the client wrote it."""
    try:
        yield
    except RequestError as error:
        if error.param is None or (param := body.field_named(error.param)) == error.param:
            raise
        raise RequestError(param, str(error).replace(error.param, param)) from None


async def _events(
    generation: Generation, renderer: Renderer, body: GenerationRequest, num_choices: int
) -> AsyncIterator[bytes]:
    """The stream of one request. An error on the way is an event: the status has long been sent."""
    try:
        yield b"".join(map(event, renderer.openings(num_choices)))
        async for deltas in generation.batches():
            yield b"".join(map(event, renderer.chunks(deltas)))
        if body.wants_usage_chunk:
            yield event(renderer.usage_chunk())
    except PacelineError as error:
        yield event(body_of(error))
    yield DONE


async def _read_body(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY:
            raise BodyTooLargeError(None, f"the body is larger than {MAX_BODY} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return json_reply(body_of(error), status_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return json_reply(ErrorBody(ErrorDetail(message, "invalid_request_error", None, None)), error.status_code)


async def _gone(request: Request, error: Exception) -> Response:
    """The client left before its body was complete; nobody will read this."""
    return Response(status_code=400)


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours: Starlette logs and raises it on after this reply."""
    return json_reply(ErrorBody(ErrorDetail("internal error", "server_error", None, None)), 500)
