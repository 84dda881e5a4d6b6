"""`Tokenizer`: text to ids and back, and chat messages to text, for either file format.

Built on the `tokenizers` library alone: transformers would add 50 MB to the server's process, and
torch with it. Decoding does not "clean up" spaces (as vLLM): the text is what the tokens say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import CheckpointError, ModelNotFoundError, RequestError
from paceline.gguf_header import read_gguf_header
from paceline.json_file import read_json
from paceline.tokenizer.chat_template import ChatTemplate, Message
from paceline.tokenizer.eos import gguf_eos_token_ids, hf_eos_token_ids, token_text
from paceline.tokenizer.from_gguf import special_token, tokenizer_from_gguf
from paceline.tokenizer.spelling import Spelling, Stream, spelling

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """What a model's files say about text. Made by `load_tokenizer`; safe to share between threads.

    Attributes:
        eos_token_ids: tokens that end an answer.
        special_tokens: texts of `bos_token`, `eos_token`, `unk_token` and `pad_token`; of those there are.
        vocab_size: number of ids, added tokens included; the model's matrix may have more rows.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = _spelling(backend)
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._template = ChatTemplate(chat_templates, special_tokens) if chat_templates else None
        self.eos_token_ids = eos_token_ids
        self.special_tokens = special_tokens
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Added tokens that are no text: `decode` skips them unless told otherwise."""
        return self._special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the template for requests without tools, if the model has one."""
        return None if self._template is None else self._template.source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in it are parsed as such.

        Args:
            text: any text; "" gives no tokens, or the model's BOS.
            add_special_tokens: put BOS or EOS around it where the model's files say so (in a folder
                that is tokenizer.json alone, as in transformers 5). False for the output of
                `apply_chat_template`, which writes its own.

        Raises:
            RequestError: the text has an unpaired surrogate, which UTF-8 cannot express.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # the library's word for a str that is not Unicode text
            at = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
            raise RequestError(
                None, f"the text has an unpaired surrogate (U+{ord(text[at]):04X}) at character {at}"
            ) from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Ids outside the vocabulary give nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes: maybe half a character, empty for an id outside the vocabulary."""
        return self._spelling.token_bytes(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text for a conversation; encode it without adding special tokens.

        Args:
            messages: `role`, `content` and whatever else the model's template reads.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of callable tools, in OpenAI's shape.
            variables: further template variables, such as Qwen3's `enable_thinking`.

        Raises:
            RequestError: the model has no chat template, or its template refuses the messages.
        """
        if self._template is None:
            raise RequestError("messages", "this model has no chat template; use plain completions")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    def stream(self, skip_special_tokens: bool, continues: bool) -> Stream:
        """A token-by-token decoding; `IncrementalDetokenizer` is its public face."""
        return self._spelling.stream(self._special_ids if skip_special_tokens else frozenset(), continues)


class IncrementalDetokenizer:
    """Decodes one answer as its tokens come, in constant time and memory per token.

    What `push` and `flush` return adds up to `Tokenizer.decode` of all tokens. A character whose
    bytes are not complete is held back, so pushing tokens one by one gives the text that each
    token completed.

    Args:
        continues: the answer continues a prompt's text, so its first space is kept where
            `Tokenizer.decode` takes it off (SentencePiece vocabularies).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._stream = tokenizer.stream(skip_special_tokens, continues)

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text that is certain after `token_ids`."""
        return self._stream.push(token_ids)

    def flush(self) -> str:
        """What was held back, now that the answer has ended."""
        return self._stream.flush()


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a `.gguf` file, or of a folder with tokenizer.json.

    Raises:
        ModelNotFoundError: no such path, or no tokenizer.json in the folder.
        UnsupportedModelError: a kind of tokenizer that is not run here; named.
        CheckpointError: a file is damaged; named.
    """
    if model_path.is_file():
        return _load_gguf(model_path)
    if not (model_path / "tokenizer.json").is_file():
        raise ModelNotFoundError(
            f"{model_path}: no tokenizer.json; transformers' AutoTokenizer writes one with save_pretrained"
        )
    return _load_folder(model_path)


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_gguf_header(path).metadata
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: special_token(metadata, name) for key, name in names.items()}
    templates = {"default": metadata.get("tokenizer.chat_template")} | {
        name: metadata.get(f"tokenizer.chat_template.{name}")
        for name in metadata.get("tokenizer.chat_templates", [])
    }
    return Tokenizer(
        tokenizer_from_gguf(metadata, path),
        eos_token_ids=gguf_eos_token_ids(metadata),
        special_tokens={key: text for key, text in special.items() if text is not None},
        chat_templates={name: source for name, source in templates.items() if source},
    )


def _load_folder(folder: Path) -> Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{folder / 'tokenizer.json'}: not a tokenizer: {error}") from None
    settings = read_json(folder / "tokenizer_config.json")
    declared = read_json(folder / "special_tokens_map.json") | settings
    special = {name: text for name in _SPECIAL_NAMES if (text := token_text(declared.get(name))) is not None}
    return Tokenizer(
        backend,
        eos_token_ids=hf_eos_token_ids(folder),
        special_tokens=special,
        chat_templates=_chat_templates(folder, settings),
    )


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja if there is one, else tokenizer_config.json's text or named texts."""
    file = folder / "chat_template.jinja"
    try:
        declared = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(declared, list):
            return {entry["name"]: entry["template"] for entry in declared}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8 text: {error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with "
            "name and template"
        ) from None
    return {"default": declared} if isinstance(declared, str) else {}


def _spelling(backend: tokenizers.Tokenizer) -> Spelling:
    decoder = backend.decoder
    return spelling(json.loads(decoder.__getstate__()) if decoder is not None else None, backend.id_to_token)
