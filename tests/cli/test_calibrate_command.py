"""`paceline calibrate` on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_checkpoints import write_quantized

from paceline.cli import main
from paceline.cli_calibrate import best_depth
from paceline.policy import CostModel, Curve


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quantized(tmp_path_factory.mktemp("model") / "m.gguf", "qwen2", lambda name: "Q8_0")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))


FLAGS = ["--draft", "ngram", "--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "16"]


def test_measures_shows_and_measures_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*more: str) -> str:
        assert main(["calibrate", str(model), *FLAGS, *more]) == 0
        return capsys.readouterr().out

    first = json.loads(run("--json"))
    assert first["seconds"] > 0
    assert Path(first["path"]).is_file()
    costs = CostModel.from_dict(first["costs"])
    assert {(entry["acceptance"], entry["num_requests"]) for entry in first["best_depth"]} >= {
        (0.5, 1),
        (0.9, 4),
    }
    assert {entry["depth"] for entry in first["best_depth"]} <= set(range(7))

    second = json.loads(run("--json"))
    assert second == first | {"seconds": None}

    text = run()
    assert "known from before" in text
    assert f"spread of repeated timings of a step: {100 * first['spread']:.0f} %" in text
    assert str(first["path"]) in text
    tokens, ms = re.search(r"tokens (.*)\n +ms (.*)\n", text).groups()  # type: ignore[union-attr]
    shown = dict(zip(map(int, tokens.split()), map(float, ms.split()), strict=True))
    assert set(shown) >= {1, 2, 4, 8, 16}
    assert shown[4] == pytest.approx(1e3 * costs.tokens(4), abs=0.051)

    assert "measured in" in run("--force")

    content = json.loads(Path(first["path"]).read_text())
    del content["spread"]
    Path(first["path"]).write_text(json.dumps(content))
    assert "spread of repeated timings of a step: not known" in run()


def test_refuses_where_nothing_can_be_drafted(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(model), "--draft", "none"]) == 1
    assert "nothing can be drafted: draft is none" in capsys.readouterr().err
    assert main(["calibrate", str(model), "--draft", "ngram", "--max-depth", "0"]) == 1
    assert "max_depth 0" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--depth=2", "--policy=ema", "--no-calibration", "--trace=file"])
def test_flags_that_would_change_nothing_are_unknown(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", flag])
    assert "unrecognized argument" in capsys.readouterr().err


def test_best_depth_is_that_of_most_tokens_a_second() -> None:
    free = CostModel(tokens=Curve([(1, 1.0)]), drafts={"": (Curve([(1, 0.0)]),)})
    dear = CostModel(tokens=Curve([(1, 1.0), (2, 2.0)]), drafts={"": (Curve([(1, 0.5)]),)})
    stairs = CostModel(tokens=Curve([(3, 1.0), (4, 9.0)], [3]), drafts={"": (Curve([(1, 0.01)]),)})
    depths = range(5)
    assert best_depth(free, 1, 0.5, depths) == 4
    assert best_depth(dear, 1, 0.9, depths) == 0
    assert best_depth(stairs, 1, 0.9, depths) == 2
    assert best_depth(stairs, 3, 0.9, depths) == 0
