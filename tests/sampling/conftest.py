"""Fixtures of the sampling tests: states and logits made in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paceline.request import SamplingParams
from paceline.worker.sampling import SamplerState

torch.set_num_threads(1)  # the tensors here are small: threads that wait for work would only disturb


@pytest.fixture(scope="session")
def make_state() -> Callable[..., SamplerState]:
    """make_state(vocab_size, params or a dict of them, ...): one row for each, seed 0 unless given."""

    def make(
        vocab_size: int,
        *rows: SamplingParams | dict[str, Any],
        choice: int = 0,
        prompt: Sequence[int] = (0,),
        output: Sequence[int] = (),
        eos: Sequence[int] = (2,),
    ) -> SamplerState:
        state = SamplerState(len(rows), vocab_size, eos)
        for row, params in enumerate(rows):
            if isinstance(params, dict):
                params = SamplingParams(**{"seed": 0, **params})
            state.start(row, params, choice, [*prompt, *output], len(prompt))
        return state

    return make


@pytest.fixture(scope="session")
def random_logits() -> Callable[..., torch.Tensor]:
    def make(num: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
        return torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale

    return make
