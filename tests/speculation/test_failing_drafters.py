"""A drafter that fails turns itself off: every request gets its plain words, and the engine says why."""

from __future__ import annotations

import pytest
import torch
from made_drafters import ADVERSARIAL, Failing
from speculation_target import Target, check_same, request
from tiny_targets import VOCAB_SIZE

from paceline.draft.protocol import Choose, Round, Settled
from paceline.request import Grammar

METHODS = ("propose", "settle")


@pytest.mark.parametrize("method", [*METHODS, "wait"])
@pytest.mark.parametrize("num_calls", [0, 1, 5])
@pytest.mark.parametrize("inner", ["head", "adversarial"])
def test_every_request_finishes_with_its_words(
    target: Target, method: str, num_calls: int, inner: str
) -> None:
    requests = [
        request(i, length=3 + 9 * (i % 4), max_tokens=12, logprobs=i % 3 or None, presence_penalty=i % 2)
        for i in range(24)
    ]
    plain = target.answer(requests)
    working = target.own_drafter if inner == "head" else target.knowing(requests, plain, ADVERSARIAL)
    drafter = Failing(working, method, num_calls, "out of luck\nand a second line")
    run = target.run(drafter, 3, max_num_seqs=10, max_num_batched_tokens=64)
    run.add(*requests)
    check_same(plain, run.drain())

    assert drafter.num_calls_after == 0, "it was asked again"
    assert run.scheduler.stats().speculation.drafter_error == "RuntimeError: out of luck"
    failed = [result.drafter_error is not None for _, result in run.worker.steps]
    first = failed.index(True)
    assert all(failed[first:])
    assert failed.count(False) == first
    assert not any(any(depths) for depths in run.worker.depths[first + 1 :])
    assert (first == 0) == (method != "propose" and num_calls == 0)
    if num_calls == 5:
        assert any(any(depths) for depths in run.worker.depths[:first])


@pytest.mark.parametrize("method", METHODS)
def test_a_grammar_is_where_it_was(target: Target, method: str) -> None:
    """A drafter that fails has taken cursors ahead: the step begins again without it."""
    grammar = Grammar("regex", "[a-f]{2,6}(-[0-9]{1,3}){1,2}")
    requests = [request(i, grammar=grammar, max_tokens=20) for i in range(12)]
    plain = target.answer(requests)

    class Midway:
        """Draws two of three drafts, then fails; or fails behind them."""

        capture = target.own_drafter.capture

        def settle(self, settled: Settled) -> None:
            target.own_drafter.settle(settled)
            if method == "settle":
                raise ValueError

        def wait(self) -> None:
            target.own_drafter.wait()

        def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
            def counted(step: int, logits: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
                if step == 2 and method == "propose":
                    raise ValueError
                return choose(step, logits, vocabulary)

            return target.own_drafter.propose(drafting, counted)

    run = target.run(Midway(), 3)
    run.add(*requests)
    check_same(plain, run.drain())
    assert run.scheduler.stats().speculation.drafter_error == "ValueError"


@pytest.mark.parametrize("fault", ["a shape", "a token", "a negative"])
def test_nonsense_never_reaches_the_model(target: Target, fault: str) -> None:
    """Drafts of another shape, or of tokens that there are not."""

    class Wrong:
        capture = ()

        def settle(self, settled: Settled) -> None:
            pass

        def wait(self) -> None:
            pass

        def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
            num = len(drafting.depths)
            if fault == "a shape":
                return torch.zeros(num + 1, drafting.depths[0], dtype=torch.int64)
            return torch.full((num, drafting.depths[0]), VOCAB_SIZE if fault == "a token" else -7)

    requests = [request(i) for i in range(6)]
    plain = target.answer(requests)
    run = target.run(Wrong(), 2)
    run.add(*requests)
    check_same(plain, run.drain())
    stats = run.scheduler.stats().speculation
    assert (stats.drafter_error is not None) == (fault == "a shape")
    assert stats.num_drafted == 0
