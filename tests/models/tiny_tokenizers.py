"""Trains tiny tokenizers and writes them as GGUF metadata or as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tiny_models import write_gguf
from tokenizers import decoders, models, pre_tokenizers, trainers

CONTROL, USER_DEFINED, BYTE, UNKNOWN, NORMAL = 3, 4, 6, 2, 1

TEXT = (
    "The quick brown fox jumps over the lazy dog, and its owner doesn't mind; they'll see 12345 times.\n"
    "Der schnelle braune Fuchs springt über den faulen Hund. Ça va très bien, à bientôt! 日本語の文章です。\n"
    "def main(argv):\n    for i in range(1000):\n        print(i, '   ', argv[i])\n\n\treturn 0\n"
) * 3
SAMPLES = [
    "",
    " ",
    "The dog's 1234567 times   over",
    "they'll SEE  2 3\n\n\n  x",
    "über très ﬁn e\u0301 日本語です😀🏳️‍🌈",
    "in the   2013 marathon, ²³ ½",
    "<|end|>hi<think> hm</think>  <|end|> x",
    "\t\r\n  return 0\n",
    "naïve a\u0300 \ufb01 \U0001f469\u200d\U0001f469",
]


def _train(
    pre_tokenizer: pre_tokenizers.PreTokenizer, alphabet: list[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Vocabulary in order of ids, and merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([TEXT], trainer)
    state = json.loads(trained.to_str())["model"]
    vocabulary = sorted(state["vocab"], key=state["vocab"].__getitem__)
    return vocabulary, [tuple(merge) for merge in state["merges"]]


def byte_level_vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _train(pre, pre_tokenizers.ByteLevel.alphabet())


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary with two control tokens and two user-defined ones at its end."""
    vocabulary, merges = byte_level_vocabulary()
    added = {"<|begin|>": CONTROL, "<|end|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary + list(added),
        "tokenizer.ggml.token_type": [NORMAL] * len(vocabulary) + list(added.values()),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": len(vocabulary),
        "tokenizer.ggml.eos_token_id": len(vocabulary) + 1,
    } | changes


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """As SentencePiece writes it: unknown, BOS, EOS, 256 bytes, then pieces with falling scores."""
    pieces, merges = _train(pre_tokenizers.Metaspace(), [])
    merged = ["".join(merge) for merge in merges]
    single = [piece for piece in pieces if piece not in set(merged)]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *merged, *single]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(merged) + len(single))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-rank) for rank in range(len(tokens) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def write_tokenizer_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    write_gguf(path, metadata=metadata)
    return path


def write_tokenizer_folder(folder: Path, **settings: Any) -> Path:
    """tokenizer.json (byte-level, `<|begin|>` before every text) and tokenizer_config.json."""
    vocabulary, merges = byte_level_vocabulary()
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
    } | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
