"""A model folder without weights: a real byte-level tokenizer, one token per byte, and a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.tokenizer import Tokenizer, load_tokenizer

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|die|>", "<|raise|>", "<|slow|>", "<|say|>", "<|dead|>", "<|undraft|>",
    "<|misrule|>",
)  # fmt: skip
# Tools as in Hermes' and Qwen's templates.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }} as <tool_call>{}</tool_call><|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} ({{ m.tool_call_id }}){% endif %}"
    "{% if mood %} {{ mood }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """Write the files into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "eos_token_id": 257})
    )
    return folder


def tiny_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that `write_tiny_model` made."""
    return load_tokenizer(write_tiny_model(folder))
