"""Quantised GGUF models through the packed kernels against the plain decoder on the same values in float32.

Both use the bfloat16 cache of the CPU kernel, so what is left is float32's rounding, or that of what the
integer kernels multiply to 16 bits, and now and then a key or value that it pushes over to the next bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from decoder_driver import Driver, random_ids
from gguf_blocks import QUANTIZED
from tiny_checkpoints import write_quantized

from paceline.kernels.parallel import Phase, Program, Team
from paceline.models import program
from paceline.models.batch import Batch
from paceline.models.checkpoint import open_checkpoint
from paceline.models.decoder import Decoder
from paceline.models.rope import rope_tables
from paceline.models.tensors import Kind
from paceline.models.weights import can_pack, load_weights
from paceline.worker.attention.torch_paged import TorchAttention

ROUNDING = 0.05  # logits have a standard deviation near 1
BFLOAT16 = 0.15
PROMPTS = [random_ids(n, 208, seed) for seed, n in enumerate((70, 19, 1, 33))]


def all_of(kind: Kind, vocabulary: Kind | None = None) -> object:
    """Every matrix of one type, but for the embedding and the head if so asked."""
    return lambda name: vocabulary if vocabulary and not name.startswith("layers") else kind


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert float(theirs.std()) > 0.5
        assert float((ours - theirs).abs().max()) < bound
        assert float((ours - theirs).square().mean().sqrt()) < bound / 5


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_agrees_with_the_dequantised_model(tmp_path: Path, team: Team, arch: str, kind: Kind) -> None:
    path = write_quantized(tmp_path / "m.gguf", arch, all_of(kind), tie_word_embeddings=arch == "qwen3")
    plain = Driver(path, attention="kernel", team=team)
    packed = Driver(path, attention="kernel", packed=True, team=team)
    assert all(m.packed for layer in packed.weights.layers for m in (layer.qkv, layer.gate_up, layer.down))
    expected = [plain.whole(row, ids) for row, ids in enumerate(PROMPTS)]
    assert_close([packed.whole(row, ids) for row, ids in enumerate(PROMPTS)], expected, ROUNDING)
    assert_close(packed.ragged(PROMPTS, sizes=(9, 1, 1, 4)), expected, ROUNDING)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("vocabulary", ["F32", "F16", "BF16", "Q6_K", "Q8_0"])
def test_the_vocabulary_may_have_another_type(
    tmp_path: Path, team: Team, kind: Kind, vocabulary: Kind
) -> None:
    path = write_quantized(tmp_path / "m.gguf", "llama", all_of(kind, vocabulary))
    plain = Driver(path, attention="kernel", team=team)
    packed = Driver(path, attention="kernel", packed=True, team=team)
    assert (packed.weights.head.packed is not None) == (vocabulary in ("Q6_K", "Q8_0"))
    assert_close([packed.whole(0, PROMPTS[1])], [plain.whole(0, PROMPTS[1])], ROUNDING)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_token_has_the_same_bits_alone_and_in_any_step(tmp_path: Path, team: Team, kind: Kind) -> None:
    path = write_quantized(tmp_path / "m.gguf", "qwen2", all_of(kind, "Q8_0"))
    driver = Driver(path, attention="kernel", packed=True, team=team)
    alone = [driver.whole(0, ids, chunk=1) for ids in PROMPTS]
    whole = [driver.whole(row, ids) for row, ids in enumerate(PROMPTS)]
    ragged = driver.ragged(PROMPTS, sizes=(9, 1, 1, 4))
    for got in (whole, ragged):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_steps_take_the_dense_copies(tmp_path: Path, team: Team, dtype: torch.dtype) -> None:
    path = write_quantized(tmp_path / "m.gguf", "qwen2", all_of("Q4_1", "Q8_0"))
    plain = Driver(path, attention="kernel", team=team)
    mixed = Driver(path, weights=dtype, attention="kernel", packed=True, team=team, max_packed_tokens=8)
    packed = Driver(path, attention="kernel", packed=True, team=team)
    expected = [plain.whole(row, ids) for row, ids in enumerate(PROMPTS)]
    bound = ROUNDING if dtype == torch.float32 else BFLOAT16
    assert_close([mixed.whole(row, ids) for row, ids in enumerate(PROMPTS)], expected, bound)
    assert_close(mixed.ragged(PROMPTS, sizes=(30, 1, 1, 3)), expected, bound)  # above and below the limit

    assert torch.equal(mixed.whole(0, PROMPTS[0][:8]), packed.whole(0, PROMPTS[0][:8]))
    if dtype == torch.bfloat16:
        assert not torch.equal(mixed.whole(0, PROMPTS[0][:9]), packed.whole(0, PROMPTS[0][:9]))


def stream_after(layer: int, model: Driver, ids: list[int]) -> torch.Tensor:
    """What a model that ends with `layer` returns, fp32 [M, hidden]; -1 has no layer at all."""
    weights = replace(model.weights, layers=model.weights.layers[: layer + 1])
    tables, num_tokens = torch.ones(1, 16, dtype=torch.int32).cumsum(1).int(), len(ids)
    norms = [(kept.q_norm, kept.k_norm) for kept in model.weights.layers]
    rope = rope_tables(model.config, num_tokens)
    attention = TorchAttention(model.config, 17, 16, tables, rope, norms, torch.float32)
    batch = Batch(torch.tensor(ids), torch.arange(num_tokens), np.array([[0, num_tokens, 0, 0]]))
    return Decoder(model.config, weights).forward(batch, attention)


@pytest.mark.parametrize("capture", [(0,), (-1, 1, 2), (0, 1)])
def test_captured_streams_are_those_of_shorter_models(
    tmp_path: Path, team: Team, capture: tuple[int, ...]
) -> None:
    path = write_quantized(tmp_path / "m.gguf", "qwen2", all_of("Q4_1", "Q8_0"))
    plain = Driver(path, attention=torch.float32, capture=capture)
    ids = PROMPTS[1]
    expected = torch.cat([stream_after(layer, plain, ids) for layer in capture], dim=1)
    plain.step((0, ids))
    assert plain.features is not None
    torch.testing.assert_close(plain.features, expected, rtol=1e-4, atol=1e-4)
    for limit in (None, 0):  # the kernels, the dense copies
        packed = Driver(
            path, attention="kernel", packed=True, team=team, max_packed_tokens=limit, capture=capture
        )
        for row, chunk in enumerate((len(ids), 7, 1)):
            features = []
            for begin in range(0, len(ids), chunk):
                packed.step((row, ids[begin : begin + chunk]))
                assert packed.features is not None
                features.append(packed.features)
            torch.testing.assert_close(torch.cat(features), expected, rtol=0.02, atol=0.02)


def test_nothing_is_captured_unless_asked_for(tmp_path: Path, team: Team) -> None:
    path = write_quantized(tmp_path / "m.gguf", "llama", all_of("Q8_0"))
    for packed in (False, True):
        driver = Driver(path, attention="kernel", packed=packed, team=team, max_packed_tokens=8)
        for size in (1, 9):
            driver.whole(0, PROMPTS[0][:size])
            assert driver.features is None


def test_capturing_changes_no_bit(tmp_path: Path, team: Team) -> None:
    path = write_quantized(tmp_path / "m.gguf", "qwen3", all_of("Q4_K", "Q8_0"))
    drivers = [Driver(path, attention="kernel", packed=True, team=team, capture=c) for c in ((), (-1, 0, 2))]
    one, other = (driver.whole(0, PROMPTS[1]) for driver in drivers)
    assert torch.equal(one, other)


def test_a_prepared_decoder_makes_no_program_while_it_runs(
    tmp_path: Path, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_quantized(tmp_path / "m.gguf", "llama", all_of("Q8_0"))
    prepared, other = (Driver(path, attention="kernel", packed=True, team=team) for _ in range(2))
    assert prepared.packed is not None
    prepared.packed.prepare(4)
    expected = [other.whole(0, PROMPTS[0][:8], chunk) for chunk in (1, 2, 3, 4)]
    made: list[int] = []

    def make(phases: list[Phase]) -> Program:
        made.append(len(phases))
        return Program(phases)

    monkeypatch.setattr(program, "Program", make)
    for chunk, logits in enumerate(expected, 1):
        assert torch.equal(prepared.whole(0, PROMPTS[0][:8], chunk), logits)
    assert not made
    prepared.whole(0, PROMPTS[0][:5])
    assert len(made) == 3  # embeddings, layers, logits


def test_what_was_lost_is_reported(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "m.gguf", "llama", all_of("Q4_0", "F32"))
    with open_checkpoint(path) as checkpoint:
        exact = load_weights(checkpoint, dtype=torch.float32, device="cpu", packed=False)
        rounded = load_weights(checkpoint, dtype=torch.bfloat16, device="cpu", packed=True)
    assert exact.losses == ()
    losses = {loss.kind: loss for loss in rounded.losses}
    assert losses.keys() == {"Q4_0", "F32"}
    assert losses["Q4_0"].num_tensors == 7 * 3
    assert losses["F32"].num_tensors == 2
    for loss in losses.values():
        assert loss.held_as == "bfloat16"
        assert 1e-4 < loss.rms_error < 2**-8


def test_what_keeps_a_model_from_being_packed(tmp_path: Path) -> None:
    def packs(arch: str = "llama", **kinds: Kind) -> bool:
        def kind_of(name: str) -> Kind:
            return next((kind for part, kind in kinds.items() if part in name), "Q8_0")

        with open_checkpoint(write_quantized(tmp_path / "m.gguf", arch, kind_of)) as checkpoint:
            return can_pack(checkpoint)

    assert packs()
    assert packs("qwen2", o_proj="Q4_0", down_proj="Q6_K")  # matrices may differ
    assert not packs(v_proj="Q6_K")  # but not those that are fused
    assert not packs(up_proj="Q4_0")
    assert not packs(o_proj="F16")
