"""Streamed text adds up to the one-shot decoding, whatever the tokens and however they arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level_metadata, sentencepiece_metadata, write_tokenizer_gguf

from paceline.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizers_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("gguf")
    metadata = {"byte level": byte_level_metadata("gpt-2"), "sentencepiece": sentencepiece_metadata()}
    return {
        kind: load_tokenizer(write_tokenizer_gguf(folder / f"{kind}.gguf", m)) for kind, m in metadata.items()
    }


@st.composite
def blocks(draw: st.DrawFn) -> list[list[int]]:
    """Blocks of ids: low ids are single bytes or specials in both vocabularies, 700 is in neither."""
    ids = st.one_of(
        st.integers(0, 260), st.integers(0, 620), st.sampled_from([100, 150, 195, 240, 600, 601, 602, 700])
    )
    return draw(st.lists(st.lists(ids, max_size=4), max_size=12))


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=300, deadline=None)
@given(blocks=blocks())
def test_pushes_add_up(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, skip: bool, blocks: list[list[int]]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = [i for block in blocks for i in block]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    by_block = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join([*[by_block.push(block) for block in blocks], by_block.flush()]) == whole
    one_by_one = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join([*[one_by_one.push([i]) for i in ids], one_by_one.flush()]) == whole


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_text_streams_through_and_is_never_held_for_long(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
    if kind == "byte level":
        # At most three bytes of a character can be waiting for the fourth.
        for end in range(len(ids)):
            assert "".join(pieces[: end + 1]) == b"".join(map(tokenizer.token_bytes, ids[: end + 1])).decode(
                "utf-8", errors="ignore"
            )


def test_half_characters_wait(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["byte level"]
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(ids) == "😀"


def test_sentencepiece_byte_runs_stand_or_fall_together(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["sentencepiece"]
    run = [3 + byte for byte in "é".encode()]
    dog = tokenizer.encode("x dog", add_special_tokens=False)[-1]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(run) == ""
    assert detokenizer.push([dog]).startswith("é")
    assert detokenizer.push([*run, 3 + 0xFF]) + detokenizer.push([dog])[:3] == "\ufffd" * 3


def test_a_continued_text_keeps_its_first_space(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["sentencepiece"]
    ids = tokenizer.encode("The dog", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(ids) == "The dog"
    assert IncrementalDetokenizer(tokenizer, continues=True).push(ids) == " The dog"


def test_token_bytes(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    text = "The dog's 12\n\tüber 日😀 "
    for kind, tokenizer in tokenizers_by_kind.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = text if kind == "byte level" else " " + text
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()
        assert tokenizer.token_bytes(100_000) == b""
    begin = tokenizers_by_kind["byte level"].encode("<|begin|>")[-1]
    assert tokenizers_by_kind["byte level"].token_bytes(begin) == b"<|begin|>"
