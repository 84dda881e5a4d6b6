"""Grammars along drafts: places, masks and ends of a block are those of its tokens one by one."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from paceline.draft.protocol import NO_DRAFT, Round
from paceline.request import Grammar, SamplingParams
from paceline.step import GrammarEnd, RowStart
from paceline.tokenizer import Tokenizer
from paceline.worker.drafting import CoupledChoice
from paceline.worker.grammar import GrammarCompiler, GrammarRows, Mask, masked
from paceline.worker.sampling import SamplerState, sample

VOCAB_SIZE = 272
WORD = Grammar("regex", "[ab]{2,4}c?")
OBJECT = Grammar("json", '{"type": "object"}')
TEXT = '{"a":[1,{"b":"c"}],"d":true}'


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)


@dataclass
class Rows:
    """A row that drafts and one that decodes plainly, with the same request."""

    drafting: GrammarRows
    plain: GrammarRows
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def start(self, grammar: Grammar, generated: str = "", **params: Any) -> None:
        wanted = SamplingParams(seed=0, grammar=grammar, **params)
        known = (1, 2, *self.ids(generated))
        for rows in (self.drafting, self.plain):
            rows.start(RowStart(0, known, 2, 0, (), wanted, 0, 500))

    def plainly(self, token_ids: Sequence[int]) -> GrammarEnd | None:
        """Settle tokens in steps of their own; where it ends, as one block would tell."""
        for num_tokens, token in enumerate(token_ids, start=1):
            end = self.plain.settle_block(0, [token])
            if end is not None:
                return GrammarEnd(num_tokens, end.error)
        return None

    def agree(self) -> None:
        """The two rows stand at the same place."""
        mine, other = self.drafting.cursor(0), self.plain.cursor(0)
        assert (mine.end, mine.lifts) == (other.end, other.lifts)
        assert len(mine.masks) == len(other.masks)
        assert all(np.array_equal(a, b) for a, b in zip(mine.masks, other.masks, strict=True))


@pytest.fixture
def rows(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Rows:
    eos = tokenizer.eos_token_ids
    return Rows(GrammarRows(compiler, eos), GrammarRows(compiler, eos), tokenizer)


def test_follow_takes_what_the_grammar_allows(rows: Rows) -> None:
    rows.start(WORD)
    cursor = rows.drafting.cursor(0)
    assert cursor.follow(rows.ids("abxb")) == 2
    assert len(cursor.masks) == 3
    rows.agree()


@pytest.mark.parametrize("last", ["abc", "babac"])
def test_a_draft_that_completes_the_answer_has_no_place_behind_it(rows: Rows, last: str) -> None:
    rows.start(WORD)
    cursor = rows.drafting.cursor(0)
    assert cursor.follow(rows.ids(last)) == len(last) - 1
    # The target chooses the last one by itself, and the block ends there.
    block = rows.ids(last)
    assert rows.drafting.settle_block(0, block) == rows.plainly(block) == GrammarEnd(len(last))
    rows.agree()


@pytest.mark.parametrize("stop", ["eos", "!"])
def test_nothing_is_drafted_behind_a_stop_token(rows: Rows, stop: str) -> None:
    [token] = rows.tokenizer.eos_token_ids if stop == "eos" else rows.ids(stop)
    rows.start(WORD, stop_token_ids=tuple(rows.ids("!")))
    cursor = rows.drafting.cursor(0)
    assert cursor.follow([*rows.ids("ab"), token, *rows.ids("ab")]) == 2
    assert cursor.masks[2][token]
    assert rows.drafting.settle_block(0, [*rows.ids("ab"), token]) is None
    assert rows.plainly([*rows.ids("ab"), token]) is None
    rows.agree()


def test_a_stop_token_that_the_grammar_spells_ends_the_drafts_too(rows: Rows) -> None:
    rows.start(Grammar("regex", "abcd"), stop_token_ids=tuple(rows.ids("c")))
    assert rows.drafting.cursor(0).follow(rows.ids("abcd")) == 2


def test_what_follows_a_stop_token_in_a_block_is_not_looked_at(rows: Rows) -> None:
    [eos] = rows.tokenizer.eos_token_ids
    rows.start(WORD)
    assert rows.drafting.settle_block(0, [*rows.ids("ab"), eos, *rows.ids("{}")]) is None
    assert rows.plainly([*rows.ids("ab"), eos]) is None
    rows.agree()


def test_what_follows_the_end_in_a_block_is_not_looked_at(rows: Rows) -> None:
    rows.start(WORD)
    assert rows.drafting.settle_block(0, rows.ids("abcab")) == GrammarEnd(3)
    assert rows.drafting.cursor(0).end == GrammarEnd(0)


def test_min_tokens_gives_way_at_the_first_place_only(rows: Rows) -> None:
    """A lift would outlive a rejected draft: the step that finds it necessary is one that knows."""
    stop = tuple(rows.ids("c"))
    rows.start(Grammar("regex", "abcd"), min_tokens=9, stop_token_ids=stop)
    cursor = rows.drafting.cursor(0)
    assert not cursor.lifts
    assert cursor.follow(rows.ids("ab")) == 1  # behind "ab" only the stop token may come
    assert rows.drafting.settle_block(0, rows.ids("ab")) is None
    assert rows.drafting.cursor(0).lifts
    # The two tokens drafted so far count towards min_tokens.
    rows.start(Grammar("regex", "abcd"), min_tokens=2, stop_token_ids=stop)
    assert rows.drafting.cursor(0).follow(rows.ids("ab")) == 2


def test_no_drafts_for_rows_that_have_ended_or_failed(rows: Rows) -> None:
    rows.start(WORD, "abc")
    for cursor in (rows.drafting.cursor(0), _failed(rows)):
        assert cursor.end is not None
        assert cursor.masks == []
        assert cursor.follow(rows.ids("a")) == 0


def _failed(rows: Rows) -> Any:
    rows.start(Grammar("regex", "("))
    return rows.drafting.cursor(0)


def test_other_drafts_than_before_begin_where_they_differ(rows: Rows) -> None:
    """Drafts were chosen one by one, and then a drafter proposes others after all."""
    rows.start(WORD)
    cursor = rows.drafting.cursor(0)
    for token in rows.ids("aba"):
        assert cursor.take(token)
    assert cursor.follow(rows.ids("abbc")) == 3
    other = rows.plain.cursor(0)
    assert other.follow(rows.ids("abb")) == 3
    assert all(np.array_equal(a, b) for a, b in zip(cursor.masks, other.masks, strict=True))
    assert cursor.follow([*rows.ids("a"), NO_DRAFT, *rows.ids("b")]) == 1
    assert len(cursor.masks) == 2


def test_a_grammar_that_fails_behind_a_draft_fails_only_if_the_draft_was_right(
    tokenizer: Tokenizer, rows: Rows
) -> None:
    """After "1" nothing of the vocabulary continues; whoever chose "a" never hears of it."""
    letters = _Spelling(tokenizer, set((string.ascii_letters + "1").encode()))
    compiler = GrammarCompiler(lambda: letters, VOCAB_SIZE, tokenizer.eos_token_ids)  # type: ignore[arg-type]
    rows.drafting = GrammarRows(compiler, tokenizer.eos_token_ids)
    rows.plain = GrammarRows(compiler, tokenizer.eos_token_ids)
    for chosen in ("a", "1"):
        rows.start(Grammar("regex", "a+|a1[2-9]x"), "a")
        cursor = rows.drafting.cursor(0)
        assert cursor.follow(rows.ids("1")) == 0
        assert cursor.follow(rows.ids("aa")) == 2
        block = rows.ids(chosen)
        assert rows.drafting.settle_block(0, block) == rows.plainly(block)
        rows.agree()
        end = rows.drafting.cursor(0).end
        assert (end is not None and end.error is not None) == (chosen == "1")


class TestLimits:
    """A grammar that runs into its limits on the way, and matchers that share what hits them."""

    GRAMMAR = Grammar("regex", "(.*a.{60}){4}")

    @pytest.fixture
    def fresh(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], GrammarRows]:
        """Rows of a compiler that has seen nothing yet."""
        tight = LLParserLimits(step_lexer_fuel=2000, verbose_errors=False)
        monkeypatch.setattr("paceline.worker.matcher.limits", lambda: tight)
        eos = tokenizer.eos_token_ids
        return lambda: GrammarRows(GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, eos), eos)

    def run(self, rows: GrammarRows, row: int, token_id: int, depth: int = 0) -> tuple[int, str | None]:
        """How many tokens a row gets to, drafting them all, and why no further."""
        num_tokens = 0
        while (cursor := rows.cursor(row)).end is None:
            block = [token_id] * (1 + cursor.follow([token_id] * depth))
            end = rows.settle_block(row, block)
            num_tokens += len(block) if end is None else end.num_tokens
            if end is not None:
                return num_tokens, end.error
        return num_tokens, cursor.end.error

    def start(self, rows: GrammarRows, row: int) -> None:
        rows.start(RowStart(row, (1, 2), 2, 0, (), SamplingParams(grammar=self.GRAMMAR), 0, 500))

    @pytest.mark.parametrize("depth", [1, 3, 6])
    def test_drafting_gets_as_far_as_plain_decoding(
        self, rows: Rows, fresh: Callable[[], GrammarRows], depth: int
    ) -> None:
        [a] = rows.ids("a")
        found = []
        for d in (0, depth):
            made = fresh()
            self.start(made, 0)
            found.append(self.run(made, 0, a, d))
        assert found[0] == found[1]
        assert found[0][0] > 10
        assert "too many expressions" in str(found[0][1])

    def test_a_row_that_fails_takes_no_other_with_it(
        self, rows: Rows, fresh: Callable[[], GrammarRows]
    ) -> None:
        """One is on its way, on a path that needs little, and one comes later."""
        [a], [b] = rows.ids("a"), rows.ids("b")
        made = fresh()
        self.start(made, 0)
        self.start(made, 1)
        assert made.settle_block(1, [b, b]) is None
        reached = self.run(made, 0, a)
        assert made.cursor(1).end is None
        assert made.settle_block(1, [b] * 20) is None
        assert made.cursor(1).end is None
        self.start(made, 2)
        assert self.run(made, 2, a) == reached

    def test_a_wrong_draft_that_hits_a_limit_leaves_no_trace(
        self, rows: Rows, fresh: Callable[[], GrammarRows]
    ) -> None:
        [a], [b] = rows.ids("a"), rows.ids("b")
        made = fresh()
        self.start(made, 0)
        assert made.cursor(0).follow([a] * 200) < 200
        for _ in range(30):
            assert made.cursor(0).end is None
            assert made.settle_block(0, [b]) is None


@st.composite
def guesses(draw: st.DrawFn) -> tuple[int, list[str], float]:
    """How many drafts are right, what is drafted behind them, and where in the mask the choice is."""
    wrong = st.sampled_from(["}", '"', "x", "1", ",", "]", "eos", "!", "none"])
    return draw(st.integers(0, 4)), draw(st.lists(wrong, max_size=3)), draw(st.floats(0.0, 0.999))


@settings(deadline=None)
@given(
    plan=st.lists(guesses(), min_size=1, max_size=6),
    grammar=st.sampled_from([OBJECT, Grammar("json", "{}"), Grammar("regex", r"\{.*\}[!x]?")]),
    params=st.sampled_from(
        [{}, {"ignore_eos": True}, {"min_tokens": 9}, {"stop_token_ids": (ord("}"), ord("!"))}]
    ),
)
def test_blocks_leave_what_plain_decoding_leaves(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    plan: list[tuple[int, list[str], float]],
    grammar: Grammar,
    params: dict[str, Any],
) -> None:
    """Every place has plain decoding's mask, every block its end, every row its state afterwards."""
    eos = tokenizer.eos_token_ids
    rows = Rows(GrammarRows(compiler, eos), GrammarRows(compiler, eos), tokenizer)
    stop = tuple(t for byte in params.get("stop_token_ids", ()) for t in tokenizer.encode(chr(byte)))
    rows.start(grammar, **({**params, "stop_token_ids": stop} if stop else params))
    special = {"eos": eos[0], "none": NO_DRAFT}
    text, at = tokenizer.encode(TEXT), 0
    for num_right, wrong, choice in plan:
        cursor = rows.drafting.cursor(0)
        if cursor.end is not None:
            break
        drafts = [*text[at : at + num_right], *(special.get(w) or tokenizer.encode(w)[0] for w in wrong)]
        num_taken = cursor.follow(drafts)
        assert len(cursor.masks) == num_taken + 1
        # The target takes the right ones, and then something that it may.
        accepted = min(num_taken, num_right)
        possible = np.flatnonzero(cursor.masks[accepted])
        block = [*drafts[:accepted], int(possible[int(choice * len(possible))])]
        at += num_right
        for j, token in enumerate(block):
            there = rows.plain.cursor(0)
            assert there.end is None
            assert np.array_equal(there.masks[0], cursor.masks[j])
            assert not (there.lifts and j)
            end = rows.plain.settle_block(0, [token])
            assert end is None or j == len(block) - 1
        mine = rows.drafting.settle_block(0, block)
        assert mine == (None if end is None else GrammarEnd(len(block), end.error))
        rows.agree()
        if block[-1] in (*eos, *stop):
            break


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("known", [None, "abc{}1"])
def test_drafts_are_chosen_within_the_grammar(rows: Rows, temperature: float, known: str | None) -> None:
    """With the target's logits and a vocabulary that has the word, the drafts are what the target chooses."""
    vocabulary = None if known is None else torch.tensor(sorted(rows.ids(known)))
    columns = torch.arange(VOCAB_SIZE) if vocabulary is None else vocabulary
    for seed in range(20):
        rows.start(WORD, logit_bias={rows.ids("a")[0]: 0.5})
        params = SamplingParams(seed=seed, temperature=temperature, presence_penalty=0.4)
        state = SamplerState(1, VOCAB_SIZE, rows.tokenizer.eos_token_ids)
        state.start(0, params, 0, [1, 2], 2)
        logits = torch.full((5, VOCAB_SIZE), -torch.inf)
        logits[:, columns] = torch.randn(5, len(columns), generator=torch.Generator().manual_seed(seed)) * 3
        cursor = rows.drafting.cursor(0)
        drafting = Round(torch.tensor([0]), torch.tensor([2]), torch.tensor([1]), (5,), 1)
        choose = CoupledChoice(state, drafting, {0: cursor})
        drafts = [int(choose(step, logits[step : step + 1, columns], vocabulary)) for step in range(5)]
        words = _plainly(rows, state, logits)
        num_drafts = drafts.index(NO_DRAFT) if NO_DRAFT in drafts else 5
        assert set(drafts[num_drafts:]) <= {NO_DRAFT}
        assert drafts[:num_drafts] == words[:num_drafts]
        # The last word of a complete answer has no place behind it, and so is no draft.
        assert num_drafts == len(words) - 1
        assert cursor.follow(drafts) == num_drafts


def _plainly(rows: Rows, state: SamplerState, logits: torch.Tensor) -> list[int]:
    """The answer, one token at a time, up to where it ends."""
    words: list[int] = []
    for position in range(5):
        cursor = rows.plain.cursor(0)
        if cursor.end is not None:
            break
        mask: Mask = cursor.masks[0]
        allowed = masked(logits[position : position + 1], {0: mask})
        row = torch.tensor([0])
        token = sample(allowed, row, torch.tensor([position + 2]), state)
        state.accept(row, token)
        words.append(int(token))
        rows.plain.settle_block(0, words[-1:])
        if words[-1] in rows.tokenizer.eos_token_ids:
            break
    return words


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
