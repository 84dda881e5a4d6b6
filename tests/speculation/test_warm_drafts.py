"""Back on is warm: after any steps without drafts the drafter stands where one that always drafts does.

K/V of every settled position and the next proposals are compared, at the same prefix, with those of a run
that drafted at every step, and that neither chunked, cached nor preempted anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from made_drafters import ADVERSARIAL
from speculation_target import Run, Target, request

from paceline.draft.protocol import Round, Settled
from paceline.draft.torch_head import TorchHead
from paceline.request import EngineRequest
from paceline.worker.drafting import CoupledChoice

DEPTH = 4


@dataclass
class State:
    """A request's row: its length n, draft K/V [n, ..] each, and proposals from there."""

    token_ids: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    drafts: list[int]
    logits: torch.Tensor  # [DEPTH, V_draft], that those were drawn from


def look(target: Target, run: Run, name: str) -> State:
    """What its row holds now. Proposals leave K/V only where the next step writes."""
    seq = run.scheduler._roster._running[name]
    rows, row = target.worker._rows, seq.row
    length = int(rows.seq_len[row])
    assert length == seq.computed_len
    target.own_drafter.wait()
    keys, values = _read(target, row, length)
    newest = rows.token_ids[row, length : length + 1]
    drafting = Round(torch.tensor([row]), newest.clone(), torch.tensor([length]), (DEPTH,), length)
    choose, seen = CoupledChoice(target.worker._sampler, drafting), []

    def noted(step: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
        seen.append(logits[0].clone())
        return choose(step, logits, vocabulary)

    with torch.inference_mode():
        drafts = target.own_drafter.propose(drafting, noted)[0].tolist()
    return State(rows.token_ids[row, : length + 1].tolist(), keys, values, drafts, torch.stack(seen))


def _read(target: Target, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row's draft K and V, [length, kv_heads, D] each."""
    head: Any = target.own_drafter._head  # type: ignore[attr-defined]
    if isinstance(head, TorchHead):
        return head.cache.read(row, length)
    pages = target.worker._rows.tables[row].long()
    keys = head._cache._k[0][pages].permute(0, 2, 4, 1, 3)  # of [pages, heads, page / W, D, W]
    values = head._cache._v[0][pages].transpose(1, 2)  # of [pages, heads, page, D]
    shape = (-1, *keys.shape[3:])
    return keys.reshape(shape)[:length], values.reshape(shape)[:length]


def check_warm(always: State, other: State, tolerance: float) -> None:
    assert always.token_ids == other.token_ids
    for mine, theirs in (
        (other.keys, always.keys),
        (other.values, always.values),
        (other.logits, always.logits),
    ):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert other.drafts == always.drafts


def reach(target: Target, run: Run, name: str, length: int) -> State:
    """Step until the request knows `length` tokens."""
    while (
        name not in run.scheduler._roster._running or run.scheduler._roster._running[name].known_len < length
    ):
        run.step()
    state = look(target, run, name)
    assert len(state.token_ids) == length, f"it went past {length}"
    return state


def boundaries(target: Target, each: EngineRequest, most: int) -> dict[int, State]:
    """The states of a run that drafts at every step, by known tokens."""
    run = target.run(target.own_drafter, 2)
    run.add(each)
    states: dict[int, State] = {}
    while len(states) < most:
        run.step()
        if each.request_id not in run.scheduler._roster._running:
            break
        state = look(target, run, each.request_id)
        states[len(state.token_ids)] = state
    return states


def skip_settling(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """As engines do that stop their drafter: steps without drafts leave nothing behind for it."""
    drafter: Any = target.own_drafter
    settle = drafter.settle

    def only_with_drafts(settled: Settled) -> None:
        if (settled.batch.segments[:, 1] > 1).any():
            settle(settled)

    monkeypatch.setattr(drafter, "settle", only_with_drafts)


@pytest.fixture(scope="module")
def packed(packed_files: tuple[Path, Path]) -> Target:
    settings = {"reproducible": True, "max_num_seqs": 8}
    return Target(*packed_files, exact=False, precision="packed", threads=2, **settings)


@pytest.fixture(params=["float32", "packed"])
def either(request: pytest.FixtureRequest, target: Target) -> tuple[Target, float]:
    """A target and what its K/V may differ by: float32's sums, or a rounding of bfloat16."""
    if request.param == "float32":
        return target, 1e-4
    return request.getfixturevalue("packed"), 0.03


LONG: dict[str, Any] = {"max_tokens": 170, "ignore_eos": True}


@pytest.mark.parametrize("num_plain", [1, 10, 100])
def test_after_plain_steps(either: tuple[Target, float], num_plain: int) -> None:
    target, tolerance = either
    each = request(11, length=9, **LONG)
    states = boundaries(target, each, num_plain + 40)
    length = next(n for n in states if n >= 9 + 6 + num_plain)
    depths = iter([2] * 2 + [0] * 1000)
    # A few rounds with drafts first, then as many plain steps as lead to that length.
    run = target.run(target.own_drafter, lambda num_decoding: next(depths))
    run.add(each)
    check_warm(states[length], reach(target, run, each.request_id, length), tolerance)
    assert run.worker.depths[-num_plain:] == [(0,)] * num_plain


def test_plain_from_the_first_token(either: tuple[Target, float]) -> None:
    target, tolerance = either
    each = request(12, length=30, **LONG)
    states = boundaries(target, each, 30)
    run = target.run(target.own_drafter, 0)
    run.add(each)
    for length in states:
        check_warm(states[length], reach(target, run, each.request_id, length), tolerance)


@pytest.mark.parametrize("num_plain", [1, 10])
def test_without_settling_it_is_cold(
    either: tuple[Target, float], num_plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same check, where plain steps do not settle."""
    target, tolerance = either
    each = request(11, length=9, **LONG)
    states = boundaries(target, each, 40)
    length = next(n for n in states if n >= 9 + 6 + num_plain)
    skip_settling(monkeypatch, target)
    depths = iter([2] * 2 + [0] * 1000)
    run = target.run(target.own_drafter, lambda num_decoding: next(depths))
    run.add(each)
    state = reach(target, run, each.request_id, length)
    with pytest.raises(AssertionError, match="not close"):
        check_warm(states[length], state, tolerance)


def test_chunked_prompts(either: tuple[Target, float]) -> None:
    """Beside others, whose drafts and chunks fill the same steps."""
    target, tolerance = either
    each = request(13, length=90, **LONG)
    states = boundaries(target, each, 6)
    run = target.run(target.own_drafter, 0, max_num_batched_tokens=17, max_num_seqs=4)
    run.add(request(14, depth=3, **LONG), request(15, length=70, **LONG), each)
    for length in states:
        check_warm(states[length], reach(target, run, each.request_id, length), tolerance)
    assert len({row.query_len for plan, _ in run.worker.steps for row in plan.rows}) > 3


def test_cached_prefixes_arrive_warm(either: tuple[Target, float]) -> None:
    """Pages of another request, made in plain steps; the last pair of a page has its follower again."""
    target, tolerance = either
    each = request(16, length=70, **LONG)
    states = boundaries(target, each, 6)
    run = target.run(target.own_drafter, 0)
    run.add(EngineRequest("first", each.prompt_ids, each.params))
    while len(run.answers["first"].token_ids) < 3:
        run.step()
    run.add(each)
    for length in states:
        check_warm(states[length], reach(target, run, each.request_id, length), tolerance)
    run.abort(each.request_id)
    run.abort("first")
    run.step()
    again = EngineRequest("again", each.prompt_ids, each.params)
    run.add(again)
    state = reach(target, run, "again", min(states))
    check_warm(states[min(states)], state, tolerance)
    assert run.scheduler._roster._running["again"].num_cached_tokens >= 64


def test_another_prompt_behind_a_cached_prefix(target: Target) -> None:
    """Only the last pair of the prefix knows the token that followed it then; no other does."""
    page = target.config.page_size
    first = request(17, length=8 * page, **LONG)
    other = EngineRequest("other", [*first.prompt_ids[: 4 * page], *[50, 60, 70, 80, 90]], first.params)
    states = boundaries(target, other, 3)
    run = target.run(target.own_drafter, 0)
    run.add(first)
    while not run.answers[first.request_id].token_ids:
        run.step()
    run.add(other)
    state = reach(target, run, "other", min(states))
    assert run.scheduler._roster._running["other"].num_cached_tokens == 4 * page
    wanted = states[min(states)]
    differs = ((state.keys - wanted.keys).abs() > 1e-4).flatten(1).any(1).nonzero().flatten().tolist()
    assert differs == [4 * page - 1]


def test_preempted_rows(target: Target) -> None:
    each = request(18, length=20, **LONG)
    states = boundaries(target, each, 120)
    limits: dict[str, Any] = {"num_pages": 41, "max_model_len": 150, "prefix_caching": False}
    run = target.run(target.own_drafter, 0, **limits)
    elder = request(19, length=20, max_tokens=120, ignore_eos=True)
    short = request(18, length=20, max_tokens=100, ignore_eos=True)
    run.add(elder, short)
    while run.scheduler.stats().num_preemptions == 0:
        run.step()
    while short.request_id not in run.scheduler._roster._running:
        run.step()
    known = run.scheduler._roster._running[short.request_id].known_len
    length = next((n for n in states if n > known), None)
    assert length is not None
    check_warm(states[length], reach(target, run, short.request_id, length), 1e-4)


def test_rows_beside_each_other(target: Target) -> None:
    """Every row has its own feature and pages, whatever the others' depths, starts and ends."""
    watched = [request(20 + i, length=4 + 7 * i, depth=i % 3, **LONG) for i in range(5)]
    states = {each.request_id: boundaries(target, each, 30) for each in watched}
    run = target.run(target.own_drafter, 1)
    run.add(*watched, *(request(40 + i, max_tokens=3 + i) for i in range(6)))
    num_checked = 0
    for _ in range(25):
        run.step()
        for each in watched:
            if each.request_id not in run.scheduler._roster._running:
                continue
            state = look(target, run, each.request_id)
            wanted = states[each.request_id].get(len(state.token_ids))
            if wanted is not None:
                check_warm(wanted, state, 1e-4)
                num_checked += 1
    assert num_checked > 50


def test_rejected_drafts_leave_nothing(target: Target) -> None:
    """Blocks of every length, with settled junk behind: as if each token had come alone."""
    each = request(30, length=9, **LONG)
    plain = target.answer([each])
    run = target.run(target.own_drafter, 0)
    run.add(each)
    states = {length: reach(target, run, each.request_id, length) for length in range(10, 60)}

    wrapped = _Both(target, target.knowing([each], plain, ADVERSARIAL))
    run = target.run(wrapped, 4)
    run.add(each)
    lengths = set()
    while (
        each.request_id not in run.scheduler._roster._running
        or run.scheduler._roster._running[each.request_id].known_len < 50
    ):
        run.step()
        state = look(target, run, each.request_id)
        lengths.add(len(state.token_ids))
        check_warm(states[len(state.token_ids)], state, 1e-4)
    assert len(lengths) > 15


class _Both:
    """Settles as the target's own drafter and proposes as another."""

    def __init__(self, target: Target, other: Any) -> None:
        self.capture = target.own_drafter.capture
        self.settle: Callable[[Settled], None] = target.own_drafter.settle
        self.wait: Callable[[], None] = target.own_drafter.wait
        self.propose: Callable[..., torch.Tensor] = other.propose
