"""The settings: frozen, documented, checked when made, never changed afterwards.

Each field carries its help text in `metadata["help"]`; the command line and the docs are made
from it. `None` in a field means "chosen at start from the model and the machine"; `resolve`
functions return a new object and the code that runs never sees a None it must interpret twice.

Where values come from (flags, variables, a file) is not known here: `cli_settings` reads them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from paceline.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
MAX_LOGPROBS = 20  # alternatives a sampler can list for one token
POLICIES = ("governor", "ema", "table", "threshold")
MAX_DEPTH = 16  # drafts of one row in one step, whatever the settings say


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text; `choices` and `metavar` pass through to the CLI.

    A field that is `secret` shows its value nowhere: not in help, not in a repr.
    """
    return field(default=default, metadata={"help": help, **extra}, repr=not extra.get("secret", False))


def is_whole(text: str) -> bool:
    """Whether the text is a whole number in ASCII digits: `int` takes those of other scripts too."""
    return text.isascii() and text.isdecimal()


def _at_least(config: object, name: str, low: float) -> None:
    value = getattr(config, name)
    if value is not None and not low <= value < math.inf:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _check_types(config: Any) -> None:
    hints = get_type_hints(type(config))
    for f in dataclasses.fields(config):
        if "choices" in f.metadata:
            continue
        value, kinds = getattr(config, f.name), get_args(hints[f.name]) or (hints[f.name],)
        widened = (*kinds, int) if float in kinds else kinds
        if not (bool in kinds if isinstance(value, bool) else isinstance(value, widened)):
            raise ConfigError(f"{f.name} must be {TYPE_NAMES[kinds[0]]}, got {value!r}")


def _check_choices(config: Any) -> None:
    for f in dataclasses.fields(config):
        choices = f.metadata.get("choices")
        if choices and getattr(config, f.name) not in choices:
            raise ConfigError(
                f"{f.name} must be one of {', '.join(choices)}, got {getattr(config, f.name)!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start.

    Raises:
        ConfigError: a value is out of range; the message names the setting and its limit.
    """

    model: str = option(DEFAULT_MODEL, "built-in name, Hugging Face id, local folder or .gguf file")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    device: Literal["cpu", "cuda"] = option("cpu", "where the model runs", choices=("cpu", "cuda"))
    precision: Literal["auto", "packed", "bf16", "fp32"] = option(
        "auto",
        "arithmetic of the weights. auto: packed on CPU for 4-, 6- and 8-bit GGUF, bf16 otherwise; "
        "fp32 is exact and slow",
        choices=("auto", "packed", "bf16", "fp32"),
    )
    max_model_len: int | None = option(
        None, "longest prompt plus answer, in tokens; default: the model's own limit"
    )
    kv_cache_tokens: int | None = option(
        None, "tokens of K/V kept in all, over all requests; default: 24576 on CPU"
    )
    page_size: int = option(16, "tokens in one page of the K/V cache")
    max_num_seqs: int = option(64, "most requests that run at once; the rest wait their turn")
    max_num_batched_tokens: int = option(512, "most tokens computed in one step; longer prompts are split")
    max_queue: int = option(1024, "most requests that wait; one more is refused with 429")
    prefix_caching: bool = option(True, "reuse the K/V of prompt beginnings already computed")
    draft: str | None = option(
        None,
        "draft head: folder, Hugging Face id, ngram or none; default: the one shipped with a built-in model, "
        "else none",
    )
    draft_revision: str | None = option(None, "branch, tag or commit of the draft head's Hugging Face id")
    depth: str = option(
        "auto",
        "drafts a round, for requests that do not say: a number, or auto to choose at every step what makes "
        "most tokens a second",
        metavar="N|auto",
    )
    policy: str = option(
        "governor",
        "who chooses if depth is auto: governor (measures cost and acceptance), ema (SGLang's rule), "
        "table:ROWS=DEPTH,... or threshold:ROWS[:DEPTH]",
    )
    calibration: bool = option(
        True, "time the model at the first start, for the governor; without, it learns while serving"
    )
    max_depth: int = option(8, f"largest depth a request may ask for; at most {MAX_DEPTH}")
    ngram_min: int = option(2, "shortest run of tokens that draft ngram looks up")
    ngram_max: int = option(4, "longest run of tokens that draft ngram looks up")
    trace: str | None = option(
        None, "file for what every step did, to be replayed with other policies", metavar="FILE"
    )
    trace_max_bytes: int = option(
        64 * 2**20, "largest trace file; then it becomes FILE.1, in the place of the one before"
    )
    threads: int | None = option(None, "compute threads on CPU; default: the cores this process may use")
    reproducible: bool = option(
        False, "one kernel per matrix whatever the batch, so that load never changes words (CPU)"
    )
    debug: bool = option(False, "check the page table's invariants whenever the engine is idle")

    def __post_init__(self) -> None:
        depth: Any = self.depth
        if isinstance(depth, int) and not isinstance(depth, bool):  # as a file or a caller writes it
            object.__setattr__(self, "depth", str(depth))
        _check_types(self)
        for name, low in (
            ("max_model_len", 2),
            ("kv_cache_tokens", 1),
            ("page_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_queue", 0),
            ("max_depth", 0),
            ("ngram_min", 1),
            ("ngram_max", 1),
            ("trace_max_bytes", 2**16),
            ("threads", 1),
        ):
            _at_least(self, name, low)
        _check_choices(self)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.trace == "":
            raise ConfigError("trace must not be empty")
        self._check_speculation()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request computes a token a step"
            )

    def _check_speculation(self) -> None:
        if self.draft == "":
            raise ConfigError("draft must not be empty: none is the word for no drafter")
        if self.max_depth > MAX_DEPTH:
            raise ConfigError(f"max_depth must be at most {MAX_DEPTH}, got {self.max_depth}")
        if self.depth != "auto":
            if not is_whole(self.depth):
                raise ConfigError(f"depth must be auto or a whole number, got {self.depth!r}")
            if int(self.depth) > self.max_depth:
                raise ConfigError(f"depth must be at most max_depth ({self.max_depth}), got {self.depth}")
        if self.policy.partition(":")[0] not in POLICIES:
            raise ConfigError(f"policy must begin with one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.ngram_min > self.ngram_max:
            raise ConfigError(f"ngram_min must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side.

    Raises:
        ConfigError: a value is out of range; the message names the setting and its limit.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 for any free one")
    served_model_name: str | None = option(
        None, "name clients use for the model; default: the name it was started with"
    )
    api_key: str | None = option(
        None,
        "key that clients must send, or several with commas between; default: none is asked for",
        secret=True,
    )
    max_body_bytes: int = option(32 * 2**20, "largest request body; a larger one is refused with 413")
    max_header_bytes: int = option(
        64 * 2**10, "largest request line and headers; larger ones are refused with 431"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "none"] = option(
        "auto",
        "form of the model's tool calls; auto goes by its chat template",
        choices=("auto", "hermes", "llama3", "none"),
    )
    max_choices: int = option(128, "largest n: answers to one prompt")
    max_prompts: int = option(1024, "most prompts in one request to /v1/completions")
    max_logprobs: int = option(MAX_LOGPROBS, "most alternatives listed for a token (logprobs, top_logprobs)")
    max_stop_strings: int = option(16, "most stop strings of a request")
    max_stop_chars: int = option(1024, "longest stop string, in characters")
    max_unread_tokens: int = option(
        16384,
        "tokens kept for a client that does not read its stream; beyond that the request ends with an error",
    )
    drain_seconds: float = option(
        30.0, "after SIGTERM or Ctrl-C, how long answers under way may take to finish"
    )
    hang_seconds: float = option(
        120.0, "an engine that has work and shows no sign of life for this long is restarted; 0: never"
    )
    quick_death_seconds: float = option(
        10.0,
        "an engine that dies sooner than this after its start died quickly; three in a row end the server",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe message that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        _check_types(self)
        _check_choices(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name, low in (
            ("max_body_bytes", 1),
            ("max_header_bytes", 1024),
            ("max_choices", 1),
            ("max_prompts", 1),
            ("max_logprobs", 0),
            ("max_stop_strings", 0),
            ("max_stop_chars", 1),
            ("max_unread_tokens", 1),
            ("drain_seconds", 0),
            ("hang_seconds", 0),
            ("quick_death_seconds", 0),
        ):
            _at_least(self, name, low)
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs must be at most {MAX_LOGPROBS}, got {self.max_logprobs}")
        if self.api_key is not None and not all(key.isascii() and key.isprintable() for key in self.api_keys):
            raise ConfigError("api_key may hold printable ASCII characters only: it travels in a header")
        if self.api_key is not None and not all(self.api_keys):
            raise ConfigError("api_key must not be empty, nor hold an empty key between commas")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that open the door; none: it is open."""
        return () if self.api_key is None else tuple(key.strip() for key in self.api_key.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a command, and where each value came from."""

    engine: EngineConfig
    server: ServerConfig
    origins: Mapping[str, str]  # by field name; a field that is not there has its default


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine's size)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
