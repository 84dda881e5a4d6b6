"""Logits of tiny random models that transformers saved and we load, against transformers' own in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_driver import Driver, random_ids
from tiny_checkpoints import VARIANTS

from paceline.kernels.parallel import Team

Models = Callable[[str], tuple[Path, Any]]
LENGTHS = (150, 37, 1, 64)
# Logits have a standard deviation near 1. Measured: 6e-6, 0.031 and 0.091 at most.
FLOAT32 = {"rtol": 0.0, "atol": 5e-5}
BFLOAT16_KV = 0.05  # K and V rounded to 8 bits, three layers
BFLOAT16 = 0.15  # the weights and activations as well


@pytest.fixture
def prompts() -> list[list[int]]:
    return [random_ids(n, 208, seed) for seed, n in enumerate(LENGTHS)]


def reference(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].float() for ids in prompts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_agrees_however_the_tokens_come(
    hf_models: Models, prompts: list[list[int]], variant: str
) -> None:
    folder, model = hf_models(variant)
    expected = reference(model, prompts)
    assert float(expected[0].std()) > 0.5
    driver = Driver(folder)
    for row, (ids, logits) in enumerate(zip(prompts, expected, strict=True)):
        torch.testing.assert_close(driver.whole(row, ids), logits, **FLOAT32)
    torch.testing.assert_close(driver.whole(0, prompts[0], chunk=17), expected[0], **FLOAT32)
    torch.testing.assert_close(driver.whole(1, prompts[1], chunk=1), expected[1], **FLOAT32)
    for got, logits in zip(driver.ragged(prompts, sizes=(13, 1, 1, 7)), expected, strict=True):
        torch.testing.assert_close(got, logits, **FLOAT32)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_page_sizes_make_no_difference(hf_models: Models, prompts: list[list[int]], page_size: int) -> None:
    folder, model = hf_models("llama")
    driver = Driver(folder, page_size=page_size)
    for got, logits in zip(driver.ragged(prompts, (50, 1, 1, 3)), reference(model, prompts), strict=True):
        torch.testing.assert_close(got, logits, **FLOAT32)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "odd_heads"])
def test_the_kernel_differs_by_its_bfloat16_cache_alone(
    hf_models: Models, prompts: list[list[int]], team: Team, variant: str
) -> None:
    folder, model = hf_models(variant)
    driver = Driver(folder, attention="kernel", team=team)
    expected = reference(model, prompts)
    in_one = [driver.whole(row, ids) for row, ids in enumerate(prompts)]
    for got, logits in zip(in_one, expected, strict=True):
        assert float((got - logits).abs().max()) < BFLOAT16_KV
    for got, once in zip(driver.ragged(prompts, (13, 1, 1, 7)), in_one, strict=True):
        assert float((got - once).abs().max()) < BFLOAT16_KV


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "odd_heads"])
def test_bfloat16_throughout(hf_models: Models, prompts: list[list[int]], team: Team, variant: str) -> None:
    folder, model = hf_models(variant)
    attention = torch.bfloat16 if variant == "odd_heads" else "kernel"
    driver = Driver(folder, weights=torch.bfloat16, attention=attention, team=team)
    for got, logits in zip(driver.ragged(prompts, (13, 1, 1, 7)), reference(model, prompts), strict=True):
        assert float((got - logits).abs().max()) < BFLOAT16
        assert float((got - logits).square().mean().sqrt()) < BFLOAT16 / 5


def test_rows_do_not_see_each_other(hf_models: Models, prompts: list[list[int]], team: Team) -> None:
    folder, _ = hf_models("llama")
    for settings in ({}, {"attention": "kernel", "team": team}):
        driver = Driver(folder, **settings)
        alone = driver.whole(1, prompts[1])
        driver.whole(0, prompts[0])
        changed = driver.ragged([random_ids(90, 208, 9), prompts[1]], sizes=(90, 37))[1]
        torch.testing.assert_close(changed, alone, rtol=0.0, atol=1e-4)
