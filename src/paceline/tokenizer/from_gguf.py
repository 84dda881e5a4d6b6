"""Builds a `tokenizers.Tokenizer` from a GGUF file's metadata, without transformers or torch.

Ids equal those of transformers' `AutoTokenizer(gguf_file=...)`, except where that falls back on
GPT-2's rules for a pre-tokenizer it does not know: here llama.cpp's are applied, or the file is
refused by name. Does not know chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.tokenizer.eos import CONTROL

_USER_DEFINED = 4  # tokenizer.ggml.token_type: whole tokens that are text, like <think>
_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama_split(digits: str) -> str:
    """Llama 3's pattern, which Qwen shares but for the number of digits in a piece."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """What a `tokenizer.ggml.pre` name means: the splits, one after the other, and the rest."""

    splits: tuple[str, ...]
    whole_words: bool = False  # a piece that is itself a token is taken before any merge
    add_bos: bool = False  # unless the file says otherwise
    nfc: bool = False


_LLAMA3 = _Pre((_llama_split(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_DIGITS = _Pre((r"\p{N}", _GPT2))
_PLAIN = _Pre((_GPT2,))
_PRE: dict[str, _Pre] = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PLAIN,
    "olmo": _PLAIN,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _Pre(_LLAMA3.splits),
    "tekken": _Pre((_TEKKEN,), whole_words=True, add_bos=True),
    "qwen2": _Pre((_llama_split(r"\p{N}"),), nfc=True),
    "deepseek-r1-qwen": _Pre((_llama_split(r"\p{N}"),)),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that `metadata` describes; `path` is for messages.

    Raises:
        UnsupportedModelError: a tokenizer model or pre-tokenizer of another kind; named.
        CheckpointError: the vocabulary is missing or inconsistent.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise CheckpointError(f"{path}: no tokenizer.ggml.tokens in the file")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    if types and len(types) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(metadata, tokens, path)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(metadata, tokens, path), True
    else:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama"
        )
    _add_special_tokens(tokenizer, metadata, tokens, types)
    _add_ends(tokenizer, metadata, add_bos)
    return tokenizer


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the `bos`, `eos`, `unknown` or `padding` token, if the file names one."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    pre = _PRE.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(_PRE)}"
        )
    merges = [_pair(merge, path) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre.whole_words))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    """SentencePiece BPE as merges: the pair whose result scores highest is merged first."""
    scores: list[float] = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise CheckpointError(f"{path}: {len(tokens)} tokens but {len(scores)} scores")
    vocabulary = _vocabulary(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=special_token(metadata, "unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if add_space else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise CheckpointError(f"{path}: merge {merge!r} is not two tokens with a space between")
    return left, right


def _merges_from_scores(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, in the order SentencePiece prefers."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[token_id], len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_special_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Control tokens are matched whole and are special; user-defined ones are matched whole."""
    named = {special_token(metadata, name) for name in ("bos", "eos", "unknown", "padding")}
    special = [t for i, t in enumerate(tokens) if (types and types[i] == CONTROL) or t in named]
    plain = [t for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED and t not in named]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in plain])


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], add_bos: bool) -> None:
    """BOS before and EOS after every text, where the file (or its kind's custom) says so."""
    bos = special_token(metadata, "bos") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special_token(metadata, "eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    template = " ".join([*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])])
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
