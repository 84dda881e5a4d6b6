"""The fields beyond plain sampling, over HTTP with the fake engine: what comes back, in which shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from served import Served, eventually
from test_http import CHAT, TEXT, TOOL, chat_body, post, stream, text_body


class TestEcho:
    @pytest.mark.parametrize("prompt", ["aéb", [97, 98, 99]])
    def test_text_comes_behind_its_prompt(self, served: Served, prompt: Any) -> None:
        plain = post(served, TEXT, text_body(prompt))["choices"][0]["text"]
        whole = post(served, TEXT, text_body(prompt, echo=True))
        asked = (
            post_json(served, "/detokenize", {"tokens": prompt})["prompt"]
            if isinstance(prompt, list)
            else prompt
        )
        assert whole["choices"][0]["text"] == asked + plain
        assert whole["usage"]["completion_tokens"] == 8
        chunks = stream(served, TEXT, text_body(prompt, echo=True))
        assert "".join(c["choices"][0]["text"] for c in chunks) == asked + plain

    @pytest.mark.parametrize("streams", [False, True])
    def test_logprobs_are_one_list_over_prompt_and_answer(self, served: Served, streams: bool) -> None:
        body = text_body("aéb", echo=True, logprobs=1, max_tokens=4, n=2)
        if streams:
            chunks = stream(served, TEXT, body)
            choices = [
                joined([c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]) for i in (0, 1)
            ]
        else:
            choices = post(served, TEXT, body)["choices"]
        ids = post_json(served, "/tokenize", {"prompt": "aéb"})["tokens"]
        for choice in choices:
            logprobs = choice["logprobs"]
            assert choice["text"] == "aébaéb"
            assert logprobs["token_logprobs"] == [None, *(-float(t) for t in ids[1:]), *[-0.5] * 4]
            assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 4, 5]
            assert logprobs["top_logprobs"][0] is None
            # The token itself is there beside the one likeliest, as lm-eval needs it.
            assert logprobs["top_logprobs"][3]["b"] == -float(ids[3])
            assert len(logprobs["top_logprobs"][1]) == 2
            assert logprobs["tokens"][0] == logprobs["tokens"][4] == "a"

    def test_no_answer_at_all(self, served: Served) -> None:
        answer = post(served, TEXT, text_body("abc", echo=True, max_tokens=0, logprobs=0))
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert len(choice["logprobs"]["tokens"]) == 3
        assert answer["usage"]["completion_tokens"] == 0
        assert served.client.post(TEXT, json=text_body("abc", max_tokens=0)).status_code == 400

    def test_tokens_by_number(self, served: Served) -> None:
        body = text_body([97], logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
        assert post(served, TEXT, body)["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]


class TestBatches:
    @pytest.mark.parametrize("prompts", [["ab", "xyz"], [[64, 65], [87, 88, 89]]])
    def test_choices_are_in_the_order_of_their_prompts(self, served: Served, prompts: Any) -> None:
        body = text_body(prompts, n=2, max_tokens=4, echo=True)
        answer = post(served, TEXT, body)
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [
            (0, "ababab"), (1, "ababab"), (2, "xyzxyzx"), (3, "xyzxyzx")
        ]  # fmt: skip
        # Cached tokens count once for each prompt: what later choices find, the first has computed.
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 16,
            "total_tokens": 21,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        chunks = stream(served, TEXT, {**body, "stream_options": {"include_usage": True}})
        assert chunks[-1]["usage"] == answer["usage"]
        for choice in answer["choices"]:
            mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
            assert "".join(c["text"] for c in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == "length"

    def test_noise_is_numbered_within_each_prompt(self, served: Served) -> None:
        answer = post(served, TEXT, text_body(["a", "b"], n=2, seed=5))
        added = [line.split() for line in served.journal() if line.startswith(f"add {answer['id']}.")]
        assert [(row[-1], seed, choice) for _, row, seed, choice in added] == [
            ("0", "5", "0"), ("1", "5", "1"), ("2", "5", "0"), ("3", "5", "1")
        ]  # fmt: skip


def test_usage_in_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(served, TEXT, text_body(stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


class TestTemplates:
    def test_kwargs_reach_the_template(self, served: Served) -> None:
        body = chat_body("hi", chat_template_kwargs={"mood": "gay"})
        assert post(served, CHAT, body)["choices"][0]["message"]["content"] == "user\nhi gay"

    def test_the_last_message_is_continued(self, served: Served) -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so far"}]
        asked = {"messages": messages, "continue_final_message": True}
        prompt = post_json(served, "/detokenize", {"tokens": post_json(served, "/tokenize", asked)["tokens"]})
        assert prompt["prompt"].endswith("<|im_start|>assistant\nso far")

    def test_no_generation_prompt(self, served: Served) -> None:
        asked = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
        prompt = post_json(served, "/detokenize", {"tokens": post_json(served, "/tokenize", asked)["tokens"]})
        assert prompt["prompt"] == "<|im_start|>user\nx<|im_end|>"

    def test_a_conversation_with_calls(self, served: Served) -> None:
        called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        asked = {"messages": messages, "tools": [TOOL], "add_generation_prompt": False}
        text = post_json(served, "/detokenize", {"tokens": post_json(served, "/tokenize", asked)["tokens"]})[
            "prompt"
        ]
        assert '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
        assert text.endswith("<|im_start|>tool\n42 (c1)<|im_end|>")
        assert '"name": "f", "parameters"' in text


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


class TestTools:
    def test_a_call(self, served: Served) -> None:
        [choice] = post(served, CHAT, chat_body("<|say|>Let me see.\n" + CALL, tools=[TOOL]))["choices"]
        [call] = choice["message"].pop("tool_calls")
        assert choice["message"] == {"role": "assistant", "content": "Let me see."}
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
        assert choice["finish_reason"] == "tool_calls"

    def test_streamed(self, served: Served) -> None:
        body = chat_body("<|slow|><|say|>" + CALL + CALL, tools=[TOOL])
        deltas = [c["choices"][0] for c in stream(served, CHAT, body)]
        pieces = [p for d in deltas for p in d["delta"].get("tool_calls", [])]
        for index in (0, 1):
            mine = [p for p in pieces if p["index"] == index]
            assert [p.get("type") for p in mine] == ["function"] + [None] * (len(mine) - 1)
            assert len({p["id"] for p in mine if "id" in p}) == 1
            assert mine[0]["function"]["name"] == "f"
            assert "".join(p["function"]["arguments"] for p in mine) == '{"a": "b"}'
        assert len(pieces) > 4  # arguments come as they are made
        assert deltas[-1]["finish_reason"] == "tool_calls"

    def test_one_call_only(self, served: Served) -> None:
        body = chat_body("<|say|>" + CALL + CALL, tools=[TOOL], parallel_tool_calls=False)
        assert len(post(served, CHAT, body)["choices"][0]["message"]["tool_calls"]) == 1

    @pytest.mark.parametrize("tools", [{}, {"tools": [TOOL], "tool_choice": "none"}])
    def test_without_tools_it_is_text(self, served: Served, tools: dict[str, Any]) -> None:
        [choice] = post(served, CHAT, chat_body("<|say|>" + CALL, **tools))["choices"]
        assert choice["message"] == {"role": "assistant", "content": CALL}
        assert choice["finish_reason"] == "stop"

    def test_cut_short_by_length(self, served: Served) -> None:
        body = chat_body("<|say|>" + CALL, tools=[TOOL], max_tokens=50)
        [choice] = post(served, CHAT, body)["choices"]
        assert choice["finish_reason"] == "length"
        assert '{"a": "b"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


class TestTokens:
    def test_there_and_back(self, served: Served) -> None:
        found = post_json(served, "/tokenize", {"model": "tiny", "prompt": "aé", "return_token_strs": True})
        assert (found["count"], found["max_model_len"]) == (3, 4096)
        assert found["token_strs"] == ["a", "\ufffd", "\ufffd"]
        assert post_json(served, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": "aé"}

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/detokenize", {"tokens": [5, 999]}, "tokens[1]"),
            ("/detokenize", {"tokens": [5], "model": "gpt"}, "model"),
        ],
    )
    def test_refusals(self, served: Served, path: str, body: dict[str, Any], param: str) -> None:
        response = served.client.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


class TestMetrics:
    def test_counts_end_where_the_answers_do(self, served: Served) -> None:
        before = scrape(served)
        whole = post(served, TEXT, text_body("abcdef", stop="cd", max_tokens=50, n=2))
        stream(served, TEXT, text_body("abc", max_tokens=7))
        difference = changes(before, scrape(served))
        assert whole["usage"]["completion_tokens"] == 8
        assert difference("generation_tokens_total") == 8 + 7
        assert difference("prompt_tokens_total") == 2 * 6 + 3
        assert difference("request_success_total", finished_reason="stop") == 2
        assert difference("request_success_total", finished_reason="length") == 1
        assert difference("request_success_total", finished_reason="abort") == 0
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"):
            assert difference(f"{name}_count") == 3
        assert difference("request_generation_tokens_sum") == 15
        assert difference("inter_token_latency_seconds_count") == 15 - 3
        assert difference("request_params_n_sum") == 2 + 1
        assert difference("prefix_cache_hits_total") == 3 * 2

    def test_an_aborted_request_counts_as_such(self, served: Served) -> None:
        before = scrape(served)
        with pytest.raises(httpx.ReadTimeout):
            served.client.post(TEXT, json=text_body("<|slow|>", max_tokens=3000), timeout=0.3)
        assert eventually(
            lambda: changes(before, scrape(served))("request_success_total", finished_reason="abort") == 1
        )

    def test_a_refused_request_counts_as_nothing(self, served: Served) -> None:
        def counted() -> dict[tuple[str, str], float]:
            # Drafts of requests before this one may still be reported: that is up to the engine.
            return {key: num for key, num in scrape(served).items() if "spec_decode" not in key[0]}

        before = counted()
        assert served.client.post(TEXT, json=text_body(n=4000)).status_code in (400, 429)
        assert counted() == before

    def test_what_the_engine_says(self, served: Served) -> None:
        post(served, TEXT, text_body())
        assert eventually(lambda: ("num_requests_running", "") in scrape(served))
        found = scrape(served)
        assert found["num_requests_running", ""] == found["kv_cache_usage_perc", ""] == 0
        assert found["num_preemptions_total", ""] == 0


class TestDocument:
    def test_every_reference_is_there(self, served: Served) -> None:
        document = served.client.get("/openapi.json").json()
        schemas = document["components"]["schemas"]
        references = {
            part.split('"')[0].removeprefix("#/components/schemas/")
            for part in json.dumps(document).split('"$ref": "')[1:]
        }
        assert references <= set(schemas)
        assert {"ChatRequest", "ErrorBody", "ChatChunk"} <= references
        assert schemas["ChatRequest"]["additionalProperties"] is False

    def test_every_route_is_in_it(self, served: Served) -> None:
        for path, methods in served.client.get("/openapi.json").json()["paths"].items():
            [method] = methods
            response = served.client.request(method, path.replace("{name}", "tiny"), json={})
            assert response.status_code == (200 if method == "get" else 400), path
            assert str(response.status_code) in methods[method]["responses"]

    def test_its_examples_are_answered(self, served: Served) -> None:
        for path, schema in bodies_in(served):
            [example] = schema["examples"]
            post_json(served, path, example)

    def test_its_bounds_are_the_servers(self, served: Served) -> None:
        needed = {
            "best_of": {"n": 1},
            "max_completion_tokens": {"max_tokens": None},
            "top_logprobs": {"logprobs": True},
        }
        bounded = [
            (path, schema["examples"][0], field, kind)
            for path, schema in bodies_in(served)
            for field, described in schema.get("properties", {}).items()
            for kind in described.get("anyOf", [])
            if {"minimum", "exclusiveMinimum"} & set(kind)
        ]
        assert len(bounded) == 26
        for path, example, field, kind in bounded:
            echo = {"echo": True} if (path, field) == ("/v1/completions", "max_tokens") else {}
            body = example | needed.get(field, {}) | echo
            outside = [kind["minimum"] - 1 if "minimum" in kind else kind["exclusiveMinimum"]]
            outside += [kind["maximum"] + 1] if "maximum" in kind else []
            for value in outside:
                response = served.client.post(path, json=body | {field: value})
                assert response.status_code == 400, (field, value)
                assert field in response.json()["error"]["param"], (field, value)
            for edge in {"minimum", "maximum"} & set(kind):
                post_json(served, path, body | {field: kind[edge]})


def bodies_in(served: Served) -> list[tuple[str, dict[str, Any]]]:
    """Each path that takes a body, with the schema of it."""
    document = served.client.get("/openapi.json").json()
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    contents = {path: post["requestBody"]["content"]["application/json"] for path, post in posts.items()}
    names = {path: content["schema"]["$ref"].rpartition("/")[2] for path, content in contents.items()}
    return [(path, document["components"]["schemas"][name]) for path, name in names.items()]


def post_json(served: Served, path: str, body: Any) -> Any:
    response = served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice from its chunks."""
    lists: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            lists.setdefault(name, []).extend(values)
    return {"text": "".join(c["text"] for c in choices), "logprobs": lists}


def scrape(served: Served) -> dict[tuple[str, str], float]:
    """Samples by (name, finished_reason), but for buckets."""
    samples: dict[tuple[str, str], float] = {}
    for line in served.client.get("/metrics").text.splitlines():
        if line.startswith("#") or "_bucket{" in line:
            continue
        name, _, rest = line.removeprefix("paceline:").partition("{")
        labels, _, value = rest.partition("} ")
        reason = labels.partition('finished_reason="')[2].partition('"')[0]
        samples[name, reason] = float(value)
    return samples


def changes(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> Any:
    def change(name: str, finished_reason: str = "") -> float:
        key = (name, finished_reason)
        return after[key] - before.get(key, 0.0)

    return change
