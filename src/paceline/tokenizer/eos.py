"""Which tokens end an answer: one rule, read by the tokenizer and by the engine's model alike.

Does not know of requests that ignore it (`ignore_eos`) or add to it (`stop_token_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.json_file import read_json

# llama.cpp stops at these whatever the metadata says, because many files name only one of theirs.
_END_TOKENS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)
CONTROL = 3  # tokenizer.ggml.token_type of tokens that are not text


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """From GGUF metadata: the named end, end-of-turn and end-of-message ids first, then every
    control token whose text is a known end."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type", [])
    ends = [i for i, kind in enumerate(types) if kind == CONTROL and tokens[i] in _END_TOKENS]
    return tuple(dict.fromkeys(i for i in [*named, *ends] if i is not None))


def hf_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """From a Hugging Face folder: generation_config.json's ids (else config.json's), and the
    tokenizer's own `eos_token`, as vLLM does.

    Raises:
        CheckpointError: one of these files is not valid JSON.
    """
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = read_json(folder / "config.json").get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    settings = read_json(folder / "tokenizer_config.json")
    own = token_text(settings.get("eos_token"))
    if own is not None:
        ids = [*ids, _added_token_id(folder, settings, own)]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def token_text(value: Any) -> str | None:
    """A special token's text: tokenizer_config.json gives a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added_token_id(folder: Path, settings: Mapping[str, Any], text: str) -> int | None:
    for key, entry in settings.get("added_tokens_decoder", {}).items():
        if token_text(entry) == text:
            return int(key)
    # transformers 5 no longer repeats the added tokens in tokenizer_config.json.
    for entry in read_json(folder / "tokenizer.json").get("added_tokens", []):
        if entry.get("content") == text:
            return int(entry["id"])
    return None
