"""The sweep's results: measured in pieces, interrupted, held against the bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sweep
from common import Results

PACKAGES = ["numpy"]


def column(temperature: float, concurrency: int, context_len: int | None = None) -> dict[str, Any]:
    return {"temperature": temperature, "context_len": context_len, "concurrency": concurrency}


def document(
    *columns: dict[str, Any], ratio: float = 1.0, num: int = 5, judged: bool = True
) -> dict[str, Any]:
    """A report of `paceline sweep`, as far as it is read here."""

    def interval(value: float, num: int) -> dict[str, float | None]:
        low, high = (0, None) if num == 1 else (value - 0.1, value + 0.1)
        return {"estimate": value, "low": low, "high": high, "num": num}

    return {
        "work": "answers of at most 96 tokens",
        "command": "paceline sweep",
        "summary": {
            "cells": [
                {
                    "column": of,
                    "arm": arm,
                    "rate": {"median": rate},
                    "to_plain": interval(rate / 100, 2 * num),
                    "mean_depth": None if arm == "plain" else 1.5,
                }
                for of in columns
                for arm, rate in (("plain", 100.0), ("auto", 120.0))
            ],
            "verdicts": [
                {"column": of, "arm": arm, "best": "plain", "ratio": interval(value, num)}
                for of in columns
                for arm, value in (("auto", ratio), ("ema", 0.1))
                if judged
            ],
        },
    }


def rows(results: Results) -> dict[str, Any]:
    return {part: row for part in sweep._parts() if (row := results.row(part)) is not None}


def values(results: Results) -> dict[str, float | None]:
    return {bar.name: bar.value for bar in sweep._bars(rows(results))}


def test_a_sweep_in_pieces_comes_together_over_several_runs(tmp_path: Path) -> None:
    for i, temperature in enumerate(sweep.TEMPERATURES):
        for concurrency in sweep.CONCURRENCY:
            results = Results("sweep", PACKAGES, tmp_path)
            piece = document(column(temperature, concurrency), ratio=1.0 + i / 10)
            sweep.merge(results, piece, is_mix=False)
            results.write(sweep._parts(), sweep._bars(rows(results)), sweep._table(rows(results)))
    results = Results("sweep", PACKAGES, tmp_path)
    assert values(results)["auto / best other, mean over all loads"] is not None
    sweep.merge(results, document(column(0.0, 2), column(0.0, 4), ratio=1.04), is_mix=True)
    results.write(sweep._parts(), sweep._bars(rows(results)), sweep._table(rows(results)))
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["part"] for row in written["rows"]] == sweep._parts()
    found = {bar["name"]: bar["value"] for bar in written["bars"]}
    assert found.pop("auto / best other, mean over all loads") == pytest.approx(1.05)
    assert found.pop("auto / best other, requests 4, easy and hopeless") == 1.04
    assert found.pop("auto / plain, 1 request, greedy") == 1.2
    assert found == {
        f"auto / best other, requests {c} at {t}": ratio
        for t, ratio in (("0", 1.0), ("0.8", 1.1))
        for c in sweep.CONCURRENCY
    }


def test_the_mix_fills_no_other_bar(tmp_path: Path) -> None:
    results = Results("sweep", PACKAGES, tmp_path)
    sweep.merge(results, document(column(0.0, 2), ratio=2.0), is_mix=True)
    assert list(rows(results)) == ["2, easy and hopeless"]
    assert set(values(results).values()) == {None}, "the bar is that of 4 requests"
    sweep.merge(results, document(column(0.0, 4), ratio=1.1), is_mix=True)
    assert [value for value in values(results).values() if value is not None] == [1.1]


def test_what_has_no_verdict_no_place_or_too_few_pairs_is_not_held_against_a_bar(tmp_path: Path) -> None:
    results = Results("sweep", PACKAGES, tmp_path)
    sweep.merge(results, document(column(0.0, 1), judged=False), is_mix=False)
    sweep.merge(results, document(column(0.0, 5), column(0.3, 4), column(0.0, 2, 256)), is_mix=False)
    assert rows(results) == {}
    sweep.merge(results, document(column(0.0, 1), num=2, ratio=0.9), is_mix=False)
    assert list(rows(results)) == ["1 at 0"]
    assert values(results)["auto / best other, requests 1 at 0"] is None
    assert "not measured" in sweep._table(rows(results))
    sweep.merge(results, document(column(0.0, 2), num=1, ratio=0.9), is_mix=False)
    assert "0.900 (one pair)" in sweep._table(rows(results))


def test_an_interrupted_sweep_replaces_no_whole_row(tmp_path: Path) -> None:
    results = Results("sweep", PACKAGES, tmp_path)
    name = "auto / best other, requests 4 at 0.8"
    for num, ratio, expected in (
        (2, 0.8, None),
        (3, 0.81, None),
        (5, 1.0, 1.0),
        (4, 0.9, 1.0),
        (6, 0.99, 0.99),
    ):
        sweep.merge(results, document(column(0.8, 4), num=num, ratio=ratio), is_mix=False)
        assert values(results)[name] == expected
    assert results.row("4 at 0.8")["auto_to_best"]["num"] == 6  # type: ignore[index]


def test_flags_go_before_the_defaults() -> None:
    defaults = {"--arms": "plain,auto", "--natural-stop": "", "--concurrency": "1,2"}
    assert sweep.with_defaults([], defaults) == [
        "--arms",
        "plain,auto",
        "--natural-stop",
        "--concurrency",
        "1,2",
    ]
    given = ["--concurrency=4", "--arms", "auto"]
    assert sweep.with_defaults(given, defaults) == ["--natural-stop", *given]


def test_the_command_has_the_mix_where_it_is_and_no_folder_of_this_machine() -> None:
    words = "paceline sweep --prompts mix.jsonl --out x --concurrency 2"
    assert sweep._command(words) == "paceline sweep --prompts benchmarks/data/mix.jsonl --concurrency 2"
    assert sweep.MIX.is_file()
