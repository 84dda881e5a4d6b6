"""From settings to a worker: what is chosen, and what is refused in which words."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import write_hf, write_quantized

from paceline.config import EngineConfig
from paceline.draft import packed_head
from paceline.draft.checkpoint import export_draft
from paceline.draft.eagle3_drafter import Eagle3Drafter
from paceline.draft.packed_head import PackedHead
from paceline.draft.torch_head import TorchHead
from paceline.errors import ConfigError, ModelError
from paceline.models import program
from paceline.models.tensors import Kind
from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.worker.build import ModelInfo, build_worker


def settings(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(model), **({"max_num_seqs": 4, "threads": 1} | changes))


def write_head(folder: Path, **changes: Any) -> Path:
    """A random head for the tiny models, on disk."""
    from draft_cases import config, random_draft

    sizes = {
        **{"hidden_size": 128, "target_hidden_size": 128, "intermediate_size": 96, "head_dim": 32},
        **{"num_heads": 4, "num_kv_heads": 2, "vocab_size": 208, "draft_vocab_size": 64},
        "capture_layer_ids": (0, 2),
    }
    export_draft(random_draft(config(**(sizes | changes))), folder)
    return folder


def first_token(config: EngineConfig) -> int:
    """The greedy token after five others."""
    worker, _ = build_worker(config)
    pages = tuple(range(1, 1 + -(-6 // config.page_size)))
    start = RowStart(0, (5, 6, 7, 8, 9), 5, 0, pages, SamplingParams(temperature=0.0, seed=0), 0, 8)
    (row,) = worker.launch(Plan(0, (), (start,), (RowStep(0, 5, True),))).result().rows
    return row.token_ids[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one")
def test_cuda_without_a_device(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device is cuda, but torch sees no CUDA device"):
        build_worker(settings(tiny_folder, device="cuda"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "packed"}, r"^precision packed needs a GGUF model whose layers"),
        ({"max_model_len": 257}, r"^max_model_len must be at most 256 for this model, got 257$"),
        (
            {"max_model_len": 256, "kv_cache_tokens": 128},
            r"^max_model_len 256 needs kv_cache_tokens of at least as many, got 128$",
        ),
        ({"precision": "fp32", "reproducible": True}, r"^reproducible needs precision packed or bf16"),
        ({"page_size": 8, "reproducible": True}, r"^reproducible needs a head_dim .* got 32 and 8$"),
    ],
)
def test_what_does_not_fit_the_model(tiny_folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_worker(settings(tiny_folder, **changes))


def test_packed_is_refused_where_the_kernels_do_not_fit(tiny_gguf: Path) -> None:
    with pytest.raises(ConfigError, match=r"^precision packed needs .* page_size .* got 64 and 8$"):
        build_worker(settings(tiny_gguf, precision="packed", page_size=8))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ModelInfo(256, 24_576 // 16 + 1, (2,), 208)),
        ({"max_model_len": 100, "kv_cache_tokens": 100}, ModelInfo(100, 7 + 1, (2,), 208)),
        ({"kv_cache_tokens": 100}, ModelInfo(112, 7 + 1, (2,), 208)),  # whole pages
        ({"kv_cache_tokens": 256, "page_size": 64}, ModelInfo(256, 4 + 1, (2,), 208)),
        ({"draft": "none", "max_depth": 3}, ModelInfo(256, 24_576 // 16 + 1, (2,), 208)),
        ({"draft": "ngram"}, ModelInfo(256, 24_576 // 16 + 1, (2,), 208, 8, "ngram")),
        (
            {"draft": "ngram", "max_depth": 3, "depth": 1},
            ModelInfo(256, 24_576 // 16 + 1, (2,), 208, 3, "ngram"),
        ),
    ],
)
def test_sizes(tiny_folder: Path, changes: dict[str, Any], expected: ModelInfo) -> None:
    assert build_worker(settings(tiny_folder, **changes))[1] == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "packed"},
        {"precision": "bf16"},
        {"reproducible": True},
        {"page_size": 64},
        {"page_size": 8},  # not for the kernels
        {"page_size": 1},
        {"threads": 2},
    ],
    ids=str,
)
def test_every_way_to_run_a_gguf_gives_its_word(tiny_gguf: Path, changes: dict[str, Any]) -> None:
    assert first_token(settings(tiny_gguf, **changes)) == first_token(settings(tiny_gguf, precision="fp32"))


def test_models_that_cannot_be_packed_run_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def like_q4_k_m(name: str) -> Kind:
        return "Q6_K" if "v_proj" in name or "embed" in name or "lm_head" in name else "Q4_K"

    mixed = write_quantized(tmp_path / "mixed.gguf", "llama", like_q4_k_m)
    odd = write_quantized(tmp_path / "odd.gguf", "llama", lambda name: "Q8_0", head_dim=48)
    for path in (mixed, odd):
        with caplog.at_level(logging.INFO, logger="paceline"):
            assert first_token(settings(path)) == first_token(settings(path, precision="fp32"))
        assert f"{path.name} as bfloat16" in caplog.text  # what runs, and what it costs, is said
        assert "relative rms error" in caplog.text


def test_head_sizes_without_a_kernel(tmp_path: Path) -> None:
    write_hf(tmp_path, "odd_heads")
    assert first_token(settings(tmp_path)) == first_token(settings(tmp_path, precision="fp32"))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_worker_that_is_dropped_takes_its_threads_with_it(
    tiny_gguf: Path, tmp_path: Path, drafts: bool
) -> None:
    def mine() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("paceline-kernel")} - before

    before = set(threading.enumerate())
    head = write_head(tmp_path / "head", hidden_size=256, target_hidden_size=256, head_dim=64)
    worker, _ = build_worker(settings(tiny_gguf, threads=3, draft=str(head) if drafts else None))
    threads = mine()
    assert len(threads) == 2
    del worker
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_head_is_part_of_what_there_is_to_know(tiny_folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    worker, info = build_worker(settings(tiny_folder, draft=str(head), max_depth=5))
    assert (info.max_depth, info.draft) == (5, str(head))
    assert isinstance(worker._drafter, Eagle3Drafter)
    assert worker._drafter.capture == (0, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"precision": "packed"}, PackedHead),
        ({"reproducible": True}, PackedHead),
        ({"precision": "bf16"}, TorchHead),
        ({"precision": "fp32"}, TorchHead),
        ({"precision": "auto", "page_size": 8}, TorchHead),  # nothing fits the kernels
    ],
    ids=str,
)
def test_a_head_runs_as_its_target_does(
    tiny_gguf: Path, tmp_path: Path, changes: dict[str, Any], expected: type
) -> None:
    head = write_head(tmp_path / "head", hidden_size=256, target_hidden_size=256, num_heads=4, head_dim=64)
    worker, _ = build_worker(settings(tiny_gguf, draft=str(head), **changes))
    assert isinstance(worker._drafter, Eagle3Drafter)
    assert isinstance(worker._drafter._head, expected)


def test_no_step_of_few_tokens_waits_for_its_programs(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path / "head", hidden_size=256, target_hidden_size=256, num_heads=4, head_dim=64)
    worker, _ = build_worker(settings(tiny_gguf, draft=str(head), precision="packed"))

    def refuse(phases: object) -> None:
        raise AssertionError("a program was made in a step")

    monkeypatch.setattr(program, "Program", refuse)
    monkeypatch.setattr(packed_head, "Program", refuse)
    params, pages = SamplingParams(temperature=0.0, seed=0), tuple(range(1, 9))
    start = RowStart(0, tuple(range(5, 45)), 40, 0, pages, params, 0, 100)
    worker.launch(Plan(0, (), (start,), (RowStep(0, 40, True),))).result()
    for number, depth in enumerate((0, 1, 3), 1):
        result = worker.launch(Plan(number, (), (), (RowStep(0, 1, True, depth),))).result()
        assert result.drafter_error is None


def test_a_head_that_the_kernels_lack_runs_in_torch(
    tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = write_head(tmp_path / "head", hidden_size=256, target_hidden_size=256, head_dim=30)
    with caplog.at_level(logging.INFO, logger="paceline"):
        worker, _ = build_worker(settings(tiny_gguf, draft=str(head), precision="packed"))
    assert isinstance(worker._drafter, Eagle3Drafter)
    assert isinstance(worker._drafter._head, TorchHead)
    assert (
        "the draft head runs in torch, slower than on the packed kernels: the head's head_dim" in caplog.text
    )


def test_another_targets_head_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", vocab_size=200)
    with pytest.raises(
        ModelError, match=r"made for another target than .*vocab_size is 200, the target's 208"
    ):
        build_worker(settings(tiny_folder, draft=str(head)))


@pytest.mark.parametrize("method", ["propose", "settle"])
def test_a_head_that_does_not_run_is_refused_at_start(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("what a day")

    monkeypatch.setattr(Eagle3Drafter, method, fail)
    head = write_head(tmp_path / "head")
    with pytest.raises(ModelError, match=r"head does not run: ValueError: what a day$"):
        build_worker(settings(tiny_folder, draft=str(head)))
