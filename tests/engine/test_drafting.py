"""Depths by request, what is counted of drafts, and a drafter that gives up."""

import logging

import pytest
from engine_driver import Driver, make_request
from fake_worker import EOS, hashed
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.drafting import Tally
from paceline.errors import RequestError
from paceline.request import SpeculationSummary
from paceline.step import RowResult

at_every_depth = pytest.mark.parametrize("depth", range(5))
both_ways = pytest.mark.parametrize("lag", [0, 1], ids=["serial", "overlap"])


def five(history: object) -> int:
    return 5


def depths(driver: Driver) -> list[list[int]]:
    """Of the rows of each plan."""
    return [[step.depth for step in plan.rows] for plan in driver.worker.plans]


# Depths.


def test_a_request_goes_before_the_default():
    driver = Driver(max_num_batched_tokens=64, choose_depth=lambda n: 2, next_token=five)
    for i, depth in enumerate([None, 0, 1, 4]):
        driver.add(make_request(f"r{i}", [1, i + 1], max_tokens=30, depth=depth))
    for _ in range(3):
        driver.step()
    assert depths(driver)[1:] == [[2, 0, 1, 4]] * 2
    driver.drain()


def test_the_largest_depth_bounds_the_chosen_one_and_refuses_the_asked_one():
    driver = Driver(max_depth=3, choose_depth=lambda n: 7, next_token=five)
    driver.add(make_request("a", [1], max_tokens=20))
    driver.step()
    driver.step()
    assert depths(driver)[1] == [3]
    with pytest.raises(RequestError, match="depth must be at most 3, got 4") as caught:
        driver.add(make_request("b", [1], depth=4))
    assert caught.value.param == "depth"
    driver.drain()


def test_one_deep_row_leaves_the_others_their_share():
    driver = Driver(max_num_batched_tokens=9, max_num_seqs=3, next_token=five)
    driver.add(make_request("deep", [1], max_tokens=40, depth=8))
    driver.add(make_request("plain", [2], max_tokens=40, depth=0))
    driver.step()
    driver.add(make_request("prompt", list(range(1, 21)), max_tokens=2))
    driver.step()
    # 9 tokens for three: the deep row gets 3 of them, the plain one needs 1, the prompt has the rest.
    assert [(step.query_len, step.depth) for step in driver.worker.plans[-1].rows] == [(1, 2), (1, 0), (5, 0)]
    driver.drain()


@both_ways
@given(
    asked=st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=6),
    chosen=st.integers(0, 8),
    budget=st.integers(4, 40),
)
@settings(deadline=None)
def test_words_are_the_same_at_all_depths(lag: int, asked: list[int | None], chosen: int, budget: int):
    """The driver compares each answer with what the request comes to alone."""
    driver = Driver(
        lag=lag,
        choose_depth=lambda n: chosen,
        accepts=lambda history, depth: hashed([*history, 2]) % (depth + 1),
        max_num_batched_tokens=budget,
    )
    for i, depth in enumerate(asked):
        driver.add(make_request(f"r{i}", [i + 1, 2, 3], max_tokens=9, depth=depth, logprobs=0))
    driver.drain()


# Counts.


@given(asked=st.lists(st.none() | st.integers(0, 8), min_size=1, max_size=5), chosen=st.integers(0, 8))
@settings(deadline=None)
def test_counts_add_up(asked: list[int | None], chosen: int):
    driver = Driver(
        choose_depth=lambda n: chosen,
        accepts=lambda history, depth: hashed([*history, 3]) % (depth + 1),
        next_token=five,
        max_num_batched_tokens=64,
        num_pages=200,
    )
    for i, depth in enumerate(asked):
        request = make_request(f"r{i}", [i + 1, 2], 20, depth=depth, speculation_summary=True)
        driver.add(request)
    driver.drain()
    stats = driver.scheduler.stats()
    total = stats.speculation
    num_rounds = sum(total.rounds_by_depth)
    # No stop and a worker that keeps to max_tokens: nothing is cut, so every token is accounted for.
    assert stats.num_generated_tokens == 20 * len(asked)
    assert stats.num_generated_tokens == len(asked) + num_rounds + total.num_accepted
    assert total.num_rounds == num_rounds - total.rounds_by_depth[0]
    assert total.num_drafted == sum(depth * num for depth, num in enumerate(total.rounds_by_depth))
    assert total.num_accepted == sum(total.accepted_per_pos)
    assert len(total.accepted_per_pos) == total.max_depth == len(total.rounds_by_depth) - 1
    assert total.accepted_per_pos == sorted(total.accepted_per_pos, reverse=True)
    assert total.num_accepted <= total.num_verified <= total.num_drafted

    summaries = [driver.outputs[request_id][-1].speculation for request_id in driver.requests]
    assert None not in summaries
    for name in ("num_rounds", "num_drafted", "num_verified", "num_accepted"):
        assert sum(getattr(summary, name) for summary in summaries) == getattr(total, name)
    for summary in summaries:
        assert summary.top_draft_prob_per_pos == [0.5**i for i in range(len(summary.top_draft_prob_per_pos))]
        assert len(summary.accepted_per_pos) <= len(summary.top_draft_prob_per_pos)


def test_rates_divide_by_what_was_proposed_and_lengths_hold_the_bonus_token():
    tally = Tally()
    tally.add(RowResult(0, 3, (1, 2, 3), num_drafted=3, num_verified=2, draft_probs=(0.5, 0.5, 0.25)))
    tally.add(RowResult(0, 3, (1,), num_drafted=1, num_verified=1, draft_probs=(0.25,)))
    tally.add(RowResult(0, 3, (1,)))  # the drafter had nothing to say: no round
    tally.add(RowResult(0, 3, (), num_drafted=2, num_verified=1, draft_probs=(0.75, 0.75)))
    summary = tally.summary()
    assert summary == SpeculationSummary(
        num_rounds=3,
        num_drafted=6,
        num_verified=4,
        num_accepted=2,
        accepted_per_pos=[1, 1],
        top_draft_prob_per_pos=[0.5, 0.625, 0.25],
    )
    assert summary.accept_len == 1 + 2 / 3
    assert summary.acceptance_rate == 2 / 6
    nothing = Tally().summary()
    assert (nothing.accept_len, nothing.acceptance_rate) == (None, None)


@at_every_depth
def test_what_is_accepted_beyond_a_stop_is_not_generated(depth: int):
    """Trap 1, with the counters: the block after the first token is 10 11 STOP 20 21 at depth 4."""
    script = [9, 10, 11, EOS, 20, 21, 22]
    driver = Driver(choose_depth=lambda n: depth, next_token=lambda history: script[len(history) - 3])
    driver.add(make_request("a", [1, 2, 3], max_tokens=7, logprobs=0, speculation_summary=True))
    driver.drain()
    stats = driver.scheduler.stats()
    assert driver.tokens("a") == [9, 10, 11, EOS]
    assert stats.num_generated_tokens == 4
    # The rounds that 3 tokens take in blocks of 1 + depth; all that was drafted was right.
    num_rounds = -(-3 // (1 + depth))
    drafted = sum(min(depth, 6 - done * (1 + depth) - 1) for done in range(num_rounds))
    assert stats.speculation.num_accepted == stats.speculation.num_drafted == drafted
    summary = driver.outputs["a"][-1].speculation
    assert summary is not None
    assert summary.num_accepted == drafted


@at_every_depth
@both_ways
def test_an_abort_frees_pages_within_a_step_at_any_depth(depth: int, lag: int):
    """Trap 7: whoever hangs up holds nothing, the drafts of a step in flight among it."""
    driver = Driver(lag=lag, choose_depth=lambda n: depth, next_token=five)
    driver.add(make_request("gone", [1, 2, 3], max_tokens=100))
    driver.add(make_request("stays", [4, 5], max_tokens=100, depth=4 - depth))
    for _ in range(4):
        driver.step()
    held = driver.scheduler.stats().num_pages_used
    num_pages = len(driver.scheduler._roster._running["gone"].page_ids)
    driver.abort("gone")
    driver.step()
    stays = len(driver.scheduler._roster._running["stays"].page_ids)
    assert num_pages > 0
    assert held > driver.scheduler.stats().num_pages_used == stays
    driver.drain()


def test_no_summary_unless_asked_for():
    driver = Driver(choose_depth=lambda n: 2, next_token=five)
    driver.add(make_request("a", [1]))
    driver.drain()
    assert {output.speculation for output in driver.outputs["a"]} == {None}


@both_ways
def test_a_summary_goes_on_after_a_preemption(lag: int):
    driver = Driver(lag=lag, num_pages=9, choose_depth=lambda n: 1, prefix_caching=False, next_token=five)
    for i in range(3):
        driver.add(make_request(f"r{i}", [i + 1] * 6, max_tokens=16, speculation_summary=True))
    driver.drain()
    assert driver.scheduler.stats().num_preemptions > 0
    for outputs in driver.outputs.values():
        rounds = [output.speculation.num_rounds for output in outputs if output.speculation]
        assert rounds == sorted(rounds)
        assert rounds[-1] > 0


@both_ways
def test_computing_an_answer_again_after_a_preemption_is_no_round(lag: int):
    driver = Driver(lag=lag, num_pages=9, prefix_caching=False, next_token=five)
    for i in range(3):
        driver.add(make_request(f"r{i}", [i + 1] * 6, max_tokens=16))
    driver.drain()
    starts = [start for plan in driver.worker.plans for start in plan.starts]
    again = [start for start in starts if len(start.token_ids) > start.prompt_len]
    assert again
    assert driver.scheduler.stats().speculation.rounds_by_depth[0] == 3 * 15 - len(again)


# A drafter that gives up.


@both_ways
def test_a_drafter_that_failed_stays_off_and_says_why(lag: int, caplog: pytest.LogCaptureFixture):
    driver = Driver(lag=lag, choose_depth=lambda n: 3, next_token=five)
    for name in ("default", "asked"):
        driver.add(make_request(name, [1, 2], max_tokens=20, depth=None if name == "default" else 2))
    for _ in range(2 + lag):
        driver.step()
    assert driver.worker.plans[-1].rows[0].depth == 3
    with caplog.at_level(logging.WARNING):
        driver.worker.drafter_error = "RuntimeError: out of memory"
        while driver.scheduler.stats().speculation.drafter_error is None:
            driver.step()
        num_plans = len(driver.worker.plans)
        driver.add(make_request("late", [3], max_tokens=5, depth=4))
        driver.drain()
    assert {depth for plan in depths(driver)[num_plans:] for depth in plan} == {0}
    assert [driver.reason(name) for name in ("default", "asked", "late")] == ["length"] * 3
    assert driver.scheduler.stats().speculation.drafter_error == "RuntimeError: out of memory"
    [record] = caplog.records
    assert record.getMessage() == (
        "the drafter failed and stays off; requests go on without drafts: RuntimeError: out of memory"
    )
