"""The default model with the head that is shipped for it, in float32: the words of depth 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import LLM, SamplingParams
from paceline.llm import Completion

pytestmark = pytest.mark.model

QUESTION = "Why is the sky blue?"
OTHERS = [
    "Name three fruits.",
    "Write a haiku about rain.",
    "What is 12 times 12?",
    "Translate 'good morning' into French.",
    "Who wrote Hamlet?",
    "Count from one to ten.",
    "Give me a recipe for pancakes.",
    "What is a prime number?",
    "Hello!",
    "List the days of the week.",
    "Explain gravity to a child.",
    "Write a function that adds two numbers in Python.",
    "What is the capital of Japan?",
    "How do bees make honey?",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PACELINE_CACHE", raising=False)
        # One thread: two would wait for each other on a busy machine.
        with LLM(precision="fp32", threads=1, kv_cache_tokens=4096, prefix_caching=False) as loaded:
            yield loaded


def answer(llm: LLM, asked: list[tuple[str, float]], depth: int) -> list[Completion]:
    """To questions, each at its temperature."""
    params = [
        SamplingParams(
            temperature=temperature, seed=7, max_tokens=10, depth=depth, speculation_summary=True, logprobs=1
        )
        for _, temperature in asked
    ]
    return llm.chat(
        [[{"role": "user", "content": question}] for question, _ in asked], params, progress=False
    )


def test_alone_and_among_fifteen(llm: LLM) -> None:
    """Of sixteen side by side, half are greedy and half at 0.8; the watched two are asked alone as well."""
    watched = [(QUESTION, 0.0), (QUESTION, 0.8)]
    crowd = [*((question, 0.8 * (i % 2)) for i, question in enumerate(OTHERS)), *watched]
    alone = [answer(llm, [each], 0)[0] for each in watched]
    plain = answer(llm, crowd, 0)
    assert [each.token_ids for each in plain[-2:]] == [each.token_ids for each in alone]
    assert alone[0].token_ids != alone[1].token_ids

    drafted = [answer(llm, [each], 2)[0] for each in watched]
    together = answer(llm, crowd, 2)
    num_drafted = num_accepted = 0
    for got, wanted in zip([*drafted, *together], [*alone, *plain], strict=True):
        assert got.token_ids == wanted.token_ids
        assert (got.text, got.finish_reason) == (wanted.text, wanted.finish_reason)
        assert got.logprobs is not None
        assert wanted.logprobs is not None
        theirs = [entry.logprob for entry in wanted.logprobs]
        assert [entry.logprob for entry in got.logprobs] == pytest.approx(theirs, abs=1e-3)
        summary = got.choices[0].speculation
        assert summary is not None
        num_drafted += summary.num_drafted
        num_accepted += summary.num_accepted
    assert num_accepted > 0.2 * num_drafted  # the head has learnt something: not all this was refused
