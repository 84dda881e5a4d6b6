"""What the scheduler promises, one promise at a time."""

import random

import pytest
from engine_driver import Driver, make_request
from fake_worker import VOCAB_SIZE, hashed

from paceline.errors import QueueFullError, RequestError

both_ways = pytest.mark.parametrize("lag", [0, 1], ids=["serial", "overlap"])


def tokens(num: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=num)


# The door.


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "param", "message"),
    [
        ([], 8, "prompt", "the prompt is empty"),
        ([1] * 20, 8, "prompt", "has 20 tokens, but at most 19 .* context of 20"),
        ([1, VOCAB_SIZE], 8, "prompt", rf"must be in \[0, {VOCAB_SIZE}\), got {VOCAB_SIZE}"),
        ([1, -1], 8, "prompt", r"got -1"),
        (
            [1] * 5,
            9,
            "max_tokens",
            "prompt of 5 tokens with max_tokens 9 needs 4 pages of 4 tokens, .* has 3",
        ),
    ],
)
def test_refuses_what_can_never_run(prompt_ids: list[int], max_tokens: int, param: str, message: str):
    driver = Driver(num_pages=4, max_model_len=20)
    with pytest.raises(RequestError, match=message) as caught:
        driver.add(make_request("a", prompt_ids, max_tokens))
    assert caught.value.param == param
    assert not driver.scheduler.has_work


@both_ways
@pytest.mark.parametrize("depth", [0, 5])
def test_accepts_what_just_fits_and_runs_it(lag: int, depth: int):
    driver = Driver(
        num_pages=4,
        max_model_len=20,
        lag=lag,
        choose_depth=lambda n: depth,
        accepts=lambda history, depth: 0,
        next_token=lambda history: 5,
    )
    driver.add(make_request("a", [1] * 5, max_tokens=8))  # 13 tokens, the last without K/V: 12 in 3 pages
    driver.drain()
    assert len(driver.tokens("a")) == 8
    assert driver.scheduler.stats().num_preemptions == 0


def test_an_id_is_free_again_once_its_request_has_ended():
    driver = Driver()
    driver.add(make_request("a", [1]))
    with pytest.raises(RequestError, match="'a' is in use"):
        driver.add(make_request("a", [2]))
    driver.drain()
    driver.add(make_request("a", [2]))
    driver.drain()


def test_an_id_comes_back_while_its_first_owner_is_in_flight():
    driver = Driver(lag=1)
    driver.add(make_request("a", [1, 2, 3], max_tokens=20))
    driver.step()
    driver.step()
    driver.abort("a")
    driver.add(make_request("a", [4, 5], max_tokens=5))
    driver.drain()


def test_the_queue_is_bounded():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=2, max_queue=3)
    for i in range(5):
        driver.add(make_request(f"r{i}", [1, i + 1]))
    with pytest.raises(QueueFullError, match=r"5 requests are open.* max_num_seqs \(2\).* max_queue \(3\)"):
        driver.add(make_request("late", [1]))
    driver.abort("r4")
    driver.add(make_request("r5", [1]))
    driver.drain()


# Order.


@both_ways
def test_first_come_first_served(lag: int):
    driver = Driver(lag=lag, max_num_seqs=2, next_token=lambda history: 5)
    for i in range(6):
        driver.add(make_request(f"r{i}", [1] * (i + 1), max_tokens=3))
    driver.drain()
    started = [len(start.token_ids) - 1 for plan in driver.worker.plans for start in plan.starts]
    assert started == list(range(6))


def test_decoding_rows_come_before_prompt_chunks():
    driver = Driver(max_num_batched_tokens=8, next_token=lambda history: 5)
    driver.add(make_request("a", [1], max_tokens=20))
    driver.step()
    driver.add(make_request("b", tokens(30), max_tokens=2))
    for _ in range(4):
        driver.step()
    lens = [[step.query_len for step in plan.rows] for plan in driver.worker.plans]
    assert lens == [[1], [1, 7], [1, 7], [1, 7], [1, 7]]
    assert [plan.rows[-1].samples for plan in driver.worker.plans] == [True, False, False, False, False]
    driver.drain()


def test_prompts_share_a_step_in_order():
    driver = Driver(max_num_batched_tokens=10)
    for i, num in enumerate((6, 6, 6)):
        driver.add(make_request(f"r{i}", tokens(num, i), max_tokens=1))
    driver.drain()
    chunks = [[(step.row, step.query_len) for step in plan.rows] for plan in driver.worker.plans]
    assert chunks == [[(0, 6), (1, 4)], [(1, 2), (0, 6)]], "row 0 is free again"


def test_drafts_leave_prompts_their_share_of_the_budget():
    driver = Driver(max_num_batched_tokens=9, choose_depth=lambda n: 8, next_token=lambda history: 5)
    driver.add(make_request("a", [1], max_tokens=60))
    driver.step()
    driver.step()
    assert driver.worker.plans[-1].rows[0].depth == 8, "alone it may have all"
    driver.add(make_request("b", tokens(20), max_tokens=40))
    for _ in range(4):
        driver.step()
        assert driver.worker.plans[-1].rows[0].depth == 3
    assert driver.outputs["b"], "20 prompt tokens in chunks of 5"
    driver.drain()


def test_no_draft_beyond_the_limit():
    driver = Driver(choose_depth=lambda n: 4, next_token=lambda history: 5)
    driver.add(make_request("a", [1], max_tokens=8))
    driver.drain()
    assert [step.depth for plan in driver.worker.plans for step in plan.rows] == [0, 4, 1]


def test_no_step_beyond_the_limit():
    driver = Driver(lag=1, next_token=lambda history: 5)
    driver.add(make_request("a", [1], max_tokens=3))
    driver.drain()
    assert len(driver.worker.plans) == 3


@both_ways
def test_one_token_a_step(lag: int):
    driver = Driver(lag=lag, max_num_seqs=1, max_num_batched_tokens=1, choose_depth=lambda n: 3)
    for i in range(3):
        driver.add(make_request(f"r{i}", tokens(7, i), max_tokens=5))
    driver.drain()
    assert {plan.num_tokens for plan in driver.worker.plans} == {1}


@both_ways
def test_the_oldest_always_gets_on(lag: int):
    """Under more load than the pool holds, without end, each request ends soon after its elders."""
    driver = Driver(lag=lag, num_pages=8, page_size=2, next_token=lambda history: 5)
    finished: list[str] = []
    for i in range(150):
        driver.add(make_request(f"r{i}", tokens(3, i), max_tokens=8))
        driver.step()
        finished += [name for name in driver.outputs if name not in finished and driver.reason(name)]
    assert driver.scheduler.stats().num_preemptions > 20
    assert finished == [f"r{i}" for i in range(len(finished))]
    assert len(finished) > 150 // 10, "not slower than one after the other, 10 steps each"
    driver.drain()


# Pages.


@both_ways
def test_three_pages_and_fifty_requests(lag: int):
    driver = Driver(lag=lag, num_pages=4, max_model_len=13)
    for i in range(50):
        driver.add(make_request(f"r{i}", tokens(1 + i % 7, i % 5), max_tokens=1 + i % 6))
    driver.drain()
    assert driver.scheduler.stats().num_preemptions > 0


@both_ways
def test_preemption_takes_the_youngest_and_changes_no_word(lag: int):
    driver = Driver(lag=lag, num_pages=9, prefix_caching=False, next_token=lambda h: 1 + hashed(h) % 39)
    for i in range(3):
        driver.add(make_request(f"r{i}", tokens(6, i), max_tokens=16))
    driver.drain()
    restarted = [start for plan in driver.worker.plans for start in plan.starts if len(start.token_ids) > 6]
    assert restarted, "somebody was preempted with an answer begun"
    assert all(start.token_ids[0] != tokens(6, 0)[0] for start in restarted), "but not the oldest"
    assert {start.prompt_len for start in restarted} == {6}


def test_a_preempted_request_does_not_pass_its_elders_nor_is_passed():
    driver = Driver(num_pages=7, max_num_seqs=3, next_token=lambda history: 5)
    driver.add(make_request("a", tokens(8, 1), max_tokens=12))
    driver.add(make_request("b", tokens(8, 2), max_tokens=12))
    while not driver.scheduler.stats().num_preemptions:
        driver.step()
    driver.add(make_request("c", [1], max_tokens=1))  # would fit now, but came after b
    driver.step()
    assert not driver.outputs["c"]
    driver.drain()


def test_drafts_preempt_nobody():
    script = [5, 5, 0, *[5] * 20]
    driver = Driver(
        num_pages=6, choose_depth=lambda n: 6, next_token=lambda history: script[len(history) - 7]
    )
    driver.add(make_request("a", tokens(7, 1), max_tokens=14))
    driver.add(make_request("b", tokens(7, 2), max_tokens=14))
    driver.drain()
    assert driver.scheduler.stats().num_preemptions == 0
    assert [step.depth for step in driver.worker.plans[1].rows] == [4, 0], "the one free page, then none"


def test_a_preempted_request_waits_until_all_of_it_fits():
    driver = Driver(num_pages=8, max_num_batched_tokens=4, prefix_caching=False, next_token=lambda history: 5)
    driver.add(make_request("a", tokens(8, 1), max_tokens=16))
    driver.add(make_request("b", tokens(14, 2), max_tokens=4))
    driver.drain()
    assert driver.scheduler.stats().num_preemptions == 1


def test_pages_of_its_own_that_a_preempted_request_finds_are_no_cached_prompt():
    driver = Driver(num_pages=9, next_token=lambda history: 5)
    for i in range(3):
        driver.add(make_request(f"r{i}", [i + 1] * 9, max_tokens=12))
    driver.drain()
    starts = [start for plan in driver.worker.plans for start in plan.starts]
    assert any(start.computed_len for start in starts[3:]), "somebody came back and found some of its pages"
    assert driver.scheduler.stats().num_prompt_tokens_cached == 0
    assert {driver.outputs[f"r{i}"][-1].num_cached_tokens for i in range(3)} == {0}


def test_nobody_comes_in_while_an_elder_waits_for_pages():
    driver = Driver(lag=1, num_pages=11, next_token=lambda history: 5)
    driver.add(make_request("gone", tokens(12, 1), max_tokens=9))
    driver.add(make_request("elder", tokens(32, 2), max_tokens=2))
    driver.step()
    driver.step()
    driver.abort("gone")  # holds 4 pages until its step is committed; the elder lacks 3, and 1 is free
    driver.add(make_request("young", [1], max_tokens=1))
    assert driver.scheduler.schedule() is None
    driver.drain()


@both_ways
def test_abort_gives_pages_back_within_a_step(lag: int):
    driver = Driver(lag=lag)
    driver.add(make_request("a", tokens(12), max_tokens=100))
    driver.add(make_request("b", tokens(30, 1), max_tokens=3))
    driver.add(make_request("waits", tokens(3, 2), max_tokens=3))
    for _ in range(2):
        driver.step()
    for request_id in ("a", "b", "waits"):
        driver.abort(request_id)
    driver.step()
    assert driver.scheduler.stats().num_pages_used == 0
    assert not driver.scheduler.has_work
    assert driver.scheduler.abort("a") is None
    assert driver.scheduler.abort("never came") is None
    driver.drain()


def test_pages_of_a_step_in_flight_are_given_to_nobody():
    driver = Driver(lag=1, num_pages=4, max_model_len=13, next_token=lambda history: 5)
    driver.add(make_request("a", tokens(8, 1), max_tokens=5))
    driver.step()
    driver.step()
    driver.add(make_request("b", tokens(8, 2), max_tokens=5))
    driver.abort("a")
    plan = driver.scheduler.schedule()
    assert plan is None, "a's step may still write"
    driver.drain()


# The prefix cache.


def test_a_shared_prefix_is_computed_once():
    driver = Driver(num_pages=100, page_size=16, max_model_len=1000, max_num_batched_tokens=512)
    shared = tokens(500)
    driver.add(make_request("first", [*shared, *tokens(20, 1)], max_tokens=4))
    driver.drain()
    computed = driver.scheduler.stats().num_prompt_tokens_computed
    assert computed == 520
    num_plans = len(driver.worker.plans)
    driver.add(make_request("second", [*shared, *tokens(20, 2)], max_tokens=4))
    driver.drain()
    cached = 500 // 16 * 16
    assert driver.outputs["second"][-1].num_cached_tokens == cached
    assert driver.worker.plans[num_plans].num_tokens == 520 - cached
    stats = driver.scheduler.stats()
    assert stats.num_prompt_tokens_computed - computed == 520 - cached
    assert stats.num_prompt_tokens_cached == cached


def test_the_policy_is_told_of_prompt_tokens_without_cached_ones():
    """A prompt that is in the cache makes no step long."""
    driver = Driver(num_pages=100, page_size=16, max_model_len=1000, max_num_batched_tokens=512)
    told, policy = [], driver.scheduler._steering.policy
    decide = policy.decide

    def noted(load, rows):
        told.append(load.num_prompt_tokens)
        return decide(load, rows)

    policy.decide = noted
    shared = tokens(200)
    driver.add(make_request("first", shared, max_tokens=40))
    driver.step()
    driver.step()
    driver.add(make_request("second", [*shared, *tokens(20, 2)], max_tokens=4))
    driver.step()
    assert told == [0, 220 - 200 // 16 * 16]
    assert driver.worker.plans[-1].num_tokens == 1 + told[-1]
    driver.drain()


def test_the_last_prompt_token_is_always_computed():
    driver = Driver()
    for name in ("first", "again"):
        driver.add(make_request(name, tokens(8), max_tokens=2))
        driver.drain()
    assert driver.outputs["again"][-1].num_cached_tokens == 4


def test_an_answer_is_a_prefix_too():
    driver = Driver(next_token=lambda history: 1 + hashed(history) % 39)
    driver.add(make_request("turn", tokens(5), max_tokens=11))
    driver.drain()
    driver.add(make_request("next turn", [*tokens(5), *driver.tokens("turn"), 7], max_tokens=2))
    driver.drain()
    assert driver.outputs["next turn"][-1].num_cached_tokens == 12, "15 tokens of the first turn have K/V"


@both_ways
def test_only_committed_tokens_are_cached(lag: int):
    """Beyond a stop the device went on and wrote K/V; a prompt that guesses those tokens hits nothing."""
    script = [9, 10, 0, 20, 21, 22, 23, 24, 25, 26, 27, 28]
    prompt = [1, 2, 3]
    driver = Driver(lag=lag, choose_depth=lambda n: 8, next_token=lambda h: script[min(len(h) - 3, 11)])
    driver.add(make_request("a", prompt, max_tokens=12))
    driver.drain()
    assert driver.scheduler.stats().num_pages_cached == 1
    driver.add(make_request("b", [*prompt, *script[:9]], max_tokens=2))
    driver.drain()
    assert driver.outputs["b"][-1].num_cached_tokens == 4


def test_twins_that_come_together_cache_one_copy():
    driver = Driver()
    for name in ("one", "two"):
        driver.add(make_request(name, tokens(8), max_tokens=1))
    driver.drain()
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens_computed, stats.num_pages_cached) == (16, 2)


def test_prefix_caching_off_caches_nothing():
    driver = Driver(prefix_caching=False)
    for name in ("first", "again"):
        driver.add(make_request(name, tokens(12), max_tokens=5))
        driver.drain()
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens_computed, stats.num_pages_cached) == (24, 0)


def test_stats_count():
    driver = Driver(max_num_seqs=2, num_pages=20, next_token=lambda history: 5)
    for i in range(3):
        driver.add(make_request(f"r{i}", tokens(6, i), max_tokens=3))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages, stats.num_pages_used) == (2, 1, 19, 4)
    assert (stats.num_prompt_tokens_computed, stats.num_generated_tokens) == (12, 2)
    driver.drain()
    assert driver.scheduler.stats().num_generated_tokens == 9
