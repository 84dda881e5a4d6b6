"""Matchers and the rules of rows with grammars, on the tokenizer alone."""

from __future__ import annotations

import json
import string
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from paceline.errors import RequestError
from paceline.grammar import MAX_NESTING, MAX_SOURCE, validate
from paceline.request import Grammar, SamplingParams
from paceline.step import GrammarEnd, RowStart
from paceline.tokenizer import Tokenizer
from paceline.worker.grammar import GrammarCompiler, GrammarRows
from paceline.worker.matcher import Matcher

VOCAB_SIZE = 272
WORD = Grammar("regex", "[ab]{2,4}c?")
TOO_LARGE = {
    "allOf": [{"anyOf": [{"type": "object", "required": [f"a{i}_{j}"]} for j in range(5)]} for i in range(8)]
}
OBJECT = Grammar("json", '{"type": "object"}')


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)


@pytest.fixture
def rows(compiler: GrammarCompiler, tokenizer: Tokenizer) -> GrammarRows:
    return GrammarRows(compiler, tokenizer.eos_token_ids)


def start(grammar: Grammar | None, generated: tuple[int, ...] = (), **params: Any) -> RowStart:
    wanted = SamplingParams(seed=0, grammar=grammar, **params)
    return RowStart(0, (1, 2, *generated), 2, 0, (), wanted, 0, 500)


def allowed_text(matcher: Matcher, tokenizer: Tokenizer) -> set[bytes]:
    return {tokenizer.token_bytes(int(i)) for i in np.flatnonzero(matcher.allowed())}


class TestMatcher:
    @given(st.text("abcd", max_size=6))
    def test_takes_exactly_the_beginnings_of_its_language(
        self, compiler: GrammarCompiler, tokenizer: Tokenizer, text: str
    ) -> None:
        matcher = compiler.matcher(WORD)
        language = {a + c for n in (2, 3, 4) for a in _words("ab", n) for c in ("", "c")}
        taken = max(k for k in range(len(text) + 1) if any(w.startswith(text[:k]) for w in language))
        assert matcher.advance(tokenizer.encode(text)) == taken
        assert matcher.may_end == (text[:taken] in language)
        following = {w[taken : taken + 1].encode() for w in language if w.startswith(text[:taken])} - {b""}
        assert allowed_text(matcher, tokenizer) - {b"<|im_end|>"} == following
        assert matcher.must_end == (not following)

    def test_a_refused_token_changes_nothing(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        matcher = compiler.matcher(WORD)
        assert matcher.advance(tokenizer.encode("abxx")) == 2
        assert allowed_text(matcher, tokenizer) == {b"a", b"b", b"c", b"<|im_end|>"}

    def test_after_the_end_nothing_is_taken_and_nobody_dies(
        self, compiler: GrammarCompiler, tokenizer: Tokenizer
    ) -> None:
        matcher = compiler.matcher(WORD)
        assert matcher.advance(tokenizer.encode("abc")) == 3
        assert matcher.must_end
        assert matcher.advance(tokenizer.encode("ab")) == 0
        assert matcher.must_end


class TestRows:
    def test_eos_is_allowed_where_the_grammar_may_end(self, rows: GrammarRows, tokenizer: Tokenizer) -> None:
        [eos] = tokenizer.eos_token_ids
        rows.start(start(WORD))
        for text, may_end in (("a", False), ("b", True), ("a", True)):
            assert rows.settle_block(0, tokenizer.encode(text)) is None
            assert rows.cursor(0).masks[0][eos] == may_end

    def test_the_end_is_told_with_its_last_token(self, rows: GrammarRows, tokenizer: Tokenizer) -> None:
        rows.start(start(WORD, tuple(tokenizer.encode("ab"))))  # as after a preemption
        assert rows.settle_block(0, tokenizer.encode("c")) == GrammarEnd(1)
        assert rows.cursor(0).end == GrammarEnd(0)

    def test_ignore_eos_goes_on_as_long_as_it_can(self, rows: GrammarRows, tokenizer: Tokenizer) -> None:
        rows.start(start(WORD, tuple(tokenizer.encode("ab")), ignore_eos=True))
        assert not rows.cursor(0).masks[0][list(tokenizer.eos_token_ids)].any()

    def test_an_empty_answer_with_eos_ignored_is_complete(self, rows: GrammarRows) -> None:
        rows.start(start(Grammar("lark", 'start: ""'), ignore_eos=True))
        assert rows.cursor(0).end == GrammarEnd(0)

    def test_stop_tokens_may_come_where_the_grammar_may_end(
        self, rows: GrammarRows, tokenizer: Tokenizer
    ) -> None:
        [stop] = tokenizer.encode("!")
        rows.start(start(WORD, stop_token_ids=(stop,)))
        assert not rows.cursor(0).masks[0][stop]
        rows.start(start(WORD, tuple(tokenizer.encode("ab")), stop_token_ids=(stop,)))
        assert rows.cursor(0).masks[0][stop]
        assert rows.settle_block(0, [stop]) is None

    def test_min_tokens_gives_way_only_to_a_grammar_that_leaves_nothing_else(
        self, rows: GrammarRows, tokenizer: Tokenizer
    ) -> None:
        [stop] = tokenizer.encode("c")
        grammar = Grammar("regex", "abcd")
        for generated, lifted in (("a", False), ("ab", True)):
            rows.start(
                start(grammar, tuple(tokenizer.encode(generated)), min_tokens=9, stop_token_ids=(stop,))
            )
            assert rows.cursor(0).lifts == lifted
        rows.start(start(grammar, tuple(tokenizer.encode("ab")), min_tokens=2, stop_token_ids=(stop,)))
        assert not rows.cursor(0).lifts

    def test_no_token_of_the_vocabulary_continues(self, tokenizer: Tokenizer) -> None:
        only_letters = _Spelling(tokenizer, set(string.ascii_letters.encode()))
        compiler = GrammarCompiler(lambda: only_letters, VOCAB_SIZE, tokenizer.eos_token_ids)  # type: ignore[arg-type]
        rows = GrammarRows(compiler, tokenizer.eos_token_ids)
        rows.start(start(Grammar("regex", "[0-9]")))
        end = rows.cursor(0).end
        assert end is not None
        assert end.num_tokens == 0
        assert str(end.error).startswith("no token of the model's vocabulary")

    def test_a_grammar_that_does_not_compile_fails_its_row(self, rows: GrammarRows) -> None:
        rows.start(start(Grammar("regex", "(")))
        assert 0 in rows
        end = rows.cursor(0).end
        assert end is not None
        assert "unclosed group" in str(end.error)
        rows.end(0)
        assert 0 not in rows

    def test_a_grammar_beyond_its_limits_on_the_way_fails_its_row(
        self, rows: GrammarRows, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tight = LLParserLimits(step_lexer_fuel=2000, verbose_errors=False)
        monkeypatch.setattr("paceline.worker.matcher.limits", lambda: tight)
        rows.start(start(Grammar("regex", "(.*a.{60}){4}")))
        [a] = tokenizer.encode("a")
        error = _run_until_it_ends(rows, a)
        assert "too many expressions" in error
        assert "\n" not in error


def test_a_compiled_grammar_is_kept(compiler: GrammarCompiler) -> None:
    first = compiler.prepare(Grammar("regex", "kept"))
    assert isinstance(first, Future)
    first.result(5)
    assert compiler.prepare(Grammar("regex", "kept")) is first


class TestValidation:
    @pytest.mark.parametrize(
        "grammar",
        [WORD, OBJECT, Grammar("lark", 'start: "a" | "b"'), Grammar("json", "{}")],
    )
    def test_takes(self, grammar: Grammar) -> None:
        validate(grammar)

    @pytest.mark.parametrize(
        ("grammar", "words"),
        [
            (Grammar("regex", "("), "regex"),
            (Grammar("regex", "(?!a)b"), "look-a"),
            (Grammar("json", '{"type": "bogus"}'), "bogus"),
            (Grammar("json", '{"not": {"type": "string"}}'), "not"),
            (Grammar("json", '{"$ref": "http://example.com/x"}'), "example.com"),
            (Grammar("json", "[1]"), "grammar"),
            (Grammar("lark", "start: b"), "b"),
            (Grammar("regex", "a" * (MAX_SOURCE + 1)), str(MAX_SOURCE)),
            (Grammar("lark", "start: " + "(" * (MAX_NESTING + 1)), str(MAX_NESTING)),
            (Grammar("json", json.dumps(TOO_LARGE)), "too large"),
            (Grammar("regex", "a{1,5}" * 9000 + "(?!a)"), "look-a"),
        ],
    )
    def test_refuses_in_one_line(self, grammar: Grammar, words: str) -> None:
        with pytest.raises(RequestError) as refused:
            validate(grammar)
        assert refused.value.param == "grammar"
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 600


def _run_until_it_ends(rows: GrammarRows, token_id: int) -> str:
    while (end := rows.cursor(0).end) is None:
        end = rows.settle_block(0, [token_id])
        assert end is None or end.error is not None
        # A row that failed in `settle_block` says the same again when it is asked.
    assert end.error is not None
    return end.error


class _Spelling:
    """A tokenizer whose other tokens spell nothing."""

    def __init__(self, tokenizer: Tokenizer, kept: set[int]) -> None:
        self._tokenizer, self._kept = tokenizer, kept
        self.special_token_ids = tokenizer.special_token_ids

    def token_bytes(self, token_id: int) -> bytes:
        raw = self._tokenizer.token_bytes(token_id)
        return raw if len(raw) == 1 and raw[0] in self._kept else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _words(alphabet: str, length: int) -> set[str]:
    if length == 0:
        return {""}
    return {word + char for word in _words(alphabet, length - 1) for char in alphabet}
