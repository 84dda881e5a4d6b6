"""Paceline: an LLM inference server that drafts only when drafting pays.

Exports are lazy, so that `import paceline` loads neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.llm import LLM, Completion
    from paceline.request import SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

_EXPORTS = {"LLM": "paceline.llm", "Completion": "paceline.llm", "SamplingParams": "paceline.request"}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
