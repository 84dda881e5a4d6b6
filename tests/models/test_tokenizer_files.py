"""Token ids equal transformers' own, from GGUF and from tokenizer.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    SAMPLES,
    TEXT,
    byte_level_metadata,
    sentencepiece_metadata,
    write_tokenizer_folder,
    write_tokenizer_gguf,
)
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.errors import CheckpointError, ModelNotFoundError, RequestError, UnsupportedModelError
from paceline.tokenizer import Tokenizer, hf_eos_token_ids, load_tokenizer

# Text in which the rules of pre-tokenizers meet: letters, digits, spaces, marks, scripts.
TRICKY = st.text(st.sampled_from(" \n\t\r'sSlL0129²½.,!?-_aé\u0301ñßЖж日本 \u3000😀\u200d<|>"), max_size=30)
TEXTS = st.one_of(TRICKY, st.text(st.characters(exclude_categories=["Cs"]), max_size=20))


def theirs_from_gguf(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


# --- GGUF, byte level ------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe", "tekken", "gpt-2", "deepseek-r1-qwen"])
def test_byte_level_gguf_equals_transformers(tmp_path: Path, pre: str) -> None:
    path = write_tokenizer_gguf(
        tmp_path / "m.gguf", byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": True})
    )
    ours, theirs = load_tokenizer(path), theirs_from_gguf(path)
    for text in [*SAMPLES, TEXT]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_the_pre_tokenizers_differ(tmp_path: Path) -> None:
    """The samples tell the patterns apart, or the test above would prove nothing."""
    names = ["llama-bpe", "tekken", "gpt-2", "smollm", "qwen2", "default"]
    metadata = {name: byte_level_metadata(name, **{"tokenizer.ggml.add_bos_token": False}) for name in names}
    loaded = {
        name: load_tokenizer(write_tokenizer_gguf(tmp_path / f"{name}.gguf", metadata[name]))
        for name in names
    }
    ids = {name: [tuple(t.encode(text)) for text in [*SAMPLES, TEXT]] for name, t in loaded.items()}
    assert len({tuple(value) for value in ids.values()}) == len(names)


def test_qwen2_normalises_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    path = write_tokenizer_gguf(tmp_path / "m.gguf", byte_level_metadata("qwen2"))
    ours, theirs = load_tokenizer(path), theirs_from_gguf(path)
    theirs.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    for text in [*SAMPLES, TEXT]:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.encode("e\u0301") == ours.encode("é")


def test_bos_by_default_and_by_the_file(tmp_path: Path) -> None:
    """llama.cpp puts BOS before Llama 3's texts and SentencePiece's unless the file says no."""
    for name, metadata in {
        "llama-bpe": byte_level_metadata("llama-bpe"),
        "sp": sentencepiece_metadata(),
    }.items():
        path = write_tokenizer_gguf(tmp_path / f"{name}.gguf", metadata)
        bos = metadata["tokenizer.ggml.bos_token_id"]
        assert load_tokenizer(path).encode("a")[0] == bos
        assert bos not in load_tokenizer(path).encode("a", add_special_tokens=False)
        write_tokenizer_gguf(path, metadata | {"tokenizer.ggml.add_bos_token": False})
        assert bos not in load_tokenizer(path).encode("a")
    path = write_tokenizer_gguf(tmp_path / "gpt-2.gguf", byte_level_metadata("gpt-2"))
    assert load_tokenizer(path).encode("a") == load_tokenizer(path).encode("a", add_special_tokens=False)


def test_whole_words_come_before_merges(tmp_path: Path) -> None:
    """Llama 3's vocabulary has words that its merges alone do not reach."""
    metadata = byte_level_metadata("llama-bpe", **{"tokenizer.ggml.add_bos_token": False})
    metadata["tokenizer.ggml.tokens"].insert(0, "zqzq")
    metadata["tokenizer.ggml.token_type"].insert(0, 1)
    path = write_tokenizer_gguf(tmp_path / "m.gguf", metadata)
    assert load_tokenizer(path).encode("zqzq") == [0]


# --- GGUF, SentencePiece ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = write_tokenizer_gguf(tmp_path_factory.mktemp("sp") / "m.gguf", sentencepiece_metadata())
    return load_tokenizer(path), theirs_from_gguf(path)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_sentencepiece_gguf_equals_transformers(sentencepiece: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = sentencepiece
    assert ours.encode(text) == theirs.encode(text)


def test_sentencepiece_samples(sentencepiece: tuple[Tokenizer, Any]) -> None:
    ours, theirs = sentencepiece
    for text in [*SAMPLES, TEXT]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert len(ours.encode(TEXT)) < len(TEXT) / 2  # the merges are at work


def test_sentencepiece_without_the_first_space(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    ours = load_tokenizer(write_tokenizer_gguf(tmp_path / "m.gguf", metadata))
    assert ours.decode(ours.encode(" The dog")) == " The dog"
    assert ours.decode(ours.encode("The dog")) == "The dog"
    assert ours.token_bytes(ours.encode("The", add_special_tokens=False)[0])[:1] != b" "


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.pre": "zz-bpe"}, UnsupportedModelError, "tokenizer.ggml.pre 'zz-bpe'"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model 'bert'"),
        ({"tokenizer.ggml.tokens": None}, CheckpointError, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, CheckpointError, "2 token types"),
        ({"tokenizer.ggml.merges": ["ab"]}, CheckpointError, "merge 'ab'"),
    ],
)
def test_gguf_vocabularies_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = write_tokenizer_gguf(tmp_path / "m.gguf", byte_level_metadata("gpt-2", **changes))
    with pytest.raises(error) as caught:
        load_tokenizer(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


# --- the default model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default(default_model: Path) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' with SmolLM2's pre-tokenizer.

    transformers does not know `smollm` and falls back on GPT-2's, which joins a run of spaces with
    the digit after it; the model's own tokenizer.json and llama.cpp take digits apart first.
    """
    theirs = theirs_from_gguf(default_model)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return load_tokenizer(default_model), theirs


@pytest.mark.model
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_default_ids_equal_the_models_own(default: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = default
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    # Its vocabulary lacks some bytes of rare scripts, so not every text comes back.
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.model
@settings(max_examples=200, deadline=None)
@given(text=TRICKY)
def test_default_round_trip(default: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = default
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.model
def test_default_facts(default: tuple[Tokenizer, Any]) -> None:
    ours, _ = default
    # The ids are llama.cpp's.
    assert ours.encode("in the   2013") == [254, 260, 333, 34, 32, 33, 35]
    assert ours.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert ours.vocab_size == 49152
    assert ours.eos_token_ids == (2, 0)
    prompt = ours.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.model
def test_the_servers_process_stays_light(default_model: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from paceline.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(Path({str(default_model)!r}))\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "tokenizer.decode(tokenizer.encode('a'))\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- tokenizer.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings_",
    [
        {},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": "<|begin|>", "special": True}},
    ],
    ids=str,
)
def test_folder_equals_transformers(tmp_path: Path, settings_: dict[str, Any]) -> None:
    folder = write_tokenizer_folder(tmp_path, **settings_)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in SAMPLES:
        for special in (False, True):
            assert ours.encode(text, add_special_tokens=special) == theirs.encode(
                text, add_special_tokens=special
            )
    ids = theirs.encode("The dog<|end|> and")
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens["bos_token"] == "<|begin|>"
    assert ours.vocab_size == len(theirs)


def test_folder_ignores_stored_truncation(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path)
    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    assert len(load_tokenizer(folder).encode("one two three four five")) > 3


def test_eos_ids_of_a_folder(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path)
    end = load_tokenizer(folder).encode("<|end|>", add_special_tokens=False)[0]
    assert load_tokenizer(folder).eos_token_ids == (end,)
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert hf_eos_token_ids(folder) == (5, end)
    (folder / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert load_tokenizer(folder).eos_token_ids == (6, 7, end)


def test_folders_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    write_tokenizer_folder(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_unpaired_surrogates_are_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"U\+D800\) at character 2"):
        load_tokenizer(write_tokenizer_folder(tmp_path)).encode("ab\ud800c")
