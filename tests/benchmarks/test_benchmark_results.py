"""The results files: what is written, what is kept, and what must not be in them."""

import json
from pathlib import Path

import pytest

from common import Bar, Results, command_line

PACKAGES = ["numpy"]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/race.py", "--only", "fast"])
    results = Results("race", PACKAGES, tmp_path)
    results.put("fast", {"value": 2.0})
    results.put("slow", {"value": 0.5})
    results.write(["slow", "fast"], [Bar("fast", 2.0, ">=", 1.5), Bar("new", None, "<", 1.0)], "| table |\n")
    return results


def written(folder: Path) -> dict:
    return json.loads((folder / "race.json").read_text())


@pytest.mark.usefixtures("results")
def test_the_file_says_where_when_how_and_what(tmp_path: Path) -> None:
    document = written(tmp_path)
    assert set(document) == {"name", "device", "versions", "date", "command", "rows", "bars"}
    assert set(document["versions"]) == {"python", "paceline", "numpy"}
    assert document["command"] == "python benchmarks/race.py --only fast"
    assert [(row["part"], row["value"]) for row in document["rows"]] == [("slow", 0.5), ("fast", 2.0)]
    assert document["bars"] == [
        {"name": "fast", "value": 2.0, "op": ">=", "bar": 1.5},
        {"name": "new", "value": None, "op": "<", "bar": 1.0},
    ]
    assert (tmp_path / "race.md").read_text().endswith("| table |\n")


@pytest.mark.usefixtures("results")
def test_a_part_measured_again_replaces_its_row_and_keeps_the_others(tmp_path: Path) -> None:
    again = Results("race", PACKAGES, tmp_path)
    again.put("fast", {"value": 3.0})
    again.write(["slow", "fast"], [], "")
    assert [row["value"] for row in written(tmp_path)["rows"]] == [0.5, 3.0]


@pytest.mark.usefixtures("results")
@pytest.mark.parametrize("changed", ["device", "versions"])
def test_rows_of_another_device_or_version_are_not_mixed_in(tmp_path: Path, changed: str) -> None:
    document = written(tmp_path)
    document[changed] = {**document[changed], "cores": "1", "numpy": "0.1"}
    (tmp_path / "race.json").write_text(json.dumps(document))
    assert Results("race", PACKAGES, tmp_path).row("slow") is None


@pytest.mark.usefixtures("results")
def test_a_fresh_start_forgets_earlier_rows(tmp_path: Path) -> None:
    assert Results("race", PACKAGES, tmp_path).row("slow") is not None
    assert Results("race", PACKAGES, tmp_path, is_fresh=True).row("slow") is None


def test_a_command_names_no_folder_of_this_machine() -> None:
    argv = ["/home/someone/benchmarks/race.py", "--model", "/home/someone/models/a b.gguf", "--quick"]
    assert command_line(argv) == "python benchmarks/race.py --model 'a b.gguf' --quick"
