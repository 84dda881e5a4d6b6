from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The default model as anybody would load it, but with a small K/V pool."""
    with LLM(kv_cache_tokens=4096, debug=True) as loaded:
        yield loaded
