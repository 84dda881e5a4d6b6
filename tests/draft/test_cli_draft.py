"""`paceline draft export`, from its arguments to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from draft_cases import VOCAB, config, random_draft, target_of
from safetensors.torch import save_file

from paceline import cli_draft
from paceline.cli_flags import Parser
from paceline.draft.checkpoint import FORMATS, export_draft, open_draft
from paceline.errors import ConfigError, ModelError, UnsupportedModelError
from paceline.models.schema import expected_shapes

TARGET = target_of(config())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A whole tiny model; the head's own embedding is a copy of its embedding."""
    folder = tmp_path / "target"
    folder.mkdir()
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": TARGET.hidden_size,
        "intermediate_size": TARGET.intermediate_size,
        "num_hidden_layers": TARGET.num_layers,
        "num_attention_heads": TARGET.num_heads,
        "num_key_value_heads": TARGET.num_kv_heads,
        "head_dim": TARGET.head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    weights = {name: torch.ones(shape) for name, shape in expected_shapes(TARGET).items()}
    weights["embed_tokens.weight"] = random_draft(config(embedding="own")).tensors["embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder


def paceline(*args: object) -> None:
    parser = Parser()
    cli_draft.add_draft_command(parser.add_subparsers(required=True))
    parsed = parser.parse_args([str(a) for a in args])
    parsed.run(parsed)


def test_there_and_back(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs, back = tmp_path / "ours", tmp_path / "theirs", tmp_path / "back"
    draft = random_draft(config(norm_output=True))
    export_draft(draft, ours, "sglang")
    paceline("draft", "export", ours, theirs, "--format", "speculators", "--target", target)
    assert (
        capsys.readouterr().out
        == f"{theirs}: speculators format, features after layers 1, 5, 8 (from 0), 12 draft tokens\n"
    )
    written = json.loads((theirs / "config.json").read_text())
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    paceline("draft", "export", theirs, back, "--format", "sglang", "--target", target)
    found = open_draft(str(back), TARGET)
    assert found.config == draft.config
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in draft.tensors.items())


def test_a_copy_of_the_targets_embedding_is_left_out_for_sglang(tmp_path: Path, target: Path) -> None:
    export_draft(random_draft(config(embedding="own")), tmp_path / "head", "speculators")
    paceline("draft", "export", tmp_path / "head", tmp_path / "out", "--format", "sglang", "--target", target)
    assert open_draft(str(tmp_path / "out"), TARGET).config == config()
    export_draft(random_draft(config(embedding="own"), seed=5), tmp_path / "other", "speculators")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight differs from the target's"):
        paceline(
            "draft", "export", tmp_path / "other", tmp_path / "no", "--format", "sglang", "--target", target
        )


def test_what_the_user_knows_better(tmp_path: Path, target: Path) -> None:
    export_draft(random_draft(config()), tmp_path / "head", "speculators")
    flags = ("--format", "sglang", "--target", target, "--layer-id-offset", 0, "--norm-output")
    paceline("draft", "export", tmp_path / "head", tmp_path / "out", *flags)
    assert open_draft(str(tmp_path / "out"), TARGET).config == config(
        capture_layer_ids=(2, 6, 9), norm_output=True
    )


def test_errors(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_draft(random_draft(config()), tmp_path / "head", "sglang")
    flags = ("--format", "sglang", "--target", target)
    with pytest.raises(ModelError, match="head: holds a checkpoint already"):
        paceline("draft", "export", tmp_path / "head", tmp_path / "head", *flags)
    with pytest.raises(ConfigError, match="OUT must be a folder"):
        paceline("draft", "export", tmp_path / "head", target / "config.json", *flags)
    with pytest.raises(ModelError, match="nothing"):
        paceline("draft", "export", tmp_path / "nothing", tmp_path / "out", *flags)
    with pytest.raises(SystemExit):
        paceline("draft", "export", "a", "b", "--format", "gguf", "--target", "c")
    assert "invalid choice: 'gguf'" in capsys.readouterr().err


def test_the_formats_offered_are_those_there_are() -> None:
    assert cli_draft._FORMATS == FORMATS
