"""The settings: frozen, documented, checked when made, never changed afterwards.

Each field carries its help text in `metadata["help"]`; the command line and the docs are made
from it. `None` in a field means "chosen at start from the model and the machine"; `resolve`
functions return a new object and the code that runs never sees a None it must interpret twice.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import ConfigError

Device = Literal["cpu", "cuda"]
Precision = Literal["auto", "packed", "bf16", "fp32"]

DEFAULT_MODEL = "smollm2-135m-instruct"


def option(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text; `choices` and `metavar` pass through to the CLI."""
    return field(default=default, metadata={"help": help, **extra})


def _at_least(config: object, name: str, low: float) -> None:
    value = getattr(config, name)
    if value is not None and value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs to start.

    Raises:
        ConfigError: a value is out of range; the message names the setting and its limit.
    """

    model: str = option(DEFAULT_MODEL, "built-in name, Hugging Face id, local folder or .gguf file")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id")
    device: Device = option("cpu", "where the model runs", choices=("cpu", "cuda"))
    precision: Precision = option(
        "auto",
        "arithmetic of the weights. auto: packed on CPU for 4- and 8-bit GGUF, bf16 otherwise; fp32 is exact and slow",
        choices=("auto", "packed", "bf16", "fp32"),
    )
    max_model_len: int | None = option(None, "longest prompt plus answer, in tokens; default: the model's own limit")
    kv_cache_tokens: int | None = option(None, "tokens of K/V kept in all, over all requests; default: 24576 on CPU")
    page_size: int = option(16, "tokens in one page of the K/V cache")
    max_num_seqs: int = option(64, "most requests that run at once; the rest wait their turn")
    max_num_batched_tokens: int = option(512, "most tokens computed in one step; longer prompts are split")
    max_queue: int = option(1024, "most requests that wait; one more is refused with 429")
    prefix_caching: bool = option(True, "reuse the K/V of prompt beginnings already computed")
    threads: int | None = option(None, "compute threads on CPU; default: the cores this process may use")
    reproducible: bool = option(False, "one kernel per matrix whatever the batch, so that load never changes words (CPU)")
    debug: bool = option(False, "check the page table's invariants whenever the engine is idle")

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 2),
            ("kv_cache_tokens", 1),
            ("page_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_queue", 0),
            ("threads", 1),
        ):
            _at_least(self, name, low)
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(f"{f.name} must be one of {', '.join(choices)}, got {getattr(self, f.name)!r}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request computes a token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side.

    Raises:
        ConfigError: a value is out of range; the message names the setting and its limit.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0 for any free one")
    served_model_name: str | None = option(None, "name clients use for the model; default: the name it was started with")
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe message that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")


def available_cores() -> int:
    """Cores this process may run on (its affinity mask, not the machine's size)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
