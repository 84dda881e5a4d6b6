"""OpenAI's own client, unchanged, against this server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pydantic
import pytest
from served import Served

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Weather(pydantic.BaseModel):
    city: str


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"<|say|>{text}"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=say("hello"), user="me", metadata={"a": "b"}, store=False, service_tier="auto",
        logprobs=True, top_logprobs=2, seed=1,
    )  # fmt: skip
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.choices[0].logprobs is not None


def test_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=say("hello"), stream_options={"include_usage": True}
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content == "hello"
    assert final.usage is not None
    assert final.usage.completion_tokens == 6


def test_async(served: Served) -> None:
    async def talk() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            whole = client.chat.completions.create(model="tiny", messages=say("one"))
            streamed = await client.chat.completions.create(model="tiny", messages=say("two"), stream=True)
            pieces = [chunk.choices[0].delta.content async for chunk in streamed]
            return [(await whole).choices[0].message.content, "".join(p or "" for p in pieces)]

    assert asyncio.run(talk()) == ["one", "two"]


def test_tools_and_the_answer_to_them(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(Weather)]  # strict
    answer = client.chat.completions.create(model="tiny", messages=say(CALL), tools=tools)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    following = [
        *say("?"),
        message,  # as the client sends an answer back, with whatever it adds
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    assert client.chat.completions.create(model="tiny", messages=following, tools=tools, n=1).choices


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_streamed_tools_are_parsed(client: openai.OpenAI, choice: object) -> None:
    tools = [openai.pydantic_function_tool(Weather)]
    with client.chat.completions.stream(
        model="tiny", messages=say(CALL), tools=tools, tool_choice=choice
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Rome")


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=say('{"city": "Rome"}'), response_format=Weather
    )
    assert answer.choices[0].message.parsed == Weather(city="Rome")


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["ab", "cd"], max_tokens=2, echo=True, logprobs=1, extra_body={"top_k": 3}
    )
    assert [c.text for c in answer.choices] == ["abab", "cdcd"]
    streamed = client.completions.create(model="tiny", prompt=[97], max_tokens=2, stream=True)
    assert len("".join(chunk.choices[0].text for chunk in streamed)) == 2


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "paceline"
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client.chat.completions.create(model="gpt", messages=say("x"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=say("x"), top_p=2)
    assert refused.value.param == "top_p"
