"""Chat templates render as transformers renders them, and fail as the caller's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_level_metadata, write_tokenizer_folder, write_tokenizer_gguf
from transformers import PreTrainedTokenizerFast

from paceline.errors import CheckpointError, RequestError
from paceline.tokenizer import load_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hé?", "name": None},
    {
        "role": "assistant",
        "content": "Yes.",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü<"}}}],
    },
    {"role": "user", "content": "Why?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n"
        "    {% if loop.first %}{{ bos_token }}{% endif %}\n"
        "    {{- '<|' + m.role + '|>' + m['content'] + eos_token }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    ),
    "tools": (
        "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}"
        "{% for m in messages if m.tool_calls is defined %}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(count=0) %}"
        "{% for m in messages %}{% set ns.count = ns.count + 1 %}{% endfor %}"
        "{{ ns.count }}{{ dict(a=1)['a'] }}{{ dict.fromkeys(['k'])|tojson }}"
    ),
    "none is left out": "{% for m in messages %}{{ m.name is defined }}{{ m.keys() | list }}{% endfor %}",
    "variables": (
        "{{ enable_thinking }}{{ unknown_variable }}{{ strftime_now('%Y') | length }}{{ documents is none }}"
    ),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(tmp_path: Path, template: str, tools: Any, prompt: bool) -> None:
    folder = write_tokenizer_folder(tmp_path, chat_template=template)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    arguments: dict[str, Any] = {"add_generation_prompt": prompt, "tools": tools, "enable_thinking": False}
    assert ours.has_chat_template
    assert ours.apply_chat_template(MESSAGES, **arguments) == theirs.apply_chat_template(
        MESSAGES, tokenize=False, **arguments
    )


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert not load_tokenizer(write_tokenizer_folder(tmp_path / "none")).has_chat_template
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = write_tokenizer_folder(tmp_path / "named", chat_template=named)
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "plain"
    assert load_tokenizer(folder).apply_chat_template(MESSAGES, tools=TOOLS) == "with tools"
    (folder / "chat_template.jinja").write_text("from the file: {{ bos_token }}")
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "from the file: <|begin|>"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not UTF-8 text"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match="chat_template must be a text, or a list of objects"):
        load_tokenizer(write_tokenizer_folder(tmp_path / "unnamed", chat_template=[{"name": "default"}]))
    metadata = {
        "tokenizer.chat_template": "{{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools!",
    }
    path = write_tokenizer_gguf(tmp_path / "m.gguf", byte_level_metadata("gpt-2", **metadata))
    assert load_tokenizer(path).apply_chat_template(MESSAGES) == "<|end|>"
    assert load_tokenizer(path).apply_chat_template(MESSAGES, tools=TOOLS) == "tools!"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template is invalid, line 1"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages[9].content }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{% set ns = namespace(__init__=1) %}", "underscore"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "refuses these messages"),
    ],
)
def test_failures_are_request_errors(tmp_path: Path, template: str, words: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match=words) as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


def test_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        load_tokenizer(write_tokenizer_folder(tmp_path)).apply_chat_template(MESSAGES)


def test_messages_are_not_changed(tmp_path: Path) -> None:
    before = json.dumps(MESSAGES)
    load_tokenizer(write_tokenizer_folder(tmp_path, chat_template=TEMPLATES["chatml"])).apply_chat_template(
        MESSAGES
    )
    assert json.dumps(MESSAGES) == before
