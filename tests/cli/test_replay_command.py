"""`paceline replay`: the table, the JSON, and one clear line for whatever is wrong with the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.engine.policies import make_policy
from paceline.policy import CostModel, Load, Observation, RowView

DEPTHS = [0, 1, 2, 3, 4]
COSTS = CostModel.prior()


def header(kind: str, **more: Any) -> dict[str, Any]:
    return {"schema": 1, "kind": kind, "depths": DEPTHS, "costs": COSTS.to_dict(), **more}


def requests(chance: float = 0.8, num: int = 4) -> list[dict[str, Any]]:
    draw = random.Random(3)
    records = []
    for i in range(num):
        matched = []
        for _ in range(60):
            run = 0
            while run < 4 and draw.random() < chance:
                run += 1
            matched.append(run)
        records.append({"key": i, "arrival": 0.0, "prompt_len": 9, "matched": matched})
    return [header("requests", max_rows=2), *records]


def steps(depth: int = 2, num: int = 40) -> list[dict[str, Any]]:
    record = {
        "context_len": 100,
        "num_prompt_tokens": 0,
        "seconds": 0.02,
        "rows": [[0, depth, depth, None, 4], [1, depth, 0, None, 4]],
    }
    return [header("steps"), *[record] * num]


def write(folder: Path, records: list[Any]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["replay", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_has_every_depth_and_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = replay(capsys, write(tmp_path, requests()))
    assert (code, err) == (0, "")
    title, *rows = out.splitlines()
    assert title.split() == ["policy", "tok/s", "regret", "steps"]
    assert [row.split()[0] for row in rows] == [*(f"fixed:{d}" for d in DEPTHS), "governor", "ema"]
    [best] = (row for row in rows if "the best in hindsight" in row)
    assert best.split()[2] == "0.0%"
    assert "pays" in rows[-1]


def test_sglangs_rule_keeps_to_the_depth_of_the_trace() -> None:
    policy = make_policy("auto", "ema", 2, None)
    deepest = 0
    for _ in range(100):
        decision = policy.decide(Load(1, 10), (RowView(0, 8),))
        policy.observe(Observation(decision, decision.depths, 0.01))
        deepest = max(deepest, *decision.depths)
    assert deepest == 2


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["governor", "ema", "table:4=3,16=1", "threshold:8:2", "fixed:2", "fixed:0"]
    flags = [word for spec in specs for word in ("--policy", spec)]
    code, out, _ = replay(capsys, write(tmp_path, requests()), "--json", *flags)
    shown = json.loads(out)
    assert code == 0
    assert (shown["kind"], shown["served"]) == ("requests", None)
    assert list(shown["policies"]) == specs
    best = str(shown["best_depth"])
    assert shown["fixed"][best]["regret"] == 0
    assert all(0 <= replayed["regret"] < 1 for replayed in shown["fixed"].values())
    for depth in ("0", "2"):
        for what in ("tokens", "seconds", "tokens_per_second", "regret"):
            assert shown["policies"][f"fixed:{depth}"][what] == shown["fixed"][depth][what]
    table = shown["policies"]["table:4=3,16=1"]
    assert table["tokens_per_second"] == pytest.approx(shown["fixed"]["3"]["tokens_per_second"])  # 2 rows
    assert sum(table["steps_by_depth"].values()) == sum(table["steps_by_reason"].values())


def test_what_a_server_did_is_compared_as_far_as_it_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, steps())
    code, out, _ = replay(capsys, path, "--json", "--policy", "governor", "--policy", "fixed:2")
    shown = json.loads(out)
    assert code == 0
    assert list(shown["fixed"]) == ["0", "1", "2"]
    assert shown["served"]["tokens"] == 40 * 4
    assert shown["served"]["tokens_per_second"] == 200
    assert shown["policies"]["fixed:2"]["tokens_per_second"] == pytest.approx(200)
    assert shown["policies"]["governor"]["tokens"] >= 80
    _, out, _ = replay(capsys, path)
    assert out.splitlines()[1].startswith("as served")


def test_a_policy_that_wants_what_the_trace_lacks_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = steps(2)
    records[5] = {**records[5], "rows": [[0, 0, 0, None, 4], [1, 2, 0, None, 4]]}
    path = write(tmp_path, records)
    code, out, err = replay(capsys, path, "--policy", "fixed:2", "--policy", "fixed:0")
    assert code == 1, "one that was asked for failed"
    assert err.splitlines() == [
        "fixed:2: step 5: a row drafts 2 deep, the trace holds 0 there",
        "paceline: error: fixed:2 could not be replayed on this trace; "
        "recorded with --depth N, one has drafts for all depths up to N",
    ]
    assert [row.split()[0] for row in out.splitlines()] == ["policy", "as", "fixed:0", "fixed:0"]
    code, out, err = replay(capsys, path, "--json", "--policy", "fixed:2", "--policy", "fixed:0")
    assert code == 1
    assert list(json.loads(out)["policies"]) == ["fixed:2", "fixed:0"]
    assert err.splitlines()[0].startswith("paceline: error: fixed:2 could not")


def test_a_shallow_trace_replays_what_needs_no_more_depth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = replay(capsys, write(tmp_path, steps(2)))
    assert (code, err) == (0, "")
    assert [row.split()[0] for row in out.splitlines()[-2:]] == ["governor", "ema"]


def test_unasked_a_policy_that_does_not_fit_the_trace_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, [*steps(1, num=5), *steps(4, num=1)[1:]])
    asked = replay(capsys, path, "--policy", "governor", "--policy", "ema")
    assert "ema: step" in asked[2], "which needs depths that the trace lacks"
    code, out, err = replay(capsys, path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("governor")
    assert "ema" not in out


def test_a_line_that_was_cut_off_at_the_end_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(write(tmp_path, steps(num=10)))
    text = path.read_text()
    path.write_text(text[:-20])
    _, out, _ = replay(capsys, str(path), "--json")
    assert json.loads(out)["served"]["tokens"] == 9 * 4


GOOD = json.dumps(header("steps"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "trace: there is no header"),
        ("{}\n", "trace: there is no header"),
        ("words\n", "line 1 is not JSON: Expecting value"),
        ("words", "line 1 is not JSON: Expecting value"),
        ("[1]\n", "line 1 is not a JSON object"),
        (GOOD + "\n", "the trace is empty"),
        (GOOD + "\nnot json\n{}\n", "line 2 is not JSON: Expecting value"),
        (GOOD + "\n{}\n", "trace: record 2: rows is missing"),
        (GOOD.replace('"schema": 1', '"schema": 9', 1) + "\n", "trace: schema must be 1, got 9"),
        (GOOD.replace("steps", "stairs") + "\n", "trace: kind must be requests or steps, got 'stairs'"),
        ('{"schema": 1, "kind": "steps", "depths": [0], "costs": {}}\n', "cost model: not a mapping"),
        (
            GOOD + '\n{"rows": [[0, 9, 1]], "seconds": 1}\n',
            "trace: record 2: depth must be 0 to 4, got 9",
        ),
        (GOOD + "\n" + "[" * 100_000 + "\n", "line 2 is not JSON: "),
        (GOOD.replace('"schema": 1', '"schema": 1' + "0" * 5000, 1) + "\n", "line 1 is not JSON: "),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    code, out, err = replay(capsys, str(path))
    assert (code, out) == (1, "")
    assert err.startswith(f"paceline: error: {path}: ")
    assert words in err
    assert err.count("\n") == 1


def test_what_is_no_file_or_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(capsys, str(tmp_path / "gone"))[2].endswith("gone: No such file or directory\n")
    assert replay(capsys, str(tmp_path))[2].endswith(": Is a directory\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert replay(capsys, str(tmp_path / "bytes"))[2].endswith("is not a trace: it is not text\n")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("best", "policy must be one of governor, ema, table:"),
        ("fixed:\N{FULLWIDTH DIGIT ONE}", "fixed: needs a depth of 0 to 4, the deepest of the trace"),
        ("fixed:x", "fixed: needs a depth of 0 to 4, the deepest of the trace"),
        ("fixed:5", "fixed: needs a depth of 0 to 4, the deepest of the trace"),
        ("table:a=b", "cannot be used"),
    ],
)
def test_words_that_are_no_policy_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str, words: str
) -> None:
    code, out, err = replay(capsys, write(tmp_path, requests()), "--policy", spec)
    assert (code, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1
