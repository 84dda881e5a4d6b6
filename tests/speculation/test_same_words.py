"""Words do not depend on drafts: token for token those of depth 0, whoever drafts, however deep."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_drafters import ADVERSARIAL, Coupled, Random, right, wrong_from
from speculation_target import Answers, Target, changing, check_same, request
from tiny_targets import EOS, VOCAB_SIZE

from paceline.draft.ngram import NgramDrafter
from paceline.draft.protocol import Drafter
from paceline.request import EngineRequest, Grammar
from paceline.worker import drafting
from paceline.worker import worker as worker_module
from paceline.worker.sampling import sample_torch
from paceline.worker.verify import Accepted, accept, accept_torch

REGEX = Grammar("regex", "[a-f]{2,6}(-[0-9]{1,3}){1,2}")
SCHEMA = Grammar(
    "json",
    '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, '
    '"b": {"type": "integer", "maximum": 99}}, "required": ["a", "b"], "additionalProperties": false}',
)
PROCESSORS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.3, "temperature": 0.8},
    "presence": {"presence_penalty": 2.0, "top_k": 6},
    "frequency": {"frequency_penalty": 2.0, "top_k": 6},
    "repetition": {"repetition_penalty": 1.8, "top_k": 6},
    "greedy, penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
    },
    "logit_bias": {"logit_bias": {70: 4.0, 71: 4.0, 72: -100.0, EOS: 2.0}},
    "min_tokens": {"min_tokens": 5, "logit_bias": {EOS: 6.0}},
    "stop tokens": {"stop_token_ids": tuple(range(60, 120))},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {EOS: 5.0}},
    "regex": {"grammar": REGEX, "max_tokens": 20},
    "regex, greedy, penalties": {"grammar": REGEX, "temperature": 0.0, "frequency_penalty": 1.5},
    "json": {"grammar": SCHEMA, "max_tokens": 40},
    "json, min_tokens": {"grammar": SCHEMA, "min_tokens": 25, "max_tokens": 40, "top_k": 30},
    # Where b, a stop token, is all that may follow, min_tokens has to give way.
    "min_tokens gives way": {
        "grammar": Grammar("regex", "[x-z]{3,5}b[x-z]{9}"),
        "stop_token_ids": (ord("b") - ord("!"),),
        "min_tokens": 8,
    },
    "logprobs": {"logprobs": 3, "temperature": 0.7},
    "prompt_logprobs": {"prompt_logprobs": 1, "logprobs": 0, "repetition_penalty": 1.3},
    "summary": {"speculation_summary": True, "top_p": 0.8},
    "own depth": {"depth": 3},
    "never drafts": {"depth": 0},
}


def requests_of(processor: str, count: int) -> list[EngineRequest]:
    first = 1000 * list(PROCESSORS).index(processor)
    return [request(first + i, f"{processor} {i}", **PROCESSORS[processor]) for i in range(count)]


def choices(count: int) -> list[EngineRequest]:
    """Prompts with three choices each, which share seed and noise key but for the choice."""
    return [request(30_000 + i, f"choice {c} of {i}", choice=c) for i in range(count) for c in range(3)]


@pytest.fixture(scope="module")
def mixed(target: Target) -> tuple[list[EngineRequest], Answers]:
    """Requests with every processor, and their plain answers."""
    together = [requests_of(name, 10) for name in PROCESSORS] + [choices(10)]
    # Interleaved, so that every step holds rows of every kind.
    requests = [each for group in itertools.zip_longest(*together) for each in group if each is not None]
    return requests, target.answer(requests)


@pytest.fixture(scope="module")
def many(target: Target) -> tuple[list[EngineRequest], Answers]:
    """Ten thousand seeds at temperature 1, and their plain answers."""
    requests = [request(i, max_tokens=5) for i in range(10_000)]
    return requests, target.answer(requests)


Case = tuple[list[EngineRequest], Answers]
DRAFTERS: dict[str, Callable[[Target, Case], Drafter]] = {
    "good": lambda target, case: target.knowing(*case, right),
    "bad": lambda target, case: Random(VOCAB_SIZE),
    "adversarial": lambda target, case: target.knowing(*case, ADVERSARIAL),
    "never right": lambda target, case: target.knowing(*case, wrong_from(0)),
    "coupled": lambda target, case: Coupled(torch.zeros(VOCAB_SIZE)),
    "of few words": lambda target, case: Coupled(torch.zeros(90), torch.arange(0, 270, 3)),
    "head": lambda target, case: target.own_drafter,
    "ngram": lambda target, case: NgramDrafter(target.worker._rows.token_ids, 1, 3),
}


def test_ten_thousand_seeds(target: Target, many: Case) -> None:
    drafter = DRAFTERS["adversarial"](target, many)
    check_same(many[1], target.answer(many[0], drafter, changing()))


@pytest.mark.parametrize(
    ("drafter", "depth"),
    [
        *(("good", depth) for depth in (1, 2, 3, 4, None)),
        *(("adversarial", depth) for depth in (1, 2, 3, 4, None)),
        *((drafter, depth) for drafter in ("bad", "never right") for depth in (1, 4)),
        *((drafter, depth) for drafter in ("coupled", "head") for depth in (2, 4, None)),
        *((drafter, depth) for drafter in ("of few words", "ngram") for depth in (3, None)),
    ],
)  # fmt: skip
def test_every_processor(target: Target, mixed: Case, drafter: str, depth: int | None) -> None:
    """Rows of all processors side by side; a depth of None changes at every step."""
    got = target.answer(mixed[0], DRAFTERS[drafter](target, mixed), changing() if depth is None else depth)
    check_same(mixed[1], got)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_each_processor_alone(target: Target, mixed: Case, processor: str) -> None:
    """Rows of one kind: what is left out where nobody in the batch needs it."""
    mine = [each for each in mixed[0] if each.request_id.startswith(f"{processor} ")]
    plain = {each.request_id: mixed[1][each.request_id] for each in mine}
    for drafter in ("adversarial", "coupled"):
        check_same(plain, target.answer(mine, DRAFTERS[drafter](target, mixed), 3))


def test_the_drafters_are_what_they_are_called(target: Target, many: Case) -> None:
    """The control: of the drafts some are accepted always, some often, some now and then, some never."""
    case = (many[0][:300], {each.request_id: many[1][each.request_id] for each in many[0][:300]})
    rates: dict[str, float] = {}
    for name, make in DRAFTERS.items():
        run = target.run(make(target, case), 3)
        run.checked = False
        run.add(*case[0])
        run.drain()
        stats = run.scheduler.stats().speculation
        rates[name] = stats.num_accepted / max(1, stats.num_drafted)
    assert rates["good"] > 0.99
    assert rates["never right"] == 0.0
    assert 0.3 < rates["adversarial"] < 0.9
    assert rates["bad"] < 0.05
    assert 0.05 < rates["of few words"] < 0.9
    assert 0.2 < rates["coupled"] < 0.9
    assert 0.02 < rates["head"] < 0.9


def takes_wrong_drafts(
    y: torch.Tensor, drafts: torch.Tensor, first: torch.Tensor, *rest: torch.Tensor
) -> Accepted:
    """Accepts one wrong draft in five."""
    y = y.clone()
    if drafts.shape[1]:
        lucky = (drafts[:, 0] >= 0) & (rest[0] > 0) & (y[first] % 5 == 0)
        y[first[lucky]] = drafts[lucky, 0]
    return accept(y, drafts, first, *rest)


def draws_again(y: torch.Tensor, drafts: torch.Tensor, first: torch.Tensor, *rest: torch.Tensor) -> Accepted:
    """After a rejection, now and then another token than the one that the draft has missed."""
    lens, token_ids = accept(y, drafts, first, *rest)
    last = (lens - 1).clamp(min=0)[:, None]
    again = ((lens <= rest[0]) & (y[first] % 5 == 0))[:, None]
    missed = token_ids.gather(1, last)
    return Accepted(lens, token_ids.scatter(1, last, torch.where(again, missed + 1, missed)))


@pytest.mark.parametrize("biased", [takes_wrong_drafts, draws_again])
@pytest.mark.parametrize("drafter", ["bad", "adversarial", "coupled"])
def test_a_biased_verifier_is_caught(
    target: Target, many: Case, monkeypatch: pytest.MonkeyPatch, biased: Callable[..., Accepted], drafter: str
) -> None:
    """The control of all this: the very checks above fail."""
    requests = many[0][:200]
    plain = {each.request_id: many[1][each.request_id] for each in requests}
    check_same(plain, target.answer(requests, DRAFTERS[drafter](target, many), 2))
    monkeypatch.setattr(worker_module, "accept", biased)
    with pytest.raises(AssertionError, match="answers differ"):
        check_same(plain, target.answer(requests, DRAFTERS[drafter](target, many), 2))


def test_rows_of_different_depth_in_one_step(target: Target) -> None:
    requests = [request(i, max_tokens=12, **({} if i % 6 == 5 else {"depth": i % 6})) for i in range(90)]
    plain = target.answer([request(i, max_tokens=12) for i in range(90)])
    run = target.run(target.knowing(requests, plain, ADVERSARIAL), 1)
    run.add(*requests)
    check_same(plain, run.drain())
    assert any(set(depths) >= {0, 1, 2, 3, 4} for depths in run.worker.depths)


@pytest.mark.parametrize("drafter", ["adversarial", "coupled", "head", "ngram"])
def test_as_devices_run_it(
    target: Target, mixed: Case, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch throughout, and no place is left out for want of a draft: nothing is read back for that."""
    rows = target.worker._rows
    monkeypatch.setattr(target.worker, "_trims", False)
    monkeypatch.setattr(rows, "_library", torch)
    for name in ("token_ids", "seq_len", "max_len"):
        monkeypatch.setattr(rows, f"_{name}", getattr(rows, name))
    for module in (worker_module, drafting):
        monkeypatch.setattr(module, "sample", sample_torch)
    monkeypatch.setattr(worker_module, "accept", accept_torch)
    requests = mixed[0][::3]
    plain = {each.request_id: mixed[1][each.request_id] for each in requests}
    for depth in (3, changing()):
        check_same(plain, target.answer(requests, DRAFTERS[drafter](target, mixed), depth))


def test_plain_float32_through_the_front_door(folder: Any, head: Any) -> None:
    """As users build it: no arithmetic of the tests' own, depth by the settings."""
    made = Target(folder, head, exact=False, precision="fp32", max_num_seqs=32)
    requests = [request(i, temperature=(0.0, 1.0)[i % 2], max_tokens=8) for i in range(64)]
    plain = made.answer(requests)
    for depth in (2, 4):
        check_same(plain, made.answer(requests, made.own_drafter, depth))
        check_same(plain, made.answer(requests, made.knowing(requests, plain, ADVERSARIAL), depth))
