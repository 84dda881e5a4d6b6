"""Drafts at every edge: the context's end, the pool's, a cached prefix, a chunk, an abort; and logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from made_drafters import ADVERSARIAL, right
from speculation_target import Answers, Target, changing, check_same, request

from paceline.request import EngineRequest, Grammar

DEPTHS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("max_model_len", [7, 8, 9, 12, 13, 16])
def test_rows_that_fill_their_context(target: Target, depth: int, max_model_len: int) -> None:
    """To the last token, from every length of prompt, with drafts that would go on beyond it."""
    requests = [
        request(i, length=i % (max_model_len - 1) + 1, max_tokens=1 + i // 4 % 14, ignore_eos=i % 3 > 0)
        for i in range(45)
    ]
    longer = target.answer(requests, max_model_len=64)
    plain = target.answer(requests, max_model_len=max_model_len)
    assert any(len(each.prompt_ids) + each.params.max_tokens > max_model_len for each in requests)
    for each in requests:
        room = max_model_len - len(each.prompt_ids)
        assert plain[each.request_id].token_ids == longer[each.request_id].token_ids[:room]
    for drafter in (target.knowing(requests, longer, right), target.own_drafter):
        run = target.run(drafter, depth, max_model_len=max_model_len)
        run.add(*requests)
        check_same(plain, run.drain())


def test_rows_that_fill_the_workers_own_context(target: Target) -> None:
    """Up to the last position that the model and its tables have."""
    end = target.info.max_model_len
    requests = [request(i, length=end - 3 - 2 * i, max_tokens=40, ignore_eos=True) for i in range(4)]
    plain = target.answer(requests)
    assert all(len(r.prompt_ids) + len(plain[r.request_id].token_ids) == end for r in requests)
    for depth in (2, 8):
        for drafter in (target.own_drafter, target.knowing(requests, plain, right)):
            check_same(plain, target.answer(requests, drafter, depth))


def crowd() -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.5, "top_k": 9},
        {"grammar": Grammar("regex", "[a-z]{10}([0-9][a-z]{3}){1,9}")},
        {"logprobs": 1, "min_p": 0.1},
    ]
    sizes = {"ignore_eos": True}
    return [
        request(i, length=3 + i % 11, max_tokens=14 + i % 20, **(sizes | kinds[i % 5])) for i in range(15)
    ]


@pytest.fixture(scope="module")
def crowd_answers(target: Target) -> Answers:
    return target.answer(crowd())


@pytest.mark.parametrize(("depth", "num_pages"), [(1, 24), (2, 16), (4, 20), (8, 16), (None, 16), (None, 28)])
@pytest.mark.parametrize("drafter", ["good", "adversarial", "head"])
def test_few_pages(
    target: Target, crowd_answers: Answers, depth: int | None, num_pages: int, drafter: str
) -> None:
    """Rows are preempted while they draft, and come back; drafts never take a page that somebody lacks."""
    made = {
        "good": lambda: target.knowing(crowd(), crowd_answers, right),
        "adversarial": lambda: target.knowing(crowd(), crowd_answers, ADVERSARIAL),
        "head": lambda: target.own_drafter,
    }[drafter]()
    limits = {"num_pages": num_pages, "max_model_len": 52, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    run = target.run(made, changing() if depth is None else depth, **limits)
    run.add(*crowd())
    check_same(crowd_answers, run.drain())
    assert run.scheduler.stats().num_preemptions > 0
    assert any(any(depths) for depths in run.worker.depths)


@pytest.mark.parametrize("budget", [8, 13, 40])
def test_chunked_prompts_beside_drafts(target: Target, budget: int) -> None:
    requests = [request(i, length=2 + 13 * (i % 7), max_tokens=12) for i in range(14)]
    plain = target.answer(requests)
    for drafter in (target.own_drafter, target.knowing(requests, plain, ADVERSARIAL)):
        run = target.run(drafter, 3, max_num_batched_tokens=budget, max_num_seqs=6)
        run.add(*requests)
        check_same(plain, run.drain())
        mixed = [plan for plan, _ in run.worker.steps if {row.samples for row in plan.rows} == {False, True}]
        assert any(row.depth for plan in mixed for row in plan.rows)


def test_cached_prefixes(target: Target) -> None:
    """Pages that rows with drafts have filled are others' prefixes: nothing rejected may be in them."""
    first = [request(i, max_tokens=30, ignore_eos=True) for i in range(20)]
    plain = target.answer(first)
    # Prompts that are those texts and a little more.
    second = []
    for each in first:
        text = [*each.prompt_ids, *plain[each.request_id].token_ids][:29]
        second.append(EngineRequest(f"again {each.request_id}", [*text, 9], each.params))
    alone = target.answer(second, prefix_caching=False)

    run = target.run(target.knowing(first, plain, ADVERSARIAL), 4)
    run.add(*first)
    check_same(plain, run.drain())
    run.answers.clear()
    run.add(*second)
    check_same(alone, run.drain())
    assert all(answer.num_cached_tokens == 28 for answer in run.answers.values())


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_of_a_block(target: Target, depth: int, num_top: int) -> None:
    """One for each token, of the model itself, whether its token was drafted or not."""
    params = {"logprobs": num_top, "max_tokens": 14, "top_k": 3, "presence_penalty": 1.0}
    asking = [request(i, **params) for i in range(16)]
    requests = [*asking, *(request(50 + i) for i in range(8))]  # who does not ask gets none
    plain = target.answer(requests)
    run = target.run(target.knowing(requests, plain, ADVERSARIAL), depth)
    run.add(*requests)
    check_same(plain, run.drain())
    for each in requests:
        answer = run.answers[each.request_id]
        assert len(answer.logprobs) == (len(answer.token_ids) if each in asking else 0)
        assert all(len(entry.top_ids) == num_top for entry in answer.logprobs)
        theirs = plain[each.request_id].logprobs
        assert [entry.top_ids for entry in answer.logprobs] == [entry.top_ids for entry in theirs]
    assert run.worker.num_accepted > 0


def test_aborts_in_mid_flight(target: Target) -> None:
    """Requests come and go at every step, at every stage of their lives."""
    requests = [request(i, length=2 + 5 * (i % 9), max_tokens=20, ignore_eos=True) for i in range(60)]
    plain = target.answer(requests)
    limits = {"num_pages": 60, "max_model_len": 80, "max_num_seqs": 10, "max_num_batched_tokens": 30}
    run = target.run(target.knowing(requests, plain, ADVERSARIAL), changing(), **limits)
    waiting = list(requests)
    for turn in range(1000):
        if not waiting and not run.engine.has_work:
            break
        if waiting:
            run.add(waiting.pop(0))
        run.step()
        unfinished = [name for name, answer in run.answers.items() if answer.reason is None]
        if turn % 3 == 0 and unfinished:
            run.abort(unfinished[turn * 7 % len(unfinished)])
            run.scheduler.check()
    answers = run.drain()
    reasons = [answer.reason for answer in answers.values()]
    assert min(reasons.count("abort"), reasons.count("length")) > 5
    for name, answer in answers.items():
        wanted = plain[name].token_ids
        assert answer.token_ids == (wanted[: len(answer.token_ids)] if answer.reason == "abort" else wanted)


def test_what_drafting_did_is_told(target: Target) -> None:
    """The summary of a request, and the engine's own counts, against what was drafted."""
    requests = [request(i, max_tokens=13, ignore_eos=True, speculation_summary=True) for i in range(10)]
    plain = target.answer(requests)
    run = target.run(target.knowing(requests, plain, right), 3)
    run.add(*requests)
    for answer in run.drain().values():
        got = answer.speculation
        assert got is not None
        # The first token comes with the prompt; then blocks of four, of which one is the bonus token.
        assert (got.num_rounds, got.num_drafted, got.num_verified, got.num_accepted) == (3, 9, 9, 9)
        assert (got.accepted_per_pos, got.accept_len, got.acceptance_rate) == ([3, 3, 3], 4.0, 1.0)
    run = target.run(target.own_drafter, 2)
    run.add(*requests)
    for answer in run.drain().values():
        got = answer.speculation
        assert got is not None
        assert got.num_accepted == sum(got.accepted_per_pos) < got.num_drafted
        assert len(got.top_draft_prob_per_pos) == 2
        assert all(1 / 128 < prob < 1 for prob in got.top_draft_prob_per_pos)
    stats = run.scheduler.stats().speculation
    assert stats.num_accepted == run.worker.num_accepted
