"""The default model's logits against transformers, which reads the same GGUF and dequantises it to float32.

The bounds are for logits of a standard deviation of 7.6; what was measured stands beside them.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from decoder_driver import Driver

from paceline.kernels.parallel import Team
from paceline.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

QUESTION = (
    "A train leaves Lyon at 9:40 and arrives in Paris at 11:37. How long does the journey take, "
    "and which river would you cross on the way? Répondez en français, s'il vous plaît."
)


@pytest.fixture(scope="module")
def prompt(default_model: Path) -> list[int]:
    tokenizer = load_tokenizer(default_model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module")
def expected(default_model: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' logits [n, vocab] in float32; its model is dropped again."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0].clone()
    del model
    gc.collect()
    return logits


def check(got: torch.Tensor, expected: torch.Tensor, largest: float, rms: float, agreement: float) -> None:
    """Errors within bounds, and the likeliest token the same at a share `agreement` of positions."""
    error = got - expected
    same = (got.argmax(1) == expected.argmax(1)).float().mean()
    shown = f"max {error.abs().max():.2g}, rms {error.square().mean().sqrt():.2g}, argmax {same:.3f}"
    assert float(error.abs().max()) < largest, shown
    assert float(error.square().mean().sqrt()) < rms, shown
    assert float(same) >= agreement, shown
    assert int(got[-1].argmax()) == int(expected[-1].argmax()), shown


def test_float32_agrees(default_model: Path, prompt: list[int], expected: torch.Tensor) -> None:
    driver = Driver(default_model, num_rows=1)
    check(driver.whole(0, prompt), expected, largest=1e-3, rms=1e-4, agreement=1.0)
    check(driver.whole(0, prompt, chunk=29), expected, largest=1e-3, rms=1e-4, agreement=1.0)


@pytest.fixture(scope="module")
def packed(default_model: Path, team: Team) -> Driver:
    return Driver(
        default_model,
        weights=torch.bfloat16,
        attention="kernel",
        packed=True,
        team=team,
        max_packed_tokens=16,
        num_rows=1,
    )


def test_packed_kernels_lose_the_rounding_of_keys_and_values(
    packed: Driver, prompt: list[int], expected: torch.Tensor
) -> None:
    # Measured: 0.42 and 0.034, which a float32 decoder over the same bfloat16 cache has as well.
    check(packed.whole(0, prompt, chunk=16), expected, largest=0.7, rms=0.05, agreement=0.97)


def test_dense_copies_lose_that_of_weights_and_activations(
    packed: Driver, prompt: list[int], expected: torch.Tensor
) -> None:
    # Measured: 0.75 and 0.11.
    check(packed.whole(0, prompt), expected, largest=1.2, rms=0.16, agreement=0.97)
