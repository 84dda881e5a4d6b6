"""The HTTP API, over a real socket, with the engine in its own process."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import Served, eventually
from tiny_model import TEMPLATE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def text_body(prompt: Any = "abc", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, **fields}


def chat_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def post(served: Served, path: str, body: Any) -> dict[str, Any]:
    response = served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the [DONE] that must end it."""
    with served.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    events = raw.split("\n\n")
    assert events.pop() == ""
    assert all(e.startswith("data: ") for e in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(e.removeprefix("data: ")) for e in events]


class TestAnswers:
    def test_text(self, served: Served) -> None:
        answer = post(served, TEXT, text_body("abc", max_tokens=5, model="tiny"))
        assert answer["id"].startswith("cmpl-")
        assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
        [choice] = answer["choices"]
        assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "abcab", "length")
        assert choice["logprobs"] is None
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    def test_text_defaults_to_16_tokens_and_takes_token_ids(self, served: Served) -> None:
        answer = post(served, TEXT, {"prompt": [65, 66]})
        assert answer["usage"]["completion_tokens"] == 16

    def test_chat_goes_through_the_template_and_ends_at_eos(self, served: Served) -> None:
        answer = post(served, CHAT, chat_body("hi"))
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        [choice] = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "user\nhi"}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert answer["usage"]["completion_tokens"] == 9  # <|im_start|> and <|im_end|> count

    def test_chat_content_in_parts_and_developer(self, served: Served) -> None:
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        body = {"messages": [{"role": "developer", "content": parts}]}
        assert post(served, CHAT, body)["choices"][0]["message"]["content"] == "system\nhi"

    def test_chat_runs_up_to_the_context(self, served: Served) -> None:
        usage = post(served, CHAT, chat_body(ignore_eos=True))["usage"]
        assert usage["total_tokens"] == 4096

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_streamed_and_whole_are_the_same(self, served: Served, path: str) -> None:
        extra = {
            "max_tokens": 40,
            "ignore_eos": True,
            "n": 2,
            "stop": ["zz"],
            "logprobs": True if path == CHAT else 0,
        }
        body = {**(chat_body("日本é") if path == CHAT else text_body("日本é")), **extra}
        whole = post(served, path, body)
        chunks = stream(served, path, {**body, "stream_options": {"include_usage": True}})
        assert {c["id"] for c in chunks} == {chunks[0]["id"]}
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
            reasons = [c["finish_reason"] for c in mine]
            assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]
            if path == CHAT:
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
                entries = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
                assert entries == choice["logprobs"]["content"]
            else:
                assert "".join(c["text"] for c in mine) == choice["text"]
                tokens = [t for c in mine if c["logprobs"] for t in c["logprobs"]["tokens"]]
                assert tokens == choice["logprobs"]["tokens"]

    def test_usage_chunk_only_when_asked_for(self, served: Served) -> None:
        assert all(c["usage"] is None and c["choices"] for c in stream(served, TEXT, text_body()))

    def test_stop_string_cuts_everything_at_one_token(self, served: Served) -> None:
        answer = post(served, TEXT, text_body("abcdef", stop="cd", logprobs=1, max_tokens=50))
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "cd")
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 4

    def test_stop_string_ends_the_row(self, served: Served) -> None:
        answer = post(served, TEXT, text_body("<|slow|>ab!", stop=["!"], max_tokens=3000))
        row = answer["id"] + ".0"
        assert eventually(lambda: f"abort {row}" in served.journal())

    def test_choices_share_a_seed_and_have_rows_of_their_own(self, served: Served) -> None:
        answer = post(served, TEXT, text_body(n=3))
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        added = [line.split() for line in served.journal() if line.startswith(f"add {answer['id']}.")]
        assert [(row, choice) for _, row, _, choice in added] == [
            (f"{answer['id']}.{i}", str(i)) for i in range(3)
        ]
        assert len({seed for _, _, seed, _ in added}) == 1
        other = post(served, TEXT, text_body())
        [drawn] = [line.split()[2] for line in served.journal() if line.startswith(f"add {other['id']}.")]
        assert drawn != added[0][2]

    def test_chat_logprobs(self, served: Served) -> None:
        choice = post(served, CHAT, chat_body("é", logprobs=True, top_logprobs=2))["choices"][0]
        entries = choice["logprobs"]["content"]
        assert [len(e["top_logprobs"]) for e in entries] == [2] * len(entries)
        assert {*entries[0]} == {"token", "logprob", "bytes", "top_logprobs"}
        spelled = b"".join(bytes(e["bytes"]) for e in entries)
        assert spelled.decode() == "<|im_start|>user\né<|im_end|>"
        assert entries[0]["top_logprobs"][0] == {k: entries[0][k] for k in ("token", "logprob", "bytes")}

    def test_text_logprobs(self, served: Served) -> None:
        logprobs = post(served, TEXT, text_body("aéb", logprobs=2, max_tokens=4))["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 1, 1, 2]  # the first half of é waits for the second
        assert logprobs["token_logprobs"] == [-0.5] * 4
        assert logprobs["tokens"][0] == "a"
        assert logprobs["top_logprobs"][0]["a"] == -0.5
        assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2, 2]

    def test_null_means_the_default(self, served: Served) -> None:
        nulls = ("temperature", "stop", "seed", "n", "tools", "response_format", "logit_bias", "max_tokens")
        assert post(served, CHAT, chat_body(**dict.fromkeys(nulls)))["choices"]

    def test_models(self, served: Served) -> None:
        listed = served.client.get("/v1/models").json()
        assert [(m["id"], m["max_model_len"]) for m in listed["data"]] == [("tiny", 4096)]
        assert [(m["draft"], m["max_depth"]) for m in listed["data"]] == [("ngram", 8)]
        assert served.client.get("/v1/models/tiny").json() == listed["data"][0]

    def test_tokenizer_info(self, served: Served) -> None:
        info = served.client.get("/tokenizer_info").json()
        assert info["eos_token"] == "<|im_end|>"
        assert info["bos_token"] is info["unk_token"] is info["pad_token"] is None
        assert info["chat_template"] == TEMPLATE

    def test_health_and_version(self, served: Served) -> None:
        speculation = {"status": "on", "depth": 2, "max_depth": 8, "draft": "ngram"}
        assert served.client.get("/health").json() == {"status": "ok", "speculation": speculation}
        assert set(served.client.get("/version").json()) == {"version"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


REFUSED = [
    (TEXT, text_body(foo=1), 400, "foo", "unknown field: foo"),
    (
        TEXT,
        text_body(temperature="hot"),
        400,
        "temperature",
        "temperature: expected `float | null`, got `str`",
    ),
    (TEXT, text_body(temperature=-1), 400, "temperature", "temperature must be in [0.0, 100.0], got -1.0"),
    (TEXT, text_body(top_p=0), 400, "top_p", "(0, 1]"),
    (TEXT, text_body(n=0), 400, "n", "at least 1"),
    (TEXT, text_body(max_tokens=0), 400, "max_tokens", "at least 1"),
    (TEXT, text_body(min_tokens=9), 400, "min_tokens", "must not exceed max_tokens (8)"),
    (TEXT, text_body(stop=["a", ""]), 400, "stop", "must not be empty"),
    (TEXT, text_body(stop=["a", 1]), 400, "stop[1]", "got `int`"),
    (TEXT, text_body(seed=1.5), 400, "seed", "got `float`"),
    (TEXT, text_body(logit_bias={"5": 101}), 400, "logit_bias", "[-100, 100]"),
    (TEXT, text_body(logit_bias={"x": 1}), 400, "logit_bias", "in a key"),
    (TEXT, text_body(logit_bias={"999": 1}), 400, "logit_bias", "999"),
    (TEXT, text_body(stop_token_ids=[999]), 400, "stop_token_ids", "999"),
    (TEXT, text_body(logprobs=21), 400, "logprobs", "21"),
    (TEXT, text_body(logprobs=True), 400, "logprobs", "got `bool`"),
    (TEXT, text_body(best_of=3), 400, "best_of", "not supported"),
    (TEXT, text_body(suffix="x"), 400, "suffix", "not supported yet"),
    (TEXT, text_body(stream_options={"include_usage": True}), 400, "stream_options", "stream: true"),
    (TEXT, text_body(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unknown field"),
    (TEXT, text_body(speculation={"k": 1}), 400, "speculation.k", "unknown field"),
    (TEXT, text_body(speculation=2), 400, "speculation", "got `int`"),
    (TEXT, text_body(speculation={"depth": True}), 400, "speculation.depth", "got `bool`"),
    (
        TEXT,
        text_body(speculation={"depth": -1}),
        400,
        "speculation.depth",
        "speculation.depth must be at least 0, got -1",
    ),
    (
        TEXT,
        text_body(speculation={"depth": 9}),
        400,
        "speculation.depth",
        "speculation.depth must be at most 8, got 9",
    ),
    (CHAT, chat_body(speculation={"depth": 10**12}), 400, "speculation.depth", "got 1000000000000"),
    (
        CHAT,
        chat_body(speculation={"depth": 3, "enabled": False}),
        400,
        "speculation.depth",
        "speculation.depth is 3, but speculation.enabled is false",
    ),
    (
        CHAT,
        chat_body(speculation={"depth": 0, "enabled": True}),
        400,
        "speculation.depth",
        "speculation.depth is 0, but speculation.enabled is true",
    ),
    (TEXT, {"max_tokens": 1}, 400, "prompt", "missing field: prompt"),
    (TEXT, text_body(["a", 5]), 400, "prompt[1]", "list of texts or a list of token ids"),
    (TEXT, text_body([]), 400, "prompt", "empty"),
    (TEXT, text_body(["a", ""]), 400, "prompt[1]", "prompt[1]: the prompt is empty"),
    (TEXT, text_body(store=True), 400, "store", "only False is"),
    (TEXT, text_body(service_tier="flex"), 400, "service_tier", "'flex'"),
    (TEXT, text_body(guided_regex="("), 400, "guided_regex", "guided_regex cannot be used"),
    (TEXT, text_body(guided_json="{"), 400, "guided_json", "not valid JSON"),
    (TEXT, text_body(guided_json=[1]), 400, "guided_json", "got `array`"),
    (TEXT, text_body(guided_choice=[]), 400, "guided_choice", "1 to 4096"),
    (TEXT, text_body(guided_grammar="start: b"), 400, "guided_grammar", "guided_grammar"),
    (TEXT, text_body(guided_regex="a" * 70_000), 400, "guided_regex", "65536"),
    (TEXT, text_body(guided_regex="a", guided_choice=["b"]), 400, "guided_choice", "only one of these"),
    (TEXT, text_body(structured_outputs={"regex": "("}), 400, "structured_outputs.regex", "cannot be used"),
    (
        TEXT,
        text_body(structured_outputs={"structural_tag": "x"}),
        400,
        "structured_outputs.structural_tag",
        "unknown",
    ),
    (TEXT, text_body([5, -1]), 400, "prompt", "-1"),
    (TEXT, text_body([5, 999]), 400, "prompt", "999"),
    (TEXT, text_body(""), 400, "prompt", "empty"),
    (TEXT, text_body("x" * 4096), 400, "prompt", "4096 tokens, and the model's context of 4096 tokens"),
    (TEXT, text_body("x" * 4000, max_tokens=97), 400, "max_tokens", "a prompt of 4000 tokens leaves 96"),
    (TEXT, text_body(model="gpt"), 404, "model", "'gpt' does not exist; this server has 'tiny'"),
    (CHAT, chat_body(tools=[]), 400, "tools", "must not be empty"),
    (CHAT, chat_body(tools=[{"type": "x"}]), 400, "tools[0].type", "'x'"),
    (CHAT, chat_body(tools=[TOOL, TOOL]), 400, "tools", "same name"),
    (CHAT, chat_body(tool_choice="auto"), 400, "tool_choice", "needs tools"),
    (CHAT, chat_body(tools=[TOOL], tool_choice=named("g")), 400, "tool_choice", "'g'"),
    (CHAT, chat_body(tools=[TOOL], guided_regex="a"), 400, "guided_regex", "exclude each other"),
    (CHAT, chat_body(parallel_tool_calls=False), 400, "parallel_tool_calls", "needs tools"),
    (CHAT, chat_body(response_format={"type": "xml"}), 400, "response_format.type", "'xml'"),
    (
        CHAT,
        chat_body(response_format=schema_format({"type": "bogus"})),
        400,
        "response_format",
        "response_format cannot be used: Invalid type: bogus",
    ),
    (
        CHAT,
        chat_body(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
        "exclude",
    ),
    (CHAT, chat_body(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "messages"),
    (CHAT, chat_body(reasoning_effort="low"), 400, "reasoning_effort", "unknown field"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id", "need it"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [call("[]")]}]},
        400,
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    ),
    (
        CHAT,
        chat_body("<|dead|>", guided_regex="a"),
        400,
        "guided_regex",
        "the guided_regex failed: no way on",
    ),
    (CHAT, {"messages": []}, 400, "messages", "must not be empty"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "missing field"),
    (CHAT, {"messages": [{"role": "bot", "content": ""}]}, 400, "messages[0].role", "'bot'"),
    (
        CHAT,
        chat_body([{"type": "image_url", "image_url": {}}]),
        400,
        "messages[0].content[0].type",
        "image_url",
    ),
    (CHAT, chat_body("x" * 4096), 400, "messages", "the model's context of 4096 tokens"),
    (
        CHAT,
        chat_body(max_completion_tokens=5000),
        400,
        "max_completion_tokens",
        "max_completion_tokens is 5000",
    ),
    (
        CHAT,
        chat_body(max_completion_tokens=0),
        400,
        "max_completion_tokens",
        "max_completion_tokens must be at",
    ),
    (CHAT, chat_body(max_completion_tokens=5, max_tokens=6), 400, "max_completion_tokens", "(6) differ"),
    (CHAT, chat_body(top_logprobs=2), 400, "top_logprobs", "needs logprobs"),
    (CHAT, chat_body(logprobs=True, top_logprobs=21), 400, "top_logprobs", "[0, 20]"),
    (CHAT, [1], 400, None, "expected `object`"),
]


class TestRefusals:
    @pytest.mark.parametrize(("path", "body", "status", "param", "words"), REFUSED)
    def test_names_the_field(
        self, served: Served, path: str, body: Any, status: int, param: str | None, words: str
    ) -> None:
        response = served.client.post(path, json=body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]
        assert "\n" not in error["message"]

    @pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "a"} b'])
    def test_not_json(self, served: Served, body: bytes) -> None:
        response = served.client.post(TEXT, content=body)
        assert response.status_code == 400
        assert "not valid JSON" in response.json()["error"]["message"]

    @pytest.mark.parametrize("field", ["guided_json", "prompt", "metadata"])
    def test_nested_too_deep(self, served: Served, field: str) -> None:
        body = b'{"prompt": "a", "%s": %s1%s}' % (field.encode(), b'{"a":' * 50_000, b"}" * 50_000)
        response = served.client.post(TEXT, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"

    def test_whole_numbers_that_no_process_can_read(self, served: Served) -> None:
        for field in ("top_k", "min_tokens", "max_tokens", "n"):
            response = served.client.post(TEXT, json=text_body() | {"max_tokens": None, field: 2**70})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)

    def test_unpaired_surrogate(self, served: Served) -> None:
        assert served.client.post(TEXT, content=rb'{"prompt": "\ud800"}').status_code == 400

    def test_a_body_beyond_the_limit(self, served: Served) -> None:
        response = served.client.post(TEXT, content=b" " * (32 * 2**20 + 1))
        assert response.status_code == 413

    @pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", TEXT, 405)])
    def test_unknown_routes(self, served: Served, method: str, path: str, status: int) -> None:
        response = served.client.request(method, path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]

    def test_a_full_queue(self, serve: Callable[..., Served]) -> None:
        served = serve("--max-num-seqs", "2", "--max-queue", "1")
        body = text_body("<|slow|>", n=3, max_tokens=2000)
        with served.client.stream("POST", TEXT, json={**body, "stream": True}) as running:
            assert running.status_code == 200
            for streams in (False, True):
                response = served.client.post(TEXT, json=text_body(stream=streams))
                assert response.status_code == 429
                assert response.json()["error"]["type"] == "rate_limit_error"
        assert eventually(lambda: sum(line.startswith("abort") for line in served.journal()) == 3)
        # Nothing of a group that does not fit as a whole stays behind.
        assert served.client.post(TEXT, json=text_body(n=4)).status_code == 429
        assert served.client.post(TEXT, json=text_body(n=3)).status_code == 200


class TestDisconnects:
    def test_of_a_stream(self, served: Served) -> None:
        body = text_body("<|slow|>a", max_tokens=3000, n=2, stream=True)
        with served.client.stream("POST", TEXT, json=body) as response:
            first = next(response.iter_lines())
        row = json.loads(first.removeprefix("data: "))["id"]
        assert eventually(lambda: {f"abort {row}.0", f"abort {row}.1"} <= set(served.journal()))

    def test_of_a_request_that_does_not_stream(self, served: Served) -> None:
        before = len(served.journal())
        with pytest.raises(httpx.ReadTimeout):
            served.client.post(TEXT, json=text_body("<|slow|>", max_tokens=3000), timeout=0.3)
        assert eventually(lambda: any(line.startswith("abort") for line in served.journal()[before:]))

    def test_within_a_body(self, served: Served) -> None:
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert served.client.get("/health").status_code == 200

    def test_a_reader_that_does_not_read_delays_nobody(self, served: Served) -> None:
        body = text_body("x" * 8, max_tokens=4000, n=16, stream=True)
        with served.client.stream("POST", TEXT, json=body) as unread:
            assert unread.status_code == 200
            assert post(served, TEXT, text_body())["choices"][0]["text"] == "abcabcab"
            total = sum(
                len(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                for line in unread.iter_lines()
                if line.startswith("data: {")
            )
        assert total == 16 * 4000


def test_many_streams_at_once_keep_apart(served: Served) -> None:
    def one(i: int) -> bool:
        prompt = f"<{i}>"
        chunks = stream(served, TEXT, text_body(prompt, max_tokens=50))
        return "".join(c["choices"][0]["text"] for c in chunks) == (prompt * 50)[:50]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(40)))
