"""What only a CUDA device can show. Marked `gpu`: CI has none, so these are run by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("models", "draft"))

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.draft.checkpoint import export_draft
from paceline.engine.factory import build
from paceline.request import EngineRequest, SamplingParams
from paceline.train.attention import causal_with_diagonals

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import write_folder

    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_folder(
        folder, vocab_size=512, hidden_size=128, max_position_embeddings=512, tie_word_embeddings=True
    )
    return folder


@pytest.fixture(scope="module")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for it."""
    from draft_cases import config, random_draft

    folder = tmp_path_factory.mktemp("head") / "head"
    sizes = {"hidden_size": 128, "target_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    vocabularies = {"vocab_size": 512, "draft_vocab_size": 256}
    export_draft(random_draft(config(**sizes, **vocabularies, capture_layer_ids=(0, 1))), folder)
    return folder


def _answers(
    model: Path | str, device: str, temperature: float, draft: str | None = None, depth: int = 0
) -> dict[str, list[int]]:
    """Twelve requests of different lengths at once, with penalties and truncation among them."""
    config = EngineConfig(
        model=str(model),
        draft=draft,
        depth=depth,
        device=device,
        precision="fp32",
        max_num_seqs=8,
        max_num_batched_tokens=48,
        kv_cache_tokens=2048,
    )
    engine = build(config).engine
    for i in range(12):
        prompt = [(7 * i + 3 * j) % 500 + 3 for j in range(5 + 9 * i)]
        params = SamplingParams(
            temperature=temperature, top_p=0.9 if i % 3 == 0 else 1.0, top_k=20 if i % 4 == 0 else 0, seed=i,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0, max_tokens=24, ignore_eos=True,
        )  # fmt: skip
        engine.add(EngineRequest(f"r{i}", prompt, params))
    made: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_says_what_the_cpu_says(tiny_folder: Path, temperature: float) -> None:
    assert _answers(tiny_folder, "cuda", temperature) == _answers(tiny_folder, "cpu", temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_drafts_do_not_change_words(
    tiny_folder: Path, tiny_head: Path, temperature: float, depth: int
) -> None:
    plain = _answers(tiny_folder, "cuda", temperature, "none")
    for draft in (str(tiny_head), "ngram"):
        assert _answers(tiny_folder, "cuda", temperature, draft, depth) == plain


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_shipped_head_does_not_change_words(temperature: float) -> None:
    plain = _answers(DEFAULT_MODEL, "cuda", temperature, "none")
    for depth in (0, 2):
        assert _answers(DEFAULT_MODEL, "cuda", temperature, depth=depth) == plain


@pytest.mark.parametrize("num_diagonals", [0, 1, 4])
def test_merged_attention_and_its_gradients(num_diagonals: int) -> None:
    torch.manual_seed(0)
    shape = (2, 3, 200, 64)
    plain = [torch.randn(shape, device="cuda") for _ in range(3)]
    chain = [torch.randn(num_diagonals, *shape, device="cuda") for _ in range(2)]
    ours = [t.bfloat16().requires_grad_() for t in (*plain, *chain)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    got, wanted = causal_with_diagonals(*ours), _reference(*theirs)
    grad = torch.randn(shape, device="cuda", dtype=torch.float64)
    got_grads = torch.autograd.grad(got, ours, grad.bfloat16())
    wanted_grads = torch.autograd.grad(wanted, theirs, grad, allow_unused=True)
    for a, b in zip((got, *got_grads), (wanted, *wanted_grads), strict=True):
        if b is not None and b.numel():
            assert (a.double() - b).norm() / b.norm() < 1e-2


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chain_k: torch.Tensor, chain_v: torch.Tensor
) -> torch.Tensor:
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~causal, float("-inf"))
    diagonals = (q * chain_k).sum(-1).permute(1, 2, 3, 0) * scale
    weights = torch.cat((scores, diagonals), dim=-1).softmax(dim=-1)
    mixed = weights[..., :length] @ v
    return mixed + (weights[..., length:].permute(3, 0, 1, 2)[..., None] * chain_v).sum(0)
