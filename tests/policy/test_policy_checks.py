"""Numbers from outside: what cannot be is refused at once, in a line that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from policy_simulator import TRUTH

from paceline.policy import (
    AcceptanceConfig,
    AcceptanceEma,
    CostModel,
    Curve,
    Decision,
    Fixed,
    Governor,
    Load,
    Observation,
    PolicyError,
    Reason,
    RowView,
    read_trace,
)
from paceline.policy.checks import MAX_STEP_TOKENS, MAX_TOKENS, check_depths, real, whole

INF, NAN = math.inf, math.nan
ROWS = (RowView("a", 4), RowView("b", 4))
HUGE = 10**5000  # Python does not spell it out


def test_a_whole_number_may_be_of_any_type_that_is_one() -> None:
    class Own:
        def __index__(self) -> int:
            return 7

    assert [whole("n", value, 0, 9) for value in (7, 7.0, Own())] == [7, 7, 7]
    for wrong in (True, "7", 7.5, INF, NAN, None, [7]):
        with pytest.raises(PolicyError, match="n must be a whole number, got "):
            whole("n", wrong, 0, 9)
    for beyond in (-1, 10, HUGE, -HUGE):
        with pytest.raises(PolicyError, match="n must be 0 to 9, got "):
            whole("n", beyond, 0, 9)


def test_a_real_number_is_finite_within_its_limits() -> None:
    assert [real("x", value, 0.0, 2.0) for value in (1, 1.5)] == [1.0, 1.5]
    for wrong in (True, "1", None, [1.0]):
        with pytest.raises(PolicyError, match="x must be a number, got "):
            real("x", wrong, 0.0, 2.0)
    for beyond in (-0.1, 3, INF, NAN, HUGE):
        with pytest.raises(PolicyError, match="x must be 0 to 2, got "):
            real("x", beyond, 0.0, 2.0)


@pytest.mark.parametrize("depths", [(), (1,), (0, -1), (0, 1.5), (0, NAN), (0, INF), (0, "a"), (0, 10**9)])
def test_what_are_no_depths(depths: Any) -> None:
    with pytest.raises(PolicyError, match="depth"):
        check_depths(depths)
    with pytest.raises(PolicyError, match="depth"):
        Governor(TRUTH, depths)


@pytest.mark.parametrize("policy", [Governor(TRUTH), Fixed(1)], ids=["governor", "fixed"])
@pytest.mark.parametrize(
    ("load", "words"),
    [
        (Load(3, 10), "load has 3 rows, and 2 are given"),
        (Load(2, -1), "context_len must be 0 to"),
        (Load(2, NAN), "context_len must be a whole number"),  # type: ignore[arg-type]
        (Load(2, MAX_TOKENS + 1), "context_len must be 0 to"),
        (Load(2, 10, -1), "num_prompt_tokens must be 0 to"),
        (Load(2, 10, MAX_STEP_TOKENS + 1), "num_prompt_tokens must be 0 to"),
        (Load(2, 10, INF), "num_prompt_tokens must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_load(policy: Governor | Fixed, load: Load, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        policy.decide(load, ROWS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"accepted": (1,)}, "accepted has 1 entries for a decision over 2 rows"),
        ({"accepted": (0, -100)}, "accepted must not be negative, got -100"),
        ({"accepted": (0, 3)}, r"accepted \(0, 3\) of \(2, 2\)"),
        ({"accepted": (2, 0), "verified": (1, 2)}, r"accepted \(2, 0\) of \(1, 2\)"),
        ({"verified": (2, -1)}, "verified must not be negative"),
        ({"drafted": (2, -1)}, "drafted must not be negative"),
        *(({"seconds": value}, "seconds must be") for value in (0.0, -1.0, 1e-300, 1e300, INF, NAN)),
    ],
)
def test_what_no_step_came_to(fields: dict[str, Any], words: str) -> None:
    decision = Decision(Load(2, 10), ROWS, (2, 2), Reason.PAYS)
    with pytest.raises(PolicyError, match=words):
        Observation(**({"decision": decision, "accepted": (0, 0), "seconds": 0.01} | fields))


def test_what_makes_no_estimate() -> None:
    for name in ("prior_weight", "kappa", "max_rounds", "max_kind_rounds"):
        with pytest.raises(PolicyError, match=f"{name} must be positive and finite"):
            AcceptanceConfig(**{name: INF})
    with pytest.raises(PolicyError, match="interval must be 1 to"):
        AcceptanceEma(interval=0)


def test_what_is_no_cost_model() -> None:
    good = Curve([(1, 0.01)])
    for tokens, drafts, words in (
        (Curve([(1, 0.0)]), good, "tokens: a time must be 1e-09 to"),
        (Curve([(1, 0.02), (2, 0.01)]), good, "tokens: the largest size must not take less"),
        (good, Curve([(1, -0.01)]), "drafts: a time must be 0 to"),
        (good, Curve([(1, 0.02), (2, 0.01)]), "drafts: the largest size must not take less"),
    ):
        with pytest.raises(PolicyError, match=words):
            CostModel(tokens, {"": (drafts,)})
    with pytest.raises(PolicyError, match="query_seconds must be 0 to"):
        CostModel(good, {"": (good,)}, query_seconds=NAN)


def _request(**fields: Any) -> dict[str, Any]:
    return {"key": "a", "arrival": 0.0, "prompt_len": 5, "matched": [1, 0]} | fields


def _step(*row: Any, **fields: Any) -> dict[str, Any]:
    rows = [row or ("a", 2, 1)]
    return {"context_len": 9, "num_prompt_tokens": 0, "seconds": 0.01, "rows": rows} | fields


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (_request(arrival=NAN), "arrival must be 0 to"),
        (_request(arrival=-1), "arrival must be 0 to"),
        (_request(arrival="soon"), "arrival must be a number"),
        (_request(prompt_len=INF), "prompt_len must be a whole number"),
        (_request(prompt_len=10**400), "prompt_len must be 0 to"),
        (_request(matched=[]), "matched must not be empty"),
        (_request(matched=[INF]), "matched must be a whole number"),
        (_request(matched=[3]), "matched must be 0 to 2"),
        (_request(matched=3), "not iterable"),
        (_request(pinned=1.5), "pinned must be a whole number"),
        (_request(key=[]), "key must be a text or a number"),
        (_step(context_len=INF), "context_len must be a whole number"),
        (_step(num_prompt_tokens=10**9), "num_prompt_tokens must be 0 to"),
        (_step(seconds=NAN), "seconds must be 1e-09 to"),
        (_step("a", 1.5, 1), "depth must be a whole number"),
        (_step("a", 3, 1), "depth must be 0 to 2"),
        (_step("a", 1, 2), "accepted must be 0 to 1"),
        (_step("a", 1, 1, "x"), "pinned must be a whole number"),
        (_step("a", 1, 1, None, INF), "room must be a whole number"),
        (_step({}, 1, 1), "key must be a text or a number"),
        (_step("a", 1), "not enough values"),
    ],
    ids=str,
)
def test_a_damaged_record_is_numbered(record: dict[str, Any], words: str) -> None:
    kind, good = ("steps", _step()) if "rows" in record else ("requests", _request())
    header = {"schema": 1, "kind": kind, "depths": [0, 1, 2], "costs": TRUTH.to_dict(), "max_rows": 2}
    assert read_trace([header, good])
    with pytest.raises(PolicyError, match=f"trace: record 3: .*{words}"):
        read_trace([header, good, record])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.update(depths=[0, 1.5, 2]), "a depth must be a whole number"),
        (lambda h: h.update(depths=3), "not iterable"),
        (lambda h: h.update(max_rows=INF), "max_rows must be a whole number"),
        (lambda h: h.update(max_rows=0), "max_rows must be 1 to"),
        (lambda h: h["costs"]["tokens"].update(stairs=["a"]), "stair must be a whole number"),
        (lambda h: h["costs"]["tokens"].update(points=[[1, 0.0]]), "tokens: a time must be"),
    ],
)
def test_a_damaged_header_is_record_one(change: Callable[[dict[str, Any]], None], words: str) -> None:
    header = {"schema": 1, "kind": "requests", "depths": [0, 1], "costs": TRUTH.to_dict(), "max_rows": 2}
    change(header)
    with pytest.raises(PolicyError, match=f"trace: record 1: .*{words}"):
        read_trace([header])
