from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import DEFAULT_MODEL
from paceline.models.hub import resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched into the user's cache the first time."""
    return resolve_model(DEFAULT_MODEL, progress=False)
