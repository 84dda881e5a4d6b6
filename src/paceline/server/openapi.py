"""The OpenAPI document, made from the very records that requests are read into and replies made of.

Knows the routes' records and statuses, not what they do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from paceline._version import __version__
from paceline.server.live import Live
from paceline.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paceline.server.request_schemas import describe_requests
from paceline.server.responses import (
    ChatChunk,
    ChatResponse,
    DetokenizeResponse,
    ErrorBody,
    Health,
    Model,
    ModelList,
    TextResponse,
    TokenizeResponse,
    TokenizerInfo,
    Version,
)

_POSTS: tuple[tuple[str, str, Any, Any, Any], ...] = (  # path, summary, body, reply, event of a stream
    ("/v1/chat/completions", "Answer a conversation", ChatRequest, ChatResponse, ChatChunk),
    ("/v1/completions", "Continue a text", CompletionRequest, TextResponse, TextResponse),
    ("/tokenize", "Token ids of a text or conversation", TokenizeRequest, TokenizeResponse, None),
    ("/detokenize", "Text of token ids", DetokenizeRequest, DetokenizeResponse, None),
)
_GETS: tuple[tuple[str, str, Any], ...] = (
    ("/v1/models", "The model that is served", ModelList),
    ("/v1/models/{name}", "One model", Model),
    ("/tokenizer_info", "Special tokens and chat template", TokenizerInfo),
    ("/health", "Whether requests are answered", Health),
    ("/version", "Paceline's version", Version),
    ("/live", "How things stand, and the last ten minutes: what the page at / shows", Live),
)
_GENERATING = ("/v1/chat/completions", "/v1/completions")
_ERRORS = {
    400: "A field is unknown, wrong or unsupported; `param` names it",
    401: "No API key, or a wrong one",
    404: "Another model than the one served",
    413: "The body is too large",
    429: "The queue is full",
    503: "The engine is not running at present",
}


@cache
def openapi(model_name: str, max_depth: int) -> dict[str, Any]:
    """The document of a server of this model, OpenAPI 3.1. `max_depth` is the most drafts of a round."""
    records = [record for _, _, *records in _POSTS for record in records if record is not None]
    records += [record for *_, record in _GETS] + [ErrorBody]
    records = list(dict.fromkeys(records))
    schemas, components = msgspec.json.schema_components(records, ref_template="#/components/schemas/{name}")
    describe_requests(components, model_name, max_depth)
    ref = dict(zip(records, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, summary, body, reply, event in _POSTS:
        content = {"application/json": {"schema": ref[reply]}}
        if event is not None:
            content["text/event-stream"] = {"schema": ref[event]}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": {"application/json": {"schema": ref[body]}}},
                "responses": {"200": {"description": "Done", "content": content}}
                | _errors(ref[ErrorBody], _ERRORS if path in _GENERATING else (400, 401, 404, 413)),
            }
        }
    for path, summary, reply in _GETS:
        content = {"application/json": {"schema": ref[reply]}}
        paths[path] = {
            "get": {
                "summary": summary,
                "responses": {"200": {"description": "Done", "content": content}}
                | _errors(ref[ErrorBody], (401, 404) if "{" in path else (401,)),
            }
        }
    _add_particulars(paths, ref, model_name)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _add_particulars(paths: dict[str, Any], ref: dict[Any, Any], model_name: str) -> None:
    """What single paths have and the others have not: parameters, other replies, another kind of body."""
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "example": model_name,
        }
    ]
    paths["/live"]["get"]["responses"] |= _errors(ref[ErrorBody], (400,))
    paths["/live"]["get"]["parameters"] = [
        {
            "name": "since",
            "in": "query",
            "description": "only points later than this, in seconds since 1970",
            "schema": {"type": "number"},
            "example": 0,
        }
    ]
    paths["/health"]["get"]["responses"] = {
        "200": paths["/health"]["get"]["responses"]["200"],
        "503": {
            "description": _ERRORS[503],
            "content": {"application/json": {"schema": ref[Health]}},
        },
    }
    text = {"schema": {"type": "string"}}
    metrics = {"200": {"description": "Done", "content": {"text/plain": text}}}
    page = {"200": {"description": "Done", "content": {"text/html": text}}}
    paths["/metrics"] = {
        "get": {
            "summary": "Numbers for Prometheus",
            "responses": metrics | _errors(ref[ErrorBody], (401,)),
        }
    }
    paths["/"] = {"get": {"summary": "A page that shows what the server does", "responses": page}}


def _errors(schema: dict[str, Any], statuses: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {str(status): {"description": _ERRORS[status], "content": content} for status in statuses}
