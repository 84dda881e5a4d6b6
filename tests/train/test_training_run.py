"""`paceline train eagle3` from end to end, on a tiny target on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_folder

from paceline.cli import main
from paceline.draft.checkpoint import open_draft
from paceline.errors import ConfigError
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import ModelConfig
from paceline.models.weights import Weights
from paceline.train.generate import Lockstep
from paceline.train.head import HeadShape, TrainableHead
from paceline.train.loop import Trainer, TrainPlan
from paceline.train.run import Recipe
from paceline.train.scripts import Script, Segment, Turn
from paceline.train.target import Target, default_capture_layers

SIZES = [
    "--minutes", "0.05", "--draft-vocab-size", "256", "--num-rows", "4", "--short-len", "80",
    "--long-len", "120", "--batch-tokens", "512",
]  # fmt: skip


def test_command_trains_and_continues(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "Hello there"}\n{"turns": ["And now?", "ignored"]}\n')
    command = ["train", "eagle3", "--target", str(target_folder), "--out", str(tmp_path / "run"), *SIZES]
    assert main([*command, "--max-updates", "2", "--prompts", str(own)]) == 0
    shown = capsys.readouterr().out
    assert "update 2" in shown
    assert "held out: " in shown
    with open_checkpoint(target_folder) as target:
        draft = open_draft(str(tmp_path / "run" / "head"), target.config)
    assert draft.config.draft_vocab_size == 256
    assert draft.tensors["fc.weight"].dtype == torch.bfloat16

    assert main([*command, "--max-updates", "3"]) == 0
    assert "update 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "minutes must be above 0"),
        (["--short-len", "8"], "short_len must be at least 64"),
        (["--prompts", "/nonexistent.jsonl"], "--prompts /nonexistent.jsonl"),
    ],
)
def test_wrong_arguments_are_one_line(
    target_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    command = ["train", "eagle3", "--target", str(target_folder), "--out", str(tmp_path), *arguments]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_prompt_file_names_its_wrong_line(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "fine"}\n{"text": "no"}\n')
    command = [
        "train",
        "eagle3",
        "--target",
        str(target_folder),
        "--out",
        str(tmp_path),
        "--prompts",
        str(own),
    ]
    assert main(command) == 1
    assert "line 2" in capsys.readouterr().err


def test_targets_that_cannot_be_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "small", num_hidden_layers=3)
    assert (
        main(["train", "eagle3", "--target", str(tmp_path / "small"), "--out", str(tmp_path / "o"), *SIZES])
        == 1
    )
    assert "3 layers" in capsys.readouterr().err


def test_recipe_limits() -> None:
    with pytest.raises(ConfigError, match="batch_tokens"):
        Recipe(batch_tokens=0)


def test_a_head_learns(target_model: tuple[ModelConfig, Weights], tmp_path: Path) -> None:
    """On greedy answers of a random target, acceptance rises to many times that of chance."""
    config, weights = target_model
    scripts = [Script("k", (Segment((4, 5 + i, 9), Turn.ANSWER),)) for i in range(24)]
    lockstep = Lockstep(config, weights, [3], 24, 96, "cpu")
    made = lockstep.run(scripts, [0.0] * 24, seed=0, max_turn_tokens=90)
    target = Target(config, weights, default_capture_layers(config.num_layers), "cpu")
    torch.manual_seed(0)
    shape = HeadShape(draft_vocab_size=config.vocab_size, intermediate_size=128)
    head = TrainableHead(config, shape, torch.arange(config.vocab_size))
    trainer = Trainer(head, target, made, made, tmp_path)
    plan = TrainPlan(seconds=600, batch_tokens=1024, max_updates=60, report_seconds=1e9, learning_rate=3e-3)
    (last,) = trainer.run(plan)
    assert last.updates == 60
    chance = 1 / config.vocab_size
    assert last.held_out["k"].conditional[0] > 10 * chance
    assert last.accuracy[0] > 10 * chance
