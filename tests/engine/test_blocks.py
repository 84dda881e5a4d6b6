"""A step may bring several tokens for a row: nothing after a stop or a limit gets out.

The first two faults of `examples/traps`, and their kind, at every depth and with a step in flight.
"""

from dataclasses import replace

import pytest
from engine_driver import Driver, make_request
from fake_worker import EOS
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.block import Cut, check_result, cut
from paceline.engine.pages import InvariantError
from paceline.step import Plan, RowResult, RowStep, StepResult

PROMPT = [1, 2, 3]

at_every_depth = pytest.mark.parametrize("depth", range(7))
both_ways = pytest.mark.parametrize("lag", [0, 1], ids=["serial", "overlap"])


def run(script: list[int], depth: int, lag: int, max_tokens: int, **params: object) -> Driver:
    """One request whose answer is `script`, in blocks of up to 1 + depth tokens after the first."""
    driver = Driver(
        lag=lag,
        choose_depth=lambda num_decoding: depth,
        next_token=lambda history: script[len(history) - len(PROMPT)],
    )
    driver.add(make_request("a", PROMPT, max_tokens, logprobs=0, **params))
    while driver.scheduler.has_work:
        driver.step()
    return driver


@at_every_depth
@both_ways
@pytest.mark.parametrize(
    "params", [{}, {"ignore_eos": True, "stop_token_ids": (EOS,)}], ids=["eos", "stop id"]
)
def test_stop_in_the_middle_of_a_block(depth: int, lag: int, params: dict[str, object]):
    driver = run([9, 10, 11, EOS, 20, 21, 22, 23, 24, 25], depth, lag, max_tokens=6, **params)
    assert driver.tokens("a") == [9, 10, 11, EOS]
    assert driver.reason("a") == "stop"
    assert driver.outputs["a"][-1].stop_token_id == EOS
    assert sum(len(output.logprobs) for output in driver.outputs["a"]) == 4
    assert driver.scheduler.stats().num_generated_tokens == 4


@at_every_depth
@both_ways
@pytest.mark.parametrize("max_tokens", [1, 2, 8])
def test_exactly_max_tokens(depth: int, lag: int, max_tokens: int):
    driver = run(list(range(5, 25)), depth, lag, max_tokens)
    assert driver.tokens("a") == list(range(5, 5 + max_tokens))
    assert driver.reason("a") == "length"
    assert driver.outputs["a"][-1].stop_token_id is None
    assert sum(len(output.logprobs) for output in driver.outputs["a"]) == max_tokens
    assert driver.scheduler.stats().num_generated_tokens == max_tokens


@at_every_depth
@both_ways
@pytest.mark.parametrize(("max_tokens", "reason"), [(4, "length"), (5, "stop")])
def test_stop_at_the_limit_and_just_beyond(depth: int, lag: int, max_tokens: int, reason: str):
    driver = run([9, 10, 11, 12, EOS, 13, 14, 15, 16, 17, 18], depth, lag, max_tokens)
    assert driver.tokens("a") == [9, 10, 11, 12, EOS][:max_tokens]
    assert driver.reason("a") == reason


@at_every_depth
@both_ways
def test_context_limit_ends_by_length(depth: int, lag: int):
    driver = Driver(lag=lag, choose_depth=lambda n: depth, max_model_len=10, next_token=lambda history: 5)
    driver.add(make_request("a", PROMPT, max_tokens=100))
    driver.drain()
    assert driver.tokens("a") == [5] * 7
    assert driver.reason("a") == "length"


def test_ignore_eos_goes_on():
    driver = run([9, EOS, 11, 12], depth=0, lag=0, max_tokens=3, ignore_eos=True)
    assert driver.tokens("a") == [9, EOS, 11]


def test_blocks_of_a_pinned_depth_come_whole():
    driver = run(list(range(5, 25)), depth=4, lag=0, max_tokens=12)
    assert [len(output.token_ids) for output in driver.outputs["a"]] == [1, 5, 5, 1]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8), st.sets(st.integers(0, 9)))
def test_a_cut_is_the_first_end_token_by_token(block: list[int], room: int, stop_ids: set[int]):
    expected = Cut(len(block))
    for count in range(1, len(block) + 1):
        if block[count - 1] in stop_ids:
            expected = Cut(count, "stop", block[count - 1])
            break
        if count == room:
            expected = Cut(count, "length")
            break
    assert cut(tuple(block), 100, 100 + room, stop_ids) == expected


PLAN = Plan(3, (), (), (RowStep(0, 5, False), RowStep(2, 1, True, depth=1)))
GOOD = (RowResult(0, 0, ()), RowResult(2, 1, (4, 5), num_drafted=1, num_verified=1))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(2, GOOD), "step 3 was answered with step 2"),
        (StepResult(3, GOOD[:1]), "2 rows ran, 1 came back"),
        (StepResult(3, GOOD[::-1]), "row 0 was answered with row 2"),
        (StepResult(3, (RowResult(0, 0, (1,)), GOOD[1])), "row 0 yielded 1 tokens of at most 0"),
        (StepResult(3, (GOOD[0], RowResult(2, 1, (1, 2, 3)))), "row 2 yielded 3 tokens of at most 2"),
        (StepResult(3, (GOOD[0], replace(GOOD[1], logprobs=()))), "row 2 has 0 logprobs for 2 tokens"),
        (StepResult(3, (GOOD[0], replace(GOOD[1], num_verified=0))), "1 drafts accepted, 0 verified, 1 made"),
        (StepResult(3, (GOOD[0], replace(GOOD[1], num_drafted=0))), "1 drafts accepted, 1 verified, 0 made"),
        (StepResult(3, (GOOD[0], replace(GOOD[1], num_drafted=2))), "1 verified, 2 made"),
        (StepResult(3, (GOOD[0], replace(GOOD[1], depth=0))), "planned with depth 1: .* at depth 0"),
    ],
)
def test_an_impossible_answer_is_refused(result: StepResult, message: str):
    check_result(PLAN, StepResult(3, GOOD))
    with pytest.raises(InvariantError, match=message):
        check_result(PLAN, result)
