"""Promise 4: the same seeded request gives the same tokens alone and among fifteen others.

Through the real scheduler and engine, with prompts that are split and steps that are full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decoder_driver import random_ids

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.engine.factory import StepEngine, build
from paceline.models.hub import resolve_model
from paceline.request import EngineRequest, SamplingParams


def run(engine: StepEngine, *requests: EngineRequest) -> dict[str, list[int]]:
    """Every request's tokens."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens


def check(config: EngineConfig, num_tokens: int, prompt_lens: tuple[int, int]) -> None:
    """Two requests, greedy and sampled, alone and among fourteen others of many lengths and settings."""
    built = build(config)
    shortest, longest = prompt_lens

    def request(i: int, request_id: str, **params: Any) -> EngineRequest:
        length = shortest + (longest - shortest) * (i * 7 % 16) // 15
        settings: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True} | params
        prompt = random_ids(length, built.ready.vocab_size, seed=i)
        return EngineRequest(request_id, prompt, SamplingParams(**settings), choice=i % 2)

    mine = {
        "greedy": {"temperature": 0.0, "seed": 1},
        "sampled": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    }
    watched = [request(3 + i, name, **params) for i, (name, params) in enumerate(mine.items())]
    others = [
        request(
            i,
            f"other {i}",
            temperature=i * 0.2,
            seed=i,
            max_tokens=1 + i % num_tokens,
            logprobs=i % 3 or None,
        )
        for i in range(14)
    ]
    alone = {name: tokens for each in watched for name, tokens in run(built.engine, each).items()}
    together = run(built.engine, *others[:6], *watched, *others[6:])
    for name, tokens in alone.items():
        assert len(tokens) == num_tokens
        assert together[name] == tokens
    assert alone["greedy"] != alone["sampled"]


def engine_config(model: Path, **changes: Any) -> EngineConfig:
    # No prefix caching: it would spare the second run its prompts.
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "prefix_caching": False} | changes
    return EngineConfig(model=str(model), **settings)


def test_float32(tiny_folder: Path) -> None:
    check(engine_config(tiny_folder, precision="fp32", threads=1), num_tokens=40, prompt_lens=(1, 120))


def test_out_of_pages(tiny_folder: Path) -> None:
    """With preemptions, which compute a row's tokens again in chunks of another size."""
    config = engine_config(tiny_folder, precision="fp32", threads=1, kv_cache_tokens=320)
    check(config, num_tokens=40, prompt_lens=(1, 120))


@pytest.mark.parametrize("threads", [1, 2])
def test_packed(tiny_gguf: Path, threads: int) -> None:
    config = engine_config(tiny_gguf, precision="packed", reproducible=True, threads=threads)
    check(config, num_tokens=40, prompt_lens=(1, 120))


def test_bfloat16(tiny_folder: Path) -> None:
    config = engine_config(tiny_folder, precision="bf16", reproducible=True, threads=1)
    check(config, num_tokens=40, prompt_lens=(1, 120))


@pytest.mark.model
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32", "threads": 1},  # two would wait for each other on a busy machine
        {"precision": "packed", "reproducible": True},
    ],
    ids=["fp32", "packed"],
)
def test_default_model(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.delenv("PACELINE_CACHE")
    model = resolve_model(DEFAULT_MODEL, progress=False)
    check(engine_config(model, kv_cache_tokens=2048, **changes), num_tokens=6, prompt_lens=(4, 40))
