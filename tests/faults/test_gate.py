"""API keys and size limits, on a real socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
from fault_server import TEXT, Server, running
from fault_server import fake as start_fake

from paceline.config import ServerConfig
from paceline.errors import RequestError
from paceline.request import SamplingParams
from paceline.server.caps import check_caps

MAX_BODY, MAX_HEADERS = 5000, 2000


@pytest.fixture(scope="module")
def guarded(tiny_folder) -> Iterator[Server]:  # type: ignore[no-untyped-def]
    limits = ("--max-body-bytes", str(MAX_BODY), "--max-header-bytes", str(MAX_HEADERS), "--max-choices", "3")
    env = {"PACELINE_API_KEY": "one,two"}
    with running(start_fake(*limits, model=tiny_folder, env=env, key="two")) as server:
        yield server


@pytest.mark.parametrize(
    "path", [TEXT, "/v1/chat/completions", "/v1/models", "/version", "/metrics", "/nope", "/live"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Bearer one,two", "Basic one", "one", "Bearer é"]
)
def test_every_other_route_asks_for_a_key(guarded: Server, path: str, header: str | None) -> None:
    guarded.client.headers.pop("Authorization", None)
    headers = {} if header is None else {"Authorization": header.encode()}
    try:
        response = guarded.client.post(path, headers=headers)
    finally:
        guarded.client.headers["Authorization"] = "Bearer two"
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("header", ["Bearer one", "Bearer two", "bearer  two"])
def test_each_key_opens(guarded: Server, header: str) -> None:
    response = guarded.client.get("/v1/models", headers={"Authorization": header})
    assert response.status_code == 200


def test_health_needs_none(guarded: Server) -> None:
    assert guarded.client.get("/health", headers={"Authorization": ""}).status_code == 200


def body_of(size: int) -> bytes:
    body = b'{"prompt": "a", "max_tokens": 1, "user": "%s"}'
    return body % (b"x" * (size - len(body) + 2))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(MAX_BODY, 200), (MAX_BODY + 1, 413)])
def test_the_body_limit_is_exact(guarded: Server, chunked: bool, size: int, status: int) -> None:
    body = body_of(size)
    content = iter([body[:100], body[100:]]) if chunked else body
    response = guarded.client.post(TEXT, content=content)
    assert response.status_code == status, response.text
    if status == 413:
        assert response.json()["error"]["message"] == f"the body is larger than {MAX_BODY} bytes"


def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(guarded: Server) -> None:
    with socket.create_connection((guarded.host, guarded.port), timeout=10) as raw:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\n"
        raw.sendall(head.encode() + b"Content-Length: 9999999999\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def exchange(server: Server, *pieces: bytes) -> bytes:
    """Send the pieces, and return all that comes back until the server closes."""
    with socket.create_connection((server.host, server.port), timeout=10) as raw:
        try:
            for piece in pieces:
                raw.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has closed already, which is what some pieces are for
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: %s\r\n\r\n" % (b"a" * MAX_HEADERS),
        b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n" % (b"X-A: b\r\n" * 600),
        b"GET /health?%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % (b"a" * MAX_HEADERS),
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Endless: %s" % (b"a" * MAX_HEADERS),
    ],
    ids=["one header", "many headers", "url", "unfinished"],
)
def test_large_heads_are_refused(guarded: Server, head: bytes) -> None:
    answer = exchange(guarded, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"larger than 2000 bytes" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_a_small_head_with_a_body_in_the_same_packet_is_fine(guarded: Server) -> None:
    body = body_of(MAX_BODY)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\nConnection: close\r\n"
    answer = exchange(guarded, head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_the_head_limit_is_per_request_not_per_connection(guarded: Server) -> None:
    once = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n" % (b"a" * (MAX_HEADERS - 500))
    last = once.replace(b"Host: x", b"Host: x\r\nConnection: close")
    assert exchange(guarded, once, once, once, last).count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 4}, "n", "n must be at most 3, got 4"),
        ({"logprobs": 6}, "logprobs", "logprobs must be at most 5, got 6"),
        ({"stop": ("a", "b", "c")}, "stop", "at most 2 strings, got 3"),
        ({"stop": ("a", "b" * 11)}, "stop", "at most 10 characters, one has 11"),
    ],
)
def test_caps_name_the_field_and_the_limit(fields: dict[str, object], param: str, words: str) -> None:
    config = ServerConfig(max_choices=3, max_logprobs=5, max_stop_strings=2, max_stop_chars=10)
    with pytest.raises(RequestError) as caught:
        check_caps(SamplingParams(**fields), config)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert words in str(caught.value)
    check_caps(SamplingParams(n=3, logprobs=5, stop=("a", "b" * 10)), config)


def test_a_cap_reaches_the_client(guarded: Server) -> None:
    response = guarded.client.post(TEXT, json={"prompt": "a", "n": 4})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


def test_a_full_queue_says_when_to_come_again(fake: Callable[..., Server]) -> None:
    server = fake("--max-num-seqs", "1", "--max-queue", "0")
    with server.client.stream("POST", TEXT, json={"prompt": "<|slow|>", "max_tokens": 3000, "stream": True}):
        response = server.client.post(TEXT, json={"prompt": "a"})
    assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
