"""Faults that speculation brought to other servers, each at every depth: on the real worker, to the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_drafters import Knowing, Spoil, right
from speculation_target import Target, check_same, request
from tiny_targets import EOS

from paceline import LLM, SamplingParams
from paceline.llm import Completion
from paceline.request import Grammar

depths = pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
PROMPT = "draft me"


class Texts:
    """The whole way from text to text, with a drafter that knows the answers."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(str(folder), precision="fp32", threads=1, draft="ngram", depth=0, debug=True)
        engine: Any = self.llm._engine
        self._worker = engine._worker
        self.prompt_ids = self.llm.tokenizer.encode(PROMPT)

    def complete(
        self, params: SamplingParams, answer: Sequence[int] = (), spoil: Spoil = right
    ) -> Completion:
        self._worker._drafter = Knowing(self._worker._rows.token_ids, [[*self.prompt_ids, *answer]], spoil)
        [completion] = self.llm.generate(PROMPT, params, progress=False)
        return completion

    def steps(self) -> int:
        engine: Any = self.llm._engine
        rounds: list[int] = engine.stats().speculation.rounds_by_depth
        return sum(rounds)


@pytest.fixture(scope="module")
def texts(folder: Path) -> Texts:
    return Texts(folder)


def letters(depth: int, max_tokens: int = 8, **more: Any) -> SamplingParams:
    """Answers of lower-case letters, all of them likely."""
    bias = {byte: 100.0 for byte in range(64, 90)}
    return SamplingParams(**{"seed": 3, "logit_bias": bias, "max_tokens": max_tokens, "depth": depth, **more})


def plain(texts: Texts, **more: Any) -> Completion:
    return texts.complete(letters(0, **more))


def same(got: Completion, wanted: Completion) -> None:
    mine, theirs = got.choices[0], wanted.choices[0]
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert (mine.logprobs is None) == (theirs.logprobs is None)
    if mine.logprobs is not None and theirs.logprobs is not None:
        assert [e.top_ids for e in mine.logprobs] == [e.top_ids for e in theirs.logprobs]
        assert [e.logprob for e in mine.logprobs] == pytest.approx(
            [e.logprob for e in theirs.logprobs], abs=1e-4
        )


@depths
def test_1_a_stop_token_in_the_middle_of_a_block(texts: Texts, depth: int) -> None:
    whole = plain(texts, max_tokens=12)
    stop = whole.token_ids[2]
    assert stop not in whole.token_ids[:2]
    params = letters(depth, max_tokens=5, stop_token_ids=(stop,), logprobs=1)
    got = texts.complete(params, whole.token_ids).choices[0]
    assert (got.finish_reason, got.stop_reason, got.token_ids) == ("stop", stop, whole.token_ids[:3])
    assert got.text == whole.text[:2]
    assert got.logprobs is not None
    assert len(got.logprobs) == 3


@depths
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_2_a_block_crosses_max_tokens(target: Target, depth: int, max_tokens: int) -> None:
    long = [request(i, max_tokens=20, ignore_eos=True) for i in range(6)]
    answers = target.answer(long)
    short = [request(i, max_tokens=max_tokens, ignore_eos=True, logprobs=0) for i in range(6)]
    run = target.run(target.knowing(long, answers, right), depth)
    run.add(*short)
    for name, got in run.drain().items():
        assert (got.token_ids, got.reason) == (answers[name].token_ids[:max_tokens], "length")
        assert len(got.logprobs) == max_tokens
    assert run.scheduler.stats().num_generated_tokens == 6 * max_tokens
    # The first token is the prompt's; the others take as few steps as blocks of 1 + depth can.
    assert len(run.worker.steps) == 1 + -(-(max_tokens - 1) // (1 + depth))


@depths
def test_3_a_stop_string_in_the_middle_of_a_block(texts: Texts, depth: int) -> None:
    whole = plain(texts, max_tokens=12)
    stop = whole.text[4:6]
    end = whole.text.index(stop) + 2
    wanted = plain(texts, max_tokens=12, stop=(stop,), logprobs=2)
    assert len(wanted.token_ids) == end
    got = texts.complete(letters(depth, max_tokens=12, stop=(stop,), logprobs=2), whole.token_ids)
    same(got, wanted)
    assert (got.text, got.finish_reason) == (whole.text[: end - 2], "stop")
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.token_ids) == end


@depths
def test_4_a_stop_string_that_would_end_beyond_max_tokens(texts: Texts, depth: int) -> None:
    whole = plain(texts, max_tokens=12)
    stop, max_tokens = whole.text[4:7], 6
    assert whole.text.index(stop) == 4
    got = texts.complete(letters(depth, max_tokens=max_tokens, stop=(stop,)), whole.token_ids)
    assert (got.finish_reason, len(got.token_ids)) == ("length", max_tokens)
    assert got.text == whole.text[:max_tokens]


JSON = Grammar("json", '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 6}')
LOOSE = Grammar("regex", "[a-c]{2,40}")  # may end at many places, where it could go on


@depths
def test_5_eos_as_an_accepted_draft_under_a_grammar(target: Target, depth: int) -> None:
    ending = {"logit_bias": {EOS: 1.5}, "max_tokens": 30}
    bound = [request(i, grammar=LOOSE if i % 2 else JSON, **ending) for i in range(40)]
    others = [request(100 + i, max_tokens=20) for i in range(10)]
    requests = [*bound, *others]
    plain = target.answer(requests)
    ended = [plain[each.request_id] for each in bound if plain[each.request_id].stop_token_id == EOS]
    assert len({len(answer.token_ids) for answer in ended}) > 3  # at many places in a block
    # Behind EOS the drafter has more to say: what the engine must never ask the matcher about.
    drafter = Knowing(
        target.worker._rows.token_ids,
        [[*each.prompt_ids, *plain[each.request_id].token_ids, EOS, 65, 65, 65] for each in requests],
        right,
    )
    run = target.run(drafter, depth)
    run.add(*requests)
    check_same(plain, run.drain())
    assert (run.worker.num_accepted > 0) == (depth > 0)


@depths
def test_6_drafts_that_the_grammar_forbids(target: Target, depth: int) -> None:
    requests = [request(i, grammar=LOOSE if i % 2 else JSON, max_tokens=20) for i in range(30)]
    plain = target.answer(requests)
    forbidden = target.knowing(
        requests,
        plain,
        lambda drafts, num_known: [drafts[0], 90 + num_known % 7, *drafts[2:], 200][: len(drafts)],
    )
    check_same(plain, target.answer(requests, forbidden, depth))
    check_same(plain, target.answer(requests, target.own_drafter, depth))


@depths
def test_7_a_request_that_is_given_up(target: Target, depth: int) -> None:
    """Within a step, whatever is drafted for it; the others never notice, and nothing is held for it."""
    requests = [request(i, max_tokens=40, ignore_eos=True, length=5 + i) for i in range(8)]
    plain = target.answer(requests)
    run = target.run(target.knowing(requests, plain, right), depth, prefix_caching=False)
    run.add(*requests)
    for given_up in ("3", "0", "7"):
        run.step()
        run.step()
        held = run.scheduler.stats().num_pages_used
        run.abort(given_up)
        run.scheduler.check()
        assert run.scheduler.stats().num_pages_used < held
        assert run.answers[given_up].reason == "abort"
    answers = run.drain()
    for name, answer in answers.items():
        wanted = plain[name].token_ids
        assert answer.token_ids == (wanted[: len(answer.token_ids)] if answer.reason == "abort" else wanted)


@depths
@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_8_penalties_count_the_drafts_of_the_same_block(target: Target, depth: int, kind: str) -> None:
    """Two likely tokens, and a penalty that changes which of them comes next within a block."""
    params = {kind: 2.0, "logit_bias": {70: 9.0, 71: 9.0, 75: 8.5}, "max_tokens": 16, "ignore_eos": True}
    requests = [request(i, temperature=0.0 if i % 2 else 1.0, **params) for i in range(20)]
    plain = target.answer(requests)
    without = target.answer(
        [
            request(i, **{**_params(each), kind: 1.0 if "rep" in kind else 0.0})
            for i, each in enumerate(requests)
        ]
    )
    assert sum(plain[name].words != without[name].words for name in plain) > 10
    check_same(plain, target.answer(requests, target.knowing(requests, plain, right), depth))
    # Drafts as an engine would make them that does not count: plausible, and wrong.
    check_same(plain, target.answer(requests, target.knowing(requests, without, right), depth))


def _params(each: Any) -> dict[str, Any]:
    return {
        name: getattr(each.params, name) for name in ("temperature", "logit_bias", "max_tokens", "ignore_eos")
    }


def test_blocks_are_taken_whole_where_nothing_cuts_them(texts: Texts) -> None:
    """The control: with these drafts the tests above do see blocks of 1 + depth."""
    whole = plain(texts, max_tokens=11)
    taken: list[int] = []
    for depth in range(5):
        before = texts.steps()
        same(texts.complete(letters(depth, max_tokens=11), whole.token_ids), whole)
        taken.append(texts.steps() - before)
    assert taken == [10, 5, 4, 3, 2]
