"""Structured answers and prompt logprobs of the default model, through the real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
ASK = [{"role": "user", "content": "Name a city and the number of people who live there."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "maximum": 99999999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--kv-cache-tokens", "4096"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        url = None
        while url is None and (line := server.stdout.readline()):
            url = re.search(r"http://[^/ ]+", line)
        assert url is not None, "the server did not start"
        with openai.OpenAI(base_url=f"{url[0]}/v1", api_key="any", max_retries=0) as made:
            yield made
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_structured_answers_side_by_side_with_a_free_one(client: openai.OpenAI) -> None:
    bodies = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"extra_body": {"guided_regex": "[A-Z][a-z]{2,8}, [0-9]{1,9}"}},
        {"extra_body": {"structured_outputs": {"choice": ["Rome", "Paris"]}}},
        {},
    ]

    def ask(body: dict[str, object]) -> tuple[str, str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, max_tokens=150, **body
        )
        return answer.choices[0].message.content or "", answer.choices[0].finish_reason

    alone = ask(bodies[3])
    with ThreadPoolExecutor(4) as pool:
        (as_json, reason), (as_regex, _), (as_choice, _), free = pool.map(ask, bodies)
    assert reason == "stop"
    assert set(json.loads(as_json)) == {"city", "people"}
    assert re.fullmatch("[A-Z][a-z]{2,8}, [0-9]{1,9}", as_regex)
    assert as_choice in ("Rome", "Paris")
    assert free[0][:40] == alone[0][:40]


def test_echoed_logprobs_tell_sense_from_nonsense(client: openai.OpenAI) -> None:
    texts = ["The capital of France is Paris", "The capital of France is spoon"]
    answer = client.completions.create(
        model=MODEL, prompt=texts, max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    last = []
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        last.append(choice.logprobs.token_logprobs[-2])
    assert last[0] > last[1] + 3


def test_a_template_without_tools_takes_none(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        client.chat.completions.create(model=MODEL, messages=ASK, tools=[tool])
