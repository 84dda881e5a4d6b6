"""Grammars and prompt logprobs through the whole engine, on a tiny random model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import RequestError
from paceline.request import EngineRequest, Grammar, RequestOutput, TokenLogprobs

REGEX = r"[a-f]{3,9}-[0-9]{2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"precision": "fp32", "threads": 1, "kv_cache_tokens": 2048, **settings})


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def wanted(grammar: Grammar | None, **params: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"seed": 1, "max_tokens": 60, **params})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_is_in_the_language(llm: LLM, temperature: float) -> None:
    params = wanted(Grammar("regex", REGEX), temperature=temperature, n=3)
    for choice in llm.generate("x", params, progress=False)[0].choices:
        assert re.fullmatch(REGEX, choice.text)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "extra", [{"ignore_eos": True}, {"min_tokens": 50}, {"repetition_penalty": 1.5}, {"top_k": 1}]
)
def test_beside_other_parameters(llm: LLM, extra: dict[str, Any]) -> None:
    [completion] = llm.generate("x", wanted(Grammar("regex", REGEX), **extra), progress=False)
    assert re.fullmatch(REGEX, completion.text)
    assert completion.finish_reason == "stop"


def test_logit_bias_acts_within_the_grammar(llm: LLM) -> None:
    [q] = llm.tokenizer.encode("q")
    params = wanted(Grammar("regex", "[pq]{8}"), logit_bias={q: 100.0})
    assert llm.generate("x", params, progress=False)[0].text == "q" * 8


def test_json(llm: LLM) -> None:
    params = wanted(Grammar("json", json.dumps(SCHEMA)), max_tokens=400, logit_bias=_no_space(llm))
    for choice in llm.generate("x", params, progress=False)[0].choices:
        assert choice.finish_reason == "stop"
        assert set(json.loads(choice.text)) == {"name", "age"}


def test_logprobs_stay_the_models_own(llm: LLM) -> None:
    free = llm.generate("x", wanted(None, logprobs=5, max_tokens=1), progress=False)[0]
    bound = llm.generate("x", wanted(Grammar("regex", "[0-9]+"), logprobs=5, max_tokens=1), progress=False)[0]
    assert free.logprobs is not None
    assert bound.logprobs is not None
    assert bound.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert bound.logprobs[0].top_logprobs == pytest.approx(free.logprobs[0].top_logprobs)


def test_others_in_the_batch_do_not_notice(llm: LLM) -> None:
    prompts = ["one", "two", "three"]
    free = wanted(None, max_tokens=20)
    alone = [llm.generate(p, free, progress=False)[0].token_ids for p in prompts]
    mixed = [
        free,
        wanted(Grammar("regex", REGEX)),
        wanted(Grammar("regex", "(.*a.{200}){8}"), max_tokens=300),
    ]
    together = llm.generate(prompts, [free, mixed[1], free], progress=False)
    assert [together[0].token_ids, together[2].token_ids] == [alone[0], alone[2]]


def test_a_grammar_that_fails_blames_the_request_and_the_engine_goes_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="grammar"):
        llm.generate("x", wanted(Grammar("regex", "(")), progress=False)
    assert llm.generate("x", wanted(None, max_tokens=3), progress=False)[0].finish_reason == "length"


def test_a_preempted_row_goes_on_where_its_grammar_was(folder: Path) -> None:
    params = wanted(Grammar("regex", "[a-z]{60}"), max_tokens=100)
    roomy = make(folder).generate(["a" * 20, "b" * 20, "c" * 20], params, progress=False)
    tight = make(folder, kv_cache_tokens=160, max_model_len=160, debug=True)
    cramped = tight.generate(["a" * 20, "b" * 20, "c" * 20], params, progress=False)
    assert tight._engine is not None
    assert tight._engine.stats().num_preemptions > 0
    assert [c.token_ids for c in cramped] == [c.token_ids for c in roomy]


def _no_space(llm: LLM) -> dict[int, float]:
    """A random model would fill its answer with white space, which JSON allows anywhere."""
    return {llm.tokenizer.encode(char)[0]: -100.0 for char in " \t\r\n"}


class TestPromptLogprobs:
    @pytest.mark.parametrize("chunk", [8, 512])
    @pytest.mark.parametrize("prompt_len", [1, 2, 7, 100])
    def test_they_are_the_models(self, folder: Path, chunk: int, prompt_len: int) -> None:
        import transformers

        llm = make(folder, max_num_batched_tokens=chunk, max_num_seqs=4)
        prompt = [(7 * i) % 256 for i in range(prompt_len)]
        outputs = run(llm, [prompt, prompt[:5]], SamplingParams(seed=0, max_tokens=3, prompt_logprobs=2))
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            reference = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        got = outputs["0"]
        assert len(got) == prompt_len - 1
        for t, entry in enumerate(got):
            assert entry.logprob == pytest.approx(reference[t, prompt[t + 1]].item(), abs=1e-3)
            best = reference[t].topk(2)
            assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-3)

    def test_a_cached_prefix_hides_none(self, folder: Path) -> None:
        llm = make(folder)
        prompt, params = list(range(80)), SamplingParams(seed=0, max_tokens=2, prompt_logprobs=0)
        first = run(llm, [prompt], params)["0"]
        second = run(llm, [prompt], params)["0"]
        assert len(first) == len(second) == 79
        plain = llm.generate([prompt], SamplingParams(max_tokens=2), progress=False)[0]
        assert plain.num_cached_tokens == 64

    def test_each_comes_once_through_preemptions(self, folder: Path) -> None:
        prompts = [[(i * 3 + k) % 256 for i in range(60)] for k in range(3)]
        params = SamplingParams(seed=0, max_tokens=60, prompt_logprobs=0, ignore_eos=True)
        roomy = run(make(folder), prompts, params)
        tight = make(
            folder, kv_cache_tokens=176, max_model_len=176, max_num_batched_tokens=16, max_num_seqs=4
        )
        cramped = run(tight, prompts, params)
        assert tight._engine is not None
        assert tight._engine.stats().num_preemptions > 0
        for name, entries in roomy.items():
            assert [e.logprob for e in cramped[name]] == pytest.approx([e.logprob for e in entries], abs=1e-3)


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, list[TokenLogprobs]]:
    """The prompts' logprobs, by place, as the engine gives them out."""
    engine = llm._engine
    assert engine is not None
    got: dict[str, list[TokenLogprobs]] = {}
    open_ids = set()
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(i), prompt, params))
        open_ids.add(str(i))
        got[str(i)] = []
    generated: dict[str, int] = dict.fromkeys(open_ids, 0)
    while open_ids:
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            got[output.request_id] += output.prompt_logprobs or ()
            if output.token_ids and not generated[output.request_id]:
                assert len(got[output.request_id]) == len(prompts[int(output.request_id)]) - 1
            generated[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)
    return got
