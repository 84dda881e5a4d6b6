"""The HTTP application: routes, and the path of one request through the others' parts.

    body -> protocol record -> prompt ids -> engine requests -> generation -> shape -> reply

Knows nothing of processes or sockets; the engine client is given to it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from paceline._version import __version__
from paceline.errors import PacelineError, RequestError
from paceline.output import Delta
from paceline.prepare import prepare
from paceline.request import EngineRequest, SamplingParams
from paceline.server.bridge import EngineClient
from paceline.server.chat_shape import ChatShape
from paceline.server.failures import UnknownModelError, body_of, status_of
from paceline.server.generation import Generation
from paceline.server.grammar_check import GrammarCheck
from paceline.server.live_page import HEADERS, live, page, parse_since
from paceline.server.metrics import CONTENT_TYPE, Metrics
from paceline.server.openapi import openapi
from paceline.server.prompts import chat_text
from paceline.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Prompt,
    TokenizeRequest,
)
from paceline.server.render import Renderer, Shape
from paceline.server.replies import DONE, EventStream, event, json_reply, on_disconnect
from paceline.server.responses import (
    DetokenizeResponse,
    ErrorBody,
    ErrorDetail,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)
from paceline.server.text_shape import Echo, TextShape, TextStyle
from paceline.server.tools import FormSetting, ModelTools
from paceline.server.validation import decode
from paceline.tokenizer import Tokenizer

LONG_TEXT = 16_384  # characters; tokenizing more than this takes milliseconds and leaves the event loop

Body = TypeVar("Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


class Api:
    """The endpoints, for one model served by one engine.

    Args:
        tool_call_parser: the form of the model's tool calls; `auto` goes by its chat template.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        model_name: str,
        tool_call_parser: FormSetting = "auto",
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._started = int(time.time())
        self._tools = ModelTools(tokenizer, tool_call_parser)
        self._grammars = GrammarCheck()
        self._metrics = Metrics(model_name, lambda: client.stats)

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/tokenizer_info", self.tokenizer_info),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
                Route("/version", self.version),
                Route("/openapi.json", self.openapi),
                Route("/live", self.live),
                Route("/", self.page),
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
        body = await self._body(request, ChatRequest)
        came = time.monotonic()
        tool_use = self._tools.use(body.tools, body.tool_choice, body.parallel_tool_calls)
        text = chat_text(self._tokenizer, body.conversation(), tool_use)
        prompt_ids = await self._encode(text, add_special_tokens=False)
        with _errors_named_as_in(body):
            params = body.sampling_params(None if tool_use is None else tool_use.grammar())
            self._client.check(params)
        shape = ChatShape(self._tokenizer, tool_use)
        return await self._generate(request, body, [prompt_ids], params, shape, came)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        body = await self._body(request, CompletionRequest)
        came = time.monotonic()
        prompts = body.prompts
        with _errors_named_as_in(body):
            params = body.sampling_params()
            self._client.check(params, len(prompts))
        special = body.add_special_tokens is not False
        encoded = [p if isinstance(p, list) else await self._encode(p, special) for p in prompts]
        style = TextStyle(
            echoes=[self._echo(p, ids) for p, ids in zip(prompts, encoded, strict=True)]
            if body.echo
            else None,
            num_choices=params.n,
            logprobs=params.logprobs is not None,
            prompt_only=body.prompt_only,
            token_names=bool(body.return_tokens_as_token_ids),
        )
        shape = TextShape(self._tokenizer, style)
        return await self._generate(request, body, encoded, params, shape, came)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return json_reply(ModelList(data=[self._model_card()]))

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return json_reply(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        body = await self._body(request, TokenizeRequest)
        conversation = body.conversation()
        if conversation is None:
            assert body.prompt is not None
            tokens = await self._encode(body.prompt, body.add_special_tokens is not False)
        else:
            tool_use = self._tools.use(body.tools, None, None)
            text = chat_text(self._tokenizer, conversation, tool_use)
            tokens = await self._encode(text, bool(body.add_special_tokens))
        spelled = [self._tokenizer.token_bytes(t).decode("utf-8", errors="replace") for t in tokens]
        return json_reply(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=self._client.limits.max_model_len,
                tokens=tokens,
                token_strs=spelled if body.return_token_strs else None,
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        body = await self._body(request, DetokenizeRequest)
        vocab_size = self._client.limits.vocab_size
        for i, token_id in enumerate(body.tokens):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"tokens[{i}]", f"tokens[{i}] is {token_id}, outside the vocabulary [0, {vocab_size})"
                )
        return json_reply(DetokenizeResponse(self._tokenizer.decode(body.tokens, skip_special_tokens=False)))

    async def tokenizer_info(self, request: Request) -> Response:
        """`GET /tokenizer_info`, which lm-eval asks for to count tokens through `/tokenize`."""
        texts = self._tokenizer.special_tokens
        return json_reply(TokenizerInfo(**texts, chat_template=self._tokenizer.chat_template))

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 while the engine runs, 503 with the reason when it does not."""
        if self._client.death is not None:
            return json_reply(Health("unavailable", self._client.death), 503)
        return json_reply(Health("ok", speculation=self._client.speculation))

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def live(self, request: Request) -> Response:
        """`GET /live`, for the page."""
        since = parse_since(request.query_params.get("since"))
        return json_reply(live(self._client, self._model_name, since, time.monotonic()))

    async def page(self, request: Request) -> Response:
        """`GET /`: the live page."""
        return HTMLResponse(page(), headers=HEADERS)

    async def version(self, request: Request) -> Response:
        """`GET /version`."""
        return json_reply(Version(__version__))

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return json_reply(openapi(self._model_name, self._client.limits.max_depth))

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        body = decode(await request.body(), kind)
        self._check_model(body.model)
        return body

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        shape: Shape,
        came: float,
    ) -> Response:
        group = f"{shape.id_prefix}-{secrets.token_hex(12)}"
        with _errors_named_as_in(body):
            requests = _prepare_all(group, prompts, params, self._client)
            if params.grammar is not None:
                await self._grammars.check(params.grammar)
            self._metrics.begin(requests, came)
            try:
                generation = await self._client.submit(group, requests)
            except BaseException:
                self._metrics.forget(requests)
                raise
        num_prompt_tokens = sum(map(len, prompts))
        renderer = Renderer(group, self._model_name, num_prompt_tokens, shape, body.wants_usage_always)

        def close() -> None:
            self._client.abort(generation)
            self._metrics.take(generation.take_arrivals())
            self._metrics.end(requests)

        batches = self._measured(generation)
        if body.stream:
            return EventStream(_events(batches, renderer, body, len(requests)), close)
        try:
            async with on_disconnect(request.receive, close):
                with _errors_named_as_in(body):
                    deltas = await generation.collect(batches)
        finally:
            close()
        return json_reply(renderer.whole(deltas))

    async def _measured(self, generation: Generation) -> AsyncIterator[list[Delta]]:
        """The batches of a generation, counted as they are read."""
        async for deltas in generation.batches():
            self._metrics.take(generation.take_arrivals())
            yield deltas

    def _echo(self, prompt: Prompt, prompt_ids: Sequence[int]) -> Echo:
        return Echo(prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt_ids), prompt_ids)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model_name:
            raise UnknownModelError(
                "model", f"the model {name!r} does not exist; this server has {self._model_name!r}"
            )

    def _model_card(self) -> Model:
        limits = self._client.limits
        return Model(
            id=self._model_name,
            created=self._started,
            max_model_len=limits.max_model_len,
            max_depth=limits.max_depth,
            draft=limits.draft,
        )


def _prepare_all(
    group: str, prompts: Sequence[list[int]], params: SamplingParams, client: EngineClient
) -> list[EngineRequest]:
    """The engine requests of all prompts; an error names the prompt, where there are several."""
    requests: list[EngineRequest] = []
    for i, prompt_ids in enumerate(prompts):
        try:
            requests += prepare(group, prompt_ids, params, client.limits, len(requests))
        except RequestError as error:
            if len(prompts) == 1 or error.param != "prompt":
                raise
            raise RequestError(f"prompt[{i}]", f"prompt[{i}]: {error}") from None
    return requests


@contextmanager
def _errors_named_as_in(body: ChatRequest | CompletionRequest) -> Iterator[None]:
    """Let a RequestError name the field as the client wrote it."""
    try:
        yield
    except RequestError as error:
        raise _renamed(error, body) from None


def _renamed(error: RequestError, body: ChatRequest | CompletionRequest) -> RequestError:
    if error.param is None or (param := body.field_named(error.param)) == error.param:
        return error
    return RequestError(param, str(error).replace(error.param, param, 1))


async def _events(
    batches: AsyncIterator[list[Delta]],
    renderer: Renderer,
    body: ChatRequest | CompletionRequest,
    num_choices: int,
) -> AsyncIterator[bytes]:
    """The stream of one request. An error on the way is an event: the status has long been sent."""
    try:
        yield _joined(renderer.openings(num_choices))
        async for deltas in batches:
            yield _joined(renderer.chunks(deltas))
        if body.wants_usage_chunk:
            yield event(renderer.usage_chunk())
    except RequestError as error:
        yield event(body_of(_renamed(error, body)))
    except PacelineError as error:
        yield event(body_of(error))
    yield DONE


def _joined(records: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(map(event, records))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return json_reply(body_of(error), status_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", None, None))
    return Response(
        msgspec.json.encode(body), error.status_code, headers=error.headers, media_type="application/json"
    )


async def _gone(request: Request, error: Exception) -> Response:
    """The client left before its body was complete; nobody will read this."""
    return Response(status_code=400)


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours: Starlette logs and raises it on after this reply."""
    return json_reply(ErrorBody(ErrorDetail("internal error", "server_error", None, None)), 500)
