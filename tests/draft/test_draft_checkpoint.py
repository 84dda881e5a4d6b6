"""Draft heads on disk: both formats as other programs write them, round trips, and every refusal."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_cases import FLAGS, ROPES, config, configs, head_of, random_draft, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from paceline.draft.checkpoint import FORMATS, Draft, Format, export_draft, open_draft, share_embedding
from paceline.draft.config import Eagle3Config
from paceline.draft.fields import Overrides
from paceline.draft.format_speculators import Verifier
from paceline.errors import CheckpointError, ModelError, ModelNotFoundError, UnsupportedModelError

# As SpecForge and speculators write them; `...` leaves a key out.
FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "draft_vocab_size": 12,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True},
}
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"name_or_path": "a/b", "architectures": ["X"]},
    },
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,  # the target's, and nobody's business here
    },
    "draft_vocab_size": 12,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "target_hidden_size": None,
    "tie_word_embeddings": False,
}
PLAIN = config()
TARGET = target_of(PLAIN)


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`; a dotted key reaches into an object."""
    result: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = result
        for name in path:
            place = place[name]
        place.pop(last, None)
        if value is not ...:
            place[last] = value
    return result


def shown(value: object) -> str:
    """A parameter in a test's name."""
    return "flat" if value is FLAT else "nested" if value is NESTED else str(value)


def write(folder: Path, base: dict[str, Any], tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(changed(base, changes)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def file_tensors(draft: Draft, layer: str = "midlayer.", prefix: str = "") -> dict[str, torch.Tensor]:
    """The draft's tensors as some program names them."""
    return {
        name if name in ("d2t", "t2d") else prefix + name.replace("midlayer.", layer): tensor.clone()
        for name, tensor in draft.tensors.items()
    }


def assert_same(found: Draft, expected: Draft) -> None:
    assert found.config == expected.config
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name


def expressible(config: Eagle3Config, fmt: Format) -> bool:
    """What `reference/eagle3.md` says of the formats, apart from the code."""
    if fmt == "sglang":
        options = ("norm_before_residual", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
        own_table = config.embedding == "own" and config.target_hidden_size == config.hidden_size
        width = len(config.capture_layer_ids) * config.target_hidden_size
        fits = -1 not in config.capture_layer_ids and width != config.hidden_size
        return fits and not own_table and not any(getattr(config, name) for name in options)
    if config.fc_bias or config.head == "target" or config.qkv_bias != config.o_bias:
        return False
    return not (config.mlp_bias and config.qk_norm)


def round_trip(draft: Draft, fmt: Format) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not expressible(draft.config, fmt):
            with pytest.raises(UnsupportedModelError, match=r"cannot be expressed|it skips fc"):
                export_draft(draft, Path(folder), fmt)
            assert not list(Path(folder).iterdir())
            return
        export_draft(draft, Path(folder), fmt)
        found = open_draft(folder, target_of(draft.config))
    assert_same(found, draft)
    token_ids = torch.arange(4)[None]
    features = torch.randn(1, 3, draft.config.feature_size, generator=torch.Generator().manual_seed(0))
    for before, after in zip(
        head_of(draft).forward_full(token_ids, features),
        head_of(found).forward_full(token_ids, features),
        strict=True,
    ):
        assert torch.equal(before, after)


@settings(max_examples=25, deadline=None)
@given(config=configs(), fmt=st.sampled_from(FORMATS))
def test_any_head_survives_a_round_trip_or_is_refused(config: Eagle3Config, fmt: Format) -> None:
    round_trip(random_draft(config), fmt)


OPTIONS: list[dict[str, Any]] = [
    {},
    *({name: True} for name in FLAGS),
    {"qkv_bias": True, "o_bias": True},
    *({"rope": rope} for rope in ROPES),
    {"embedding": "own"},
    {"embedding": "own", "target_hidden_size": 24},
    {"draft_vocab_size": 40},
    {"draft_vocab_size": 40, "head": "target"},
    {"draft_vocab_size": 40, "head": "embedding"},
    {"capture_layer_ids": (0, 11)},
    {"capture_layer_ids": (-1, 3)},
    {"capture_layer_ids": (4,)},
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_survives_a_round_trip_or_is_refused(options: dict[str, Any], fmt: Format) -> None:
    round_trip(random_draft(config(**options), dtype=torch.bfloat16), fmt)


@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_in_the_wild(tmp_path: Path, layer: str, prefix: str) -> None:
    draft = random_draft(PLAIN)
    tensors = file_tensors(draft, layer, prefix) | {f"{layer}self_attn.rotary_emb.inv_freq": torch.ones(3)}
    assert_same(open_draft(str(write(tmp_path, FLAT, tensors)), TARGET), draft)
    nested = file_tensors(draft, layer, prefix)
    assert_same(open_draft(str(write(tmp_path, NESTED, nested)), TARGET), draft)


def test_old_names_of_the_feature_norms(tmp_path: Path) -> None:
    draft = random_draft(config(fc_norm=True))
    tensors = file_tensors(draft)
    for i, part in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{part}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    assert_same(open_draft(str(write(tmp_path, FLAT, tensors, use_aux_norm=True)), TARGET), draft)


def test_speculators_embedding_is_kept_unless_it_is_the_targets(tmp_path: Path) -> None:
    draft = random_draft(config(embedding="own"), dtype=torch.bfloat16)
    found = open_draft(str(write(tmp_path, NESTED, file_tensors(draft, "layers.0."))), TARGET)
    assert_same(found, draft)
    table = draft.tensors["embed_tokens.weight"].float() * (1 + 2**-12)  # the same in bfloat16
    shared = share_embedding(found, table)
    assert shared.config == PLAIN
    assert "embed_tokens.weight" not in shared.tensors
    assert share_embedding(found, table + 0.1) is found
    export_draft(shared, tmp_path / "out", "sglang")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight differs from the target's"):
        export_draft(found, tmp_path / "out2", "sglang")


def test_engine_specific_fields(tmp_path: Path) -> None:
    draft = random_draft(config(input_norm=True, norm_output=True), dtype=torch.bfloat16)
    export_draft(draft, tmp_path / "flat", "sglang")
    flat = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert flat["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
    }
    assert (flat["norm_output"], flat["dtype"]) == (True, "bfloat16")
    assert "target_hidden_size" not in flat
    assert set(load_file(tmp_path / "flat" / "model.safetensors")) == set(file_tensors(draft))

    export_draft(draft, tmp_path / "nested", "speculators", verifier=Verifier("a/b", ("LlamaForCausalLM",)))
    nested = json.loads((tmp_path / "nested" / "config.json").read_text())
    assert nested["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert nested["speculators_config"]["verifier"] == {
        "name_or_path": "a/b",
        "architectures": ["LlamaForCausalLM"],
    }
    assert "model_type" not in nested
    assert set(load_file(tmp_path / "nested" / "model.safetensors")) == set(file_tensors(draft, "layers.0."))

    whole = random_draft(config(draft_vocab_size=40))
    export_draft(whole, tmp_path / "whole", "speculators")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "whole" / "model.safetensors"))


@pytest.mark.parametrize(
    ("base", "changes", "overrides", "expected"),
    [
        (FLAT, {"eagle_config": ...}, {}, {"capture_layer_ids": (1, 5, 8)}),
        (NESTED, {"eagle_aux_hidden_state_layer_ids": None}, {}, {"capture_layer_ids": (1, 5, 8)}),
        (NESTED, {}, {"layer_id_offset": 0}, {"capture_layer_ids": (2, 6, 9)}),
        (FLAT, {}, {"layer_id_offset": -1}, {"capture_layer_ids": (0, 4, 7)}),
        (FLAT, {"norm_output": True}, {}, {"norm_output": True}),
        (FLAT, {"norm_output": True}, {"norm_output": False}, {"norm_output": False}),
        (NESTED, {"norm_output": True}, {}, {"norm_output": True}),
        (NESTED, {"norm_output": True}, {"norm_output": False}, {"norm_output": False}),
        (NESTED, {"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        (FLAT, {"norm_before_residual": True}, {}, {"norm_before_residual": True}),
        (FLAT, {"norm_before_fc": True}, {}, {"input_norm": True}),
        (FLAT, {"eagle_config.norm_before_fc": True}, {}, {"input_norm": True}),
        (FLAT, {"fc_norm": True}, {}, {"fc_norm": True}),
        (FLAT, {"bias": True}, {}, {"fc_bias": True}),
        (FLAT, {"attention_bias": True}, {}, {"qkv_bias": True, "o_bias": True}),
        (FLAT, {"qkv_bias": True}, {}, {"qkv_bias": True}),
        (FLAT, {"model_type": "qwen3"}, {}, {"qk_norm": True}),
        (NESTED, {"transformer_layer_config.model_type": "qwen3"}, {}, {"qk_norm": True}),
        (NESTED, {"transformer_layer_config.mlp_bias": True}, {}, {"mlp_bias": True}),
        (FLAT, {"draft_vocab_size": None}, {}, {"draft_vocab_size": 40, "head": "target"}),
        (
            FLAT,
            {"draft_vocab_size": None, "tie_word_embeddings": True},
            {},
            {"draft_vocab_size": 40, "head": "embedding"},
        ),
        (
            FLAT,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 50000.0},
            {},
            {"rope": ROPES[1]},
        ),
        (
            FLAT,
            {
                "rope_theta": ...,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
            },
            {},
            {"rope": ROPES[1]},
        ),
    ],
    ids=shown,
)
def test_options_as_the_formats_say_them(
    tmp_path: Path,
    base: dict[str, Any],
    changes: dict[str, Any],
    overrides: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    draft = random_draft(config(**expected))
    folder = write(tmp_path, base, file_tensors(draft), **changes)
    assert_same(open_draft(str(folder), TARGET, overrides=Overrides(**overrides)), draft)


IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("base", "changes", "error", "words"),
    [
        (FLAT, {"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers 2 is not supported"),
        (FLAT, {"num_hidden_layers": ...}, ModelError, "num_hidden_layers is missing"),
        (NESTED, {f"{LAYER}.num_hidden_layers": 3}, UnsupportedModelError, "num_hidden_layers 3"),
        (
            FLAT,
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedModelError,
            "names LlamaForCausalLM; supp",
        ),
        (FLAT, {"architectures": ...}, UnsupportedModelError, "names nothing"),
        (NESTED, {"speculators_model_type": "eagle"}, UnsupportedModelError, "'eagle' is not supported"),
        (NESTED, {LAYER: ...}, ModelError, f"{LAYER} must be an object"),
        (FLAT, {"model_type": "llama4_text"}, UnsupportedModelError, "model_type 'llama4_text'"),
        (NESTED, {f"{LAYER}.model_type": ...}, UnsupportedModelError, "model_type None"),
        (FLAT, {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act 'gelu'"),
        (
            FLAT,
            {"quantization_config": {"quant_method": "fp8"}},
            UnsupportedModelError,
            "quantization_config",
        ),
        (FLAT, {"use_sliding_window": True}, UnsupportedModelError, "sliding_attention"),
        (NESTED, {f"{LAYER}.layer_types": ["sliding_attention"]}, UnsupportedModelError, "sliding_attention"),
        (FLAT, {"rope_scaling": {"type": "longrope"}}, UnsupportedModelError, "rope_type 'longrope'"),
        (
            FLAT,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            ModelError,
            "rope_parameters and rope_scaling contradict",
        ),
        (FLAT, {"hidden_size": ...}, ModelError, "hidden_size is missing"),
        (FLAT, {"hidden_size": 0}, ModelError, "hidden_size must be"),
        (FLAT, {"num_key_value_heads": 3}, ModelError, "not a multiple of num_kv_heads"),
        (FLAT, {"target_hidden_size": 24}, ModelError, "24 columns and cannot be shared with hidden_size 16"),
        (FLAT, {"vocab_size": 50}, ModelError, "vocab_size is 50, the target's 40"),
        (FLAT, {"hidden_size": 18}, ModelError, "target_hidden_size is 18, the target's hidden_size 16"),
        (FLAT, {f"eagle_config.{IDS}": [1, 5, 12]}, ModelError, "after layer 12"),
        (NESTED, {IDS: [1, 5, 13]}, ModelError, "after layer 12"),
        (FLAT, {f"eagle_config.{IDS}": [5, 1, 8]}, UnsupportedModelError, "must increase"),
        (FLAT, {f"eagle_config.{IDS}": [1, 1, 8]}, UnsupportedModelError, "must increase"),
        (FLAT, {f"eagle_config.{IDS}": []}, ModelError, "must name layers"),
        (NESTED, {IDS: [-1, 5, 8]}, ModelError, "must name layers from -1 on"),
        (FLAT, {f"eagle_config.{IDS}": [1.0]}, ModelError, "must be a list of whole numbers"),
        (FLAT, {IDS: [1, 5, 8]}, ModelError, "belongs in eagle_config"),
        (FLAT, {"num_aux_hidden_states": 2}, ModelError, "num_aux_hidden_states is 2"),
        (FLAT, {f"eagle_config.{IDS}": [3]}, UnsupportedModelError, "it skips fc"),
        (FLAT, {"eagle_config.use_aux_hidden_state": False}, UnsupportedModelError, "use_aux_hidden_state"),
        (
            FLAT,
            {"eagle_config.use_last_layernorm": True},
            UnsupportedModelError,
            "eagle_config.use_last_layern",
        ),
        (FLAT, {"eagle_config": [1]}, ModelError, "eagle_config must be an object"),
        (FLAT, {"norm_before_fc": False, "eagle_config.norm_before_fc": True}, ModelError, "contradict"),
        (NESTED, {"norm_before_residual": ...}, ModelError, "norm_before_residual is missing"),
        (NESTED, {"fc_norm": "yes"}, ModelError, "fc_norm must be true or false, got 'yes'"),
        (FLAT, {"draft_vocab_size": ...}, ModelError, "draft_vocab_size is missing"),
        (FLAT, {"draft_vocab_size": 41}, ModelError, "draft_vocab_size 41 exceeds vocab_size 40"),
        (FLAT, {"tie_word_embeddings": True}, ModelError, "head taken from the embedding has 40 rows"),
        (FLAT, {"draft_vocab_size": None}, CheckpointError, "tensor lm_head.weight is not part of the head"),
        (FLAT, {"draft_vocab_size": 13}, CheckpointError, r"lm_head.weight has shape \(12, 16\)"),
        (FLAT, {"fc_norm": True}, CheckpointError, r"fc_norm.0.weight is missing \(and 2 more\)"),
        (FLAT, {"intermediate_size": 25}, CheckpointError, "midlayer.mlp.gate_proj.weight has shape"),
    ],
    ids=shown,
)
def test_configurations_that_are_refused(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], error: type[ModelError], words: str
) -> None:
    folder = write(tmp_path, base, file_tensors(random_draft(PLAIN)), **changes)
    with pytest.raises(error, match=words) as caught:
        open_draft(str(folder), TARGET)
    assert type(caught.value) is error
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_small_target_has_no_default_layers(tmp_path: Path) -> None:
    folder = write(tmp_path, FLAT, file_tensors(random_draft(PLAIN)), eagle_config=...)
    with pytest.raises(ModelError, match="has no default for a target of 6 layers"):
        open_draft(str(folder), target_of(PLAIN, num_layers=6))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"fc.weight": None}, CheckpointError, "tensor fc.weight is missing$"),
        ({"d2t": None}, CheckpointError, "d2t is missing"),
        ({"mask_hidden": torch.ones(1)}, CheckpointError, "tensor mask_hidden is not part"),
        (
            {"layers.1.mlp.up_proj.weight": torch.ones(1)},
            CheckpointError,
            "tensor layers.1.mlp.up_proj.weight is n",
        ),
        ({"layers.0.mlp.up_proj.weight": torch.ones(1)}, CheckpointError, "are two names of one$"),
        (
            {"model.norm.weight": torch.ones(9), "norm.weight": None},
            CheckpointError,
            r"model.norm.weight has shape \(9,",
        ),
        ({"norm.weight": torch.ones(16).double()}, UnsupportedModelError, "norm.weight has type float64"),
        (
            {"fc.weight": torch.ones(16, 48).to(torch.float8_e4m3fn)},
            UnsupportedModelError,
            "type float8_e4m3fn",
        ),
        ({"t2d": torch.ones(40).bool()}, CheckpointError, "d2t and t2d disagree"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], error: type[ModelError], words: str
) -> None:
    tensors = {n: t for n, t in (file_tensors(random_draft(PLAIN)) | changes).items() if t is not None}
    with pytest.raises(error, match=words) as caught:
        open_draft(str(write(tmp_path, FLAT, tensors)), TARGET)
    assert type(caught.value) is error
    assert str(caught.value).startswith(str(tmp_path))


def test_shards(tmp_path: Path) -> None:
    draft = random_draft(PLAIN)
    tensors = file_tensors(draft)
    write(tmp_path, FLAT, tensors)
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(open_draft(str(tmp_path), TARGET), draft)

    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"model-1.safetensors: tensor {names[0]} is not where"):
        open_draft(str(tmp_path), TARGET)
    index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "model-2.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"tensor ghost is missing, model\.safetensors\.index\.json lists it"
    ):
        open_draft(str(tmp_path), TARGET)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: missing"):
        open_draft(str(tmp_path), TARGET)


def test_pickles_are_read_as_tensors_only(tmp_path: Path) -> None:
    draft = random_draft(PLAIN, dtype=torch.float16)
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    path = tmp_path / "pytorch_model.bin"
    torch.save(file_tensors(draft), path)
    assert_same(open_draft(str(tmp_path), TARGET), draft)
    whole = path.read_bytes()
    for saved, words in [
        ({"fc.weight": Path("/")}, "damaged, or holds more than tensors"),
        ({"fc.weight": torch.ones(1), "epoch": 3}, "'epoch' is int, only tensors are read"),
        ([torch.ones(1)], "must hold tensors by name, got list"),
    ]:
        torch.save(saved, path)
        with pytest.raises(CheckpointError, match=words):
            open_draft(str(tmp_path), TARGET)
    for damaged in (whole[: len(whole) // 2], b"", b"not a pickle"):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: (damaged|truncated)") as caught:
            open_draft(str(tmp_path), TARGET)
        assert "\n" not in str(caught.value)


def test_damaged_and_absent_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", FLAT, file_tensors(random_draft(PLAIN)))
    weights = folder / "model.safetensors"
    for damaged in (weights.read_bytes()[:-10], b"", b"\xff" * 64):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or not a safetensors file"):
            open_draft(str(folder), TARGET)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        open_draft(str(folder), TARGET)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json there"):
        open_draft(str(folder), TARGET)
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        open_draft(str(tmp_path / "nothing"), TARGET)


def test_export_does_not_replace_a_checkpoint_unasked(tmp_path: Path) -> None:
    draft = random_draft(PLAIN)
    export_draft(draft, tmp_path / "head", "sglang")
    with pytest.raises(ModelError, match=r"head: holds a checkpoint already \(config\.json\)"):
        export_draft(draft, tmp_path / "head", "speculators")
    export_draft(draft, tmp_path / "head", "speculators", overwrite=True)
    assert_same(open_draft(str(tmp_path / "head"), TARGET), draft)
    assert sorted(p.name for p in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file: cannot be written: File exists"):
        export_draft(draft, tmp_path / "file")


def test_rope_from_a_gguf_cannot_be_written(tmp_path: Path) -> None:
    rope = type(ROPES[0])(type="factors", factors=(1.0, 2.0, 3.0))
    for fmt in FORMATS:
        with pytest.raises(UnsupportedModelError, match="rope type 'factors' cannot be written"):
            export_draft(random_draft(config(rope=rope)), tmp_path, fmt)
