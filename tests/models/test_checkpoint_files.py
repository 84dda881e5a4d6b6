"""Opening checkpoints: every tensor as it was written, every defect by its name."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import HF_CONFIG, hf_config, llama_cpp_permute, random_weights, write_folder, write_gguf

from paceline.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError
from paceline.gguf_header import read_gguf_header
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import config_from_hf
from paceline.models.tensors import KINDS, RawTensor, TensorFile

# --- safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_read(tmp_path: Path, name: str, tied: bool) -> None:
    sizes = {k: v for k, v in HF_CONFIG.items() if k not in ("architectures", "model_type", "rope_theta")}
    config = getattr(transformers, f"{name}Config")(
        **sizes, tie_word_embeddings=tied, **({"sliding_window": None} if name == "Mistral" else {})
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.tie_word_embeddings is tied
        assert checkpoint.config.eos_token_ids == (2,)
        for full_name, weights in model.state_dict().items():
            if tied and full_name == "lm_head.weight":
                continue
            tensor = checkpoint.tensors[full_name.removeprefix("model.")]
            assert torch.equal(tensor.dequantize(), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_files", [1, 3])
def test_types_and_shards(tmp_path: Path, dtype: torch.dtype, num_files: int) -> None:
    weights = random_weights(config_from_hf(HF_CONFIG), dtype)
    write_folder(tmp_path, weights, num_files)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint.tensors) == len(weights)
        for name, expected in weights.items():
            tensor = checkpoint.tensors[name.removeprefix("model.")]
            assert tensor.shape == tuple(expected.shape)
            assert torch.equal(tensor.dequantize(), expected.to(torch.float32))


def test_closing_is_final_and_leaves_no_file_open(tmp_path: Path) -> None:
    write_folder(tmp_path, num_files=2)
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = open_checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="closed file"):
        checkpoint.tensors["norm.weight"].dequantize()


def test_a_failed_opening_leaves_no_file_open(tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "hf")
    del weights["model.norm.weight"]
    write_folder(tmp_path / "hf", weights)
    write_gguf(tmp_path / "model.gguf", drop=("output_norm.weight",))
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "hf", tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
            open_checkpoint(path)
    assert len(os.listdir("/proc/self/fd")) == before


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def _with(
    name: str, *shape: int, dtype: torch.dtype = torch.float32
) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.__setitem__(name, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_without("lm_head.weight"), CheckpointError, ["lm_head.weight is missing"]),
        (
            _without("model.layers.1.mlp.up_proj.weight"),
            CheckpointError,
            ["layers.1.mlp.up_proj.weight is missing"],
        ),
        (_with("model.layers.2.mlp.up_proj.weight", 96, 64), CheckpointError, ["layers.2.mlp", "not part"]),
        (_with("model.layers.0.self_attn.q_proj.bias", 64), CheckpointError, ["q_proj.bias is not part"]),
        (_with("model.norm.weight", 65), CheckpointError, ["norm.weight", "(65,)", "(64,)"]),
        (
            _with("model.norm.weight", 64, dtype=torch.int8),
            UnsupportedModelError,
            ["model.norm.weight", "I8"],
        ),
    ],
)
def test_the_set_of_tensors(
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    error: type[Exception],
    words: list[str],
) -> None:
    weights = write_folder(tmp_path)
    change(weights)
    write_folder(tmp_path, weights)
    with pytest.raises(error) as caught:
        open_checkpoint(tmp_path)
    assert all(word in str(caught.value) for word in [*words, str(tmp_path)])


def test_saved_rope_buffers_are_harmless(tmp_path: Path) -> None:
    weights = write_folder(tmp_path)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    write_folder(tmp_path, weights)
    with open_checkpoint(tmp_path) as checkpoint:
        assert not any("rotary" in name for name in checkpoint.tensors)


def test_a_tied_model_that_stores_its_head(tmp_path: Path) -> None:
    weights = write_folder(tmp_path, tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    write_folder(tmp_path, weights, tie_word_embeddings=True)
    with open_checkpoint(tmp_path) as checkpoint:
        assert "lm_head.weight" not in checkpoint.tensors
    weights["lm_head.weight"][0, 0] += 1
    write_folder(tmp_path, weights, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        open_checkpoint(tmp_path)


def test_truncated_safetensors_says_how_much_is_missing(tmp_path: Path) -> None:
    write_folder(tmp_path, num_files=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 100)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated: .* 100 of {size} are missing"):
        open_checkpoint(tmp_path)
    os.truncate(shard, 20)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated in its header"):
        open_checkpoint(tmp_path)
    os.truncate(shard, 3)
    with pytest.raises(CheckpointError, match="3 bytes are too few"):
        open_checkpoint(tmp_path)


def test_missing_shard_and_bad_index(tmp_path: Path) -> None:
    write_folder(tmp_path, num_files=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"{shard.name}: missing.*1 of 3"):
        open_checkpoint(tmp_path)
    (tmp_path / "elsewhere").rename(shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}}))
    with pytest.raises(CheckpointError, match="not the name of a file in this folder"):
        open_checkpoint(tmp_path)
    for text in ("{", "[" * 100_000):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="not valid JSON"):
            open_checkpoint(tmp_path)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"3 safetensors files but no model\.safetensors\.index"):
        open_checkpoint(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin: pickled weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2**63).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_checkpoint(tmp_path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="tensor a has 4 bytes"):
        open_checkpoint(tmp_path)


def test_config_errors_name_the_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(hidden_act="relu")))
    with pytest.raises(UnsupportedModelError, match=rf"{tmp_path.name}.*hidden_act 'relu'"):
        open_checkpoint(tmp_path)


def test_eos_ids_from_every_file(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    entry = {"content": "<end>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": entry, "added_tokens_decoder": {"9": entry}})
    )
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config.eos_token_ids == (7, 5, 9)


# --- GGUF ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_gguf_blocks_and_weights(tmp_path: Path, kind: str, arch: str) -> None:
    """Blocks come back bit for bit in HF's row order; weights as the `gguf` package decodes them."""
    path = tmp_path / "model.gguf"
    written = write_gguf(path, kind, arch, hidden=256 if kind.endswith("K") else 64)
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint.tensors) == set(written)
        for name, rows in written.items():
            tensor = checkpoint.tensors[name]
            assert np.array_equal(tensor.blocks(), rows), name
            assert tensor.num_bytes == rows.nbytes
            expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind]).reshape(tensor.shape)
            weights = tensor.dequantize()
            assert weights.dtype == torch.float32
            assert np.array_equal(weights.numpy(), expected, equal_nan=True), name


def test_quantised_values_are_close_to_what_was_quantised(tmp_path: Path) -> None:
    """The whole way for the kinds that the package can write: values in, values out."""
    values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    for kind, bound in {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.25, "BF16": 0.02}.items():
        path = tmp_path / f"{kind}.gguf"
        write_one_tensor(path, kind, values)
        info = read_gguf_header(path).tensors[0]
        assert info.shape == values.shape
        with TensorFile(path) as file:
            tensor = RawTensor("embed", info.shape, kind, file, info.offset)  # type: ignore[arg-type]
            assert 0 < np.abs(tensor.dequantize().numpy() - values).max() < bound


def write_one_tensor(path: Path, kind: str, values: np.ndarray) -> None:
    """A GGUF file with nothing in it but a quantised token_embd.weight."""
    kind_id = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", gguf.quantize(values, kind_id), raw_dtype=kind_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_biases_are_put_back_with_their_rows(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)
    extra = {f"blk.{i}.attn_q.bias": llama_cpp_permute(bias, 4) for i in range(2)}
    extra |= {f"blk.{i}.attn_{n}.bias": np.zeros(32, np.float32) for i in range(2) for n in "kv"}
    write_gguf(tmp_path / "model.gguf", extra=extra)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.config.qkv_bias
        assert not checkpoint.config.o_bias
        assert np.array_equal(checkpoint.tensors["layers.1.self_attn.q_proj.bias"].dequantize().numpy(), bias)


def test_gguf_untied_head_and_rope_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", tied=False, extra={"rope_freqs.weight": factors})
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert "lm_head.weight" in checkpoint.tensors
        assert checkpoint.config.rope.type == "factors"
        assert checkpoint.config.rope.factors == tuple(factors.tolist())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"drop": ("blk.1.ffn_up.weight",)}, CheckpointError, "layers.1.mlp.up_proj.weight is missing"),
        (
            {"extra": {"blk.0.odd.weight": np.zeros(4, np.float32)}},
            CheckpointError,
            "blk.0.odd.weight is not part",
        ),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, ModelError, "3 values, 8 are needed"),
        (
            {"drop": ("output_norm.weight",), "extra": {"output_norm.weight": np.zeros(65, np.float32)}},
            CheckpointError,
            "norm.weight has shape (65,), the model needs (64,)",
        ),
        ({"extra": {"odd": np.zeros(4, np.int8)}}, UnsupportedModelError, "tensor odd has type I8"),
        ({"metadata": {"llama.context_length": None}}, ModelError, "llama.context_length is missing"),
        ({"metadata": {"split.count": 2}}, UnsupportedModelError, "one of 2 parts"),
    ],
)
def test_gguf_defects_are_named(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, **options)
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_gguf_unsupported_block_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_one_tensor(path, "Q5_0", np.zeros((2, 32), np.float32))
    with pytest.raises(UnsupportedModelError, match=r"tensor token_embd\.weight has type Q5_0"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "Q8_0", metadata={"tokenizer.ggml.tokens": ["a", "b"], "odd.numbers": [1, 2, 3]})
    return path, path.read_bytes()


def test_gguf_with_its_tail_cut_says_how_much_is_missing(
    whole_gguf: tuple[Path, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_gguf[1])
    with open_checkpoint(path) as checkpoint:
        end = max(t.offset + t.num_bytes for t in checkpoint.tensors.values())
    os.truncate(path, end - 7)
    with pytest.raises(CheckpointError, match=f"truncated: .* 7 of {end} are missing"):
        open_checkpoint(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_or_flipped_header_byte_is_a_model_error(
    whole_gguf: tuple[Path, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    """Damage never shows as anything but a ModelError (or, for a flipped byte, an intact model)."""
    whole = bytearray(whole_gguf[1])
    path = tmp_path / "damaged.gguf"
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, 20_000))])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
    else:
        at = data.draw(st.integers(0, 2_000))
        whole[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(whole)
        with contextlib.suppress(ModelError):
            open_checkpoint(path).close()


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes are too few"):
        open_checkpoint(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(UnsupportedModelError, match="GGUF version 9"):
        open_checkpoint(path)
