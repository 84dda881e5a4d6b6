"""The measured threshold and the file that remembers it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from decoder_driver import Driver
from tiny_checkpoints import write_quantized

from paceline.kernels.parallel import Team
from paceline.models.tensors import Kind
from paceline.models.weights import Layer
from paceline.worker.tuning import max_packed_tokens


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(1)


def layer(folder: Path, kind: Kind, team: Team) -> Layer:
    path = write_quantized(folder / f"{kind}.gguf", "llama", lambda name: kind)
    return Driver(path, weights=torch.bfloat16, attention="kernel", packed=True, team=team).weights.layers[0]


def test_measures_once_and_remembers(tmp_path: Path, team: Team) -> None:
    file, matrices = tmp_path / "new" / "folder" / "t.json", layer(tmp_path, "Q8_0", team)
    measured = max_packed_tokens(matrices, team, file)
    assert 16 <= measured <= 256
    ((key, value),) = json.loads(file.read_text()).items()
    assert value == measured

    file.write_text(json.dumps({key: 1234, "another machine": 5}))
    assert max_packed_tokens(matrices, team, file) == 1234
    assert [p.name for p in file.parent.iterdir()] == ["t.json"]


def test_formats_shapes_and_threads_are_told_apart(tmp_path: Path, team: Team) -> None:
    file = tmp_path / "t.json"
    for kind in ("Q8_0", "Q6_K", "Q4_0", "Q4_K"):
        max_packed_tokens(layer(tmp_path, kind, team), team, file)
    two = Team(2)
    max_packed_tokens(layer(tmp_path, "Q8_0", two), two, file)
    two.close()
    assert len(json.loads(file.read_text())) == 5


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b'{"a": "b", "c": 3}', b"null"])
def test_a_damaged_file_costs_the_measurement_alone(tmp_path: Path, team: Team, content: bytes) -> None:
    file = tmp_path / "t.json"
    file.write_bytes(content)
    measured = max_packed_tokens(layer(tmp_path, "Q4_0", team), team, file)
    assert measured in json.loads(file.read_text()).values()


def test_where_nothing_can_be_written_it_says_so_and_goes_on(
    tmp_path: Path, team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "t.json"  # a folder of this name cannot be made, not even by root
    with caplog.at_level(logging.WARNING):
        assert max_packed_tokens(layer(tmp_path, "Q4_0", team), team, file) >= 8
    (warning,) = caplog.records
    assert str(file) in warning.getMessage()
