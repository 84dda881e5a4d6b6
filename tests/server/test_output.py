"""Stop strings, the one cut, and independence from how the tokens were cut into blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.output import Delta, OutputProcessor, StopStrings, merge
from paceline.request import EngineRequest, RequestOutput, SamplingParams, TokenLogprobs
from paceline.tokenizer import Tokenizer

# Bytes of "é", of a three-byte character and of ASCII that repeats: borders inside stop strings and
# characters split over tokens are common, not rare.
ALPHABET = "aabbé日"


def request(**params: Any) -> EngineRequest:
    return EngineRequest("r", [1], SamplingParams(seed=0, **{"max_tokens": 1000, **params}))


def run(
    tokenizer: Tokenizer, wanted: EngineRequest, outputs: list[RequestOutput]
) -> tuple[list[Delta], list[str]]:
    processor = OutputProcessor(tokenizer)
    processor.add(wanted)
    deltas: list[Delta] = []
    aborts: list[str] = []
    for output in outputs:
        new, to_abort = processor.process([output])
        deltas += new
        aborts += to_abort
    return deltas, aborts


def blocks(
    token_ids: list[int], cuts: list[int], *, finish: str | None = "length", logprobs: bool = False
) -> list[RequestOutput]:
    """The engine's outputs for `token_ids`, cut into blocks at `cuts`."""
    edges = [0, *sorted(c for c in set(cuts) if 0 < c < len(token_ids)), len(token_ids)]
    return [
        RequestOutput(
            "r",
            token_ids[a:b],
            [TokenLogprobs(-float(i), [], []) for i in range(a, b)] if logprobs else None,
            finish_reason=finish if b == len(token_ids) else None,  # type: ignore[arg-type]
        )
        for a, b in itertools.pairwise(edges)
    ]


@dataclass(frozen=True)
class Expected:
    text: str
    num_tokens: int
    finish_reason: str


def reference(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str], min_tokens: int, include: bool
) -> Expected:
    """Token by token over one-shot decoding: the first token after which a stop string is complete."""
    for n in range(min_tokens + 1, len(token_ids) + 1):
        whole = tokenizer.decode(token_ids[:n]) if n == len(token_ids) else stable(tokenizer, token_ids[:n])
        before = stable(tokenizer, token_ids[: n - 1])
        ends = [
            (end, -len(stop))
            for stop in stops
            for end in range(len(before) + 1, len(whole) + 1)
            if whole[:end].endswith(stop)
        ]
        if ends:
            end, negative_len = min(ends)
            return Expected(whole[: end if include else end + negative_len], n, "stop")
    return Expected(tokenizer.decode(token_ids), len(token_ids), "length")


def stable(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """The decoded text without a last character whose bytes are not complete."""
    return tokenizer.decode(token_ids).rstrip("�")


@given(
    text=st.text(ALPHABET, min_size=1, max_size=30),
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(1, 60), max_size=12),
    min_tokens=st.integers(0, 8),
    drop=st.integers(0, 2),
    include=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
)
def test_blocks_never_change_the_answer(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    cuts: list[int],
    min_tokens: int,
    drop: int,
    include: bool,
    logprobs: int | None,
) -> None:
    token_ids = tokenizer.encode(text)
    token_ids = token_ids[: max(1, len(token_ids) - drop)]  # may end in half a character
    wanted = request(
        stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include, logprobs=logprobs
    )
    deltas, aborts = run(tokenizer, wanted, blocks(token_ids, cuts, logprobs=logprobs is not None))
    answer = merge(deltas)

    expected = reference(tokenizer, token_ids, stops, min_tokens, include)
    assert answer.text == expected.text
    assert list(answer.token_ids) == token_ids[: expected.num_tokens]
    assert answer.finish_reason == expected.finish_reason
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    if logprobs is not None:
        assert answer.logprobs is not None
        assert [-p.logprob for p in answer.logprobs] == list(range(expected.num_tokens))
        assert answer.text_offsets is not None
        assert len(answer.text_offsets) == expected.num_tokens
    # The engine is told to stop exactly when it had not stopped by itself.
    last_block_seen = len(deltas) == len(blocks(token_ids, cuts))
    assert aborts == ([] if last_block_seen else ["r"])


@given(
    text=st.text("ab", min_size=1, max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
)
def test_nothing_is_shown_that_a_stop_string_later_takes_back(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    token_ids = tokenizer.encode(text)
    deltas, _ = run(tokenizer, request(stop=tuple(stops)), blocks(token_ids, list(range(len(token_ids)))))
    final = merge(deltas).text
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert final.startswith(shown)


@given(text=st.text("ab", max_size=40), stop=st.text("ab", min_size=1, max_size=8))
def test_held_back_is_the_longest_ending_that_begins_a_stop_string(text: str, stop: str) -> None:
    stops = StopStrings([stop])
    assert stops.feed(text, armed=False) is None
    assert stops.held == max(k for k in range(len(stop)) if text.endswith(stop[:k]))


@pytest.mark.parametrize("offset", range(12))
@pytest.mark.parametrize("block", [1, 2, 3, 5, 64])
def test_a_stop_string_at_every_offset(tokenizer: Tokenizer, offset: int, block: int) -> None:
    token_ids = tokenizer.encode("x" * offset + "STOP" + "y" * 9)
    outputs = blocks(token_ids, list(range(block, len(token_ids), block)), logprobs=True)
    deltas, _ = run(tokenizer, request(stop=("STOP",), logprobs=0), outputs)
    answer = merge(deltas)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("x" * offset, "stop", "STOP")
    assert len(answer.token_ids) == len(answer.logprobs or ()) == len(answer.text_offsets or ()) == offset + 4


def test_of_stop_strings_that_end_together_the_longest_wins(tokenizer: Tokenizer) -> None:
    deltas, _ = run(tokenizer, request(stop=("d", "cd", "bcd")), blocks(tokenizer.encode("abcd"), []))
    assert merge(deltas).text == "a"


def test_the_stop_string_that_ends_first_wins(tokenizer: Tokenizer) -> None:
    deltas, _ = run(tokenizer, request(stop=("abcdef", "cd")), blocks(tokenizer.encode("abcdef"), []))
    assert (merge(deltas).text, merge(deltas).stop_reason) == ("ab", "cd")


def test_a_stop_string_that_max_tokens_cuts_short_ends_by_length(tokenizer: Tokenizer) -> None:
    deltas, aborts = run(tokenizer, request(stop=("STOP",)), blocks(tokenizer.encode("abSTO"), [3]))
    assert (merge(deltas).text, merge(deltas).finish_reason, aborts) == ("abSTO", "length", [])


def test_a_stop_string_completed_by_the_last_token_ends_by_stop(tokenizer: Tokenizer) -> None:
    deltas, aborts = run(tokenizer, request(stop=("STOP",)), blocks(tokenizer.encode("abSTOP"), [3]))
    assert (merge(deltas).text, merge(deltas).finish_reason, aborts) == ("ab", "stop", [])


def test_a_stop_string_before_a_stop_token_of_the_same_block_wins(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("abSTOPx<|im_end|>")
    output = RequestOutput("r", token_ids, finish_reason="stop", stop_token_id=token_ids[-1])
    deltas, _ = run(tokenizer, request(stop=("STOP",)), [output])
    assert (deltas[0].text, deltas[0].stop_reason, len(deltas[0].token_ids)) == ("ab", "STOP", 6)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_of_the_requests_own_has_no_text_unless_asked_for(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    token_ids = tokenizer.encode("abc")
    wanted = request(stop_token_ids=(token_ids[-1],), include_stop_str_in_output=include)
    output = RequestOutput("r", token_ids, finish_reason="stop", stop_token_id=token_ids[-1])
    deltas, _ = run(tokenizer, wanted, [output])
    assert (deltas[0].text, deltas[0].stop_reason) == (text, token_ids[-1])
    assert list(deltas[0].token_ids) == token_ids


def test_outputs_after_the_end_are_ignored(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add(request(stop=("b",)))
    assert processor.process([RequestOutput("r", tokenizer.encode("ab"))])[1] == ["r"]
    assert processor.process([RequestOutput("r", tokenizer.encode("cd"))]) == ([], [])


def test_an_error_keeps_its_words(tokenizer: Tokenizer) -> None:
    deltas, aborts = run(tokenizer, request(), [RequestOutput("r", finish_reason="error", error="boom")])
    assert (deltas[0].finish_reason, deltas[0].error, aborts) == ("error", "boom", [])
