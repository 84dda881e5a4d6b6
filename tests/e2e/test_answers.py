"""From words to words with the default model: what a user sees first, and what the prefix cache saves."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.stats import SchedulerStats

pytestmark = pytest.mark.model

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def stats(llm: LLM) -> SchedulerStats:
    assert llm._engine is not None
    return llm._engine.stats()


def test_the_capital_of_france(llm: LLM) -> None:
    (answer,) = llm.chat(CAPITAL, GREEDY, progress=False)
    assert "Paris" in answer.text
    assert answer.finish_reason in ("stop", "length")


def test_an_answer_ends_by_itself(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 2 + 2? Answer with the number alone."}]
    (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=200), progress=False)
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    assert answer.token_ids[-1] in llm.tokenizer.encode("<|im_end|>", add_special_tokens=False)


def test_the_stream_is_the_answer(llm: LLM) -> None:
    prompt = llm.chat_prompt(CAPITAL)
    pieces = list(llm.stream(prompt, GREEDY))
    (answer,) = llm.generate([prompt], GREEDY, progress=False)
    assert "".join(piece.text for piece in pieces) == answer.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == answer.token_ids


def test_a_seed_repeats_its_words_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=16, n=3)
    first, second = (llm.chat(CAPITAL, params, progress=False)[0] for _ in range(2))
    assert [c.token_ids for c in first.choices] == [c.token_ids for c in second.choices]
    assert len({c.token_ids for c in first.choices}) == 3


def test_a_shared_prefix_is_computed_once(llm: LLM) -> None:
    """500 tokens in common: the second request computes what is left after their full pages."""
    page_size = 16
    letters = "You keep the library's catalogue. " + "Shelf by shelf, every book has its number. " * 80
    prefix = llm.tokenizer.encode(letters)[:500]
    assert len(prefix) == 500
    prompts = [prefix + llm.tokenizer.encode(f" The {word} book is called") for word in ("first", "seventh")]
    assert prompts[0] != prompts[1]

    before = stats(llm)
    (first,) = llm.generate([prompts[0]], GREEDY, progress=False)
    middle = stats(llm)
    (second,) = llm.generate([prompts[1]], GREEDY, progress=False)
    after = stats(llm)

    cached = 500 // page_size * page_size
    assert middle.num_prompt_tokens_computed - before.num_prompt_tokens_computed == len(prompts[0])
    assert after.num_prompt_tokens_computed - middle.num_prompt_tokens_computed == len(prompts[1]) - cached
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)


def test_cached_prefixes_do_not_change_the_answer(llm: LLM) -> None:
    question = [{"role": "user", "content": "Name three rivers of Italy, and the cities on them. " * 4}]
    first, second = (llm.chat(question, GREEDY, progress=False)[0] for _ in range(2))
    assert first.num_cached_tokens < second.num_cached_tokens
    assert first.text == second.text
