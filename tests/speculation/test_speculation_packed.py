"""On the packed kernels: the same words below the kernel threshold; across it, as near as plain decoding is.

Steps above the threshold run through the bfloat16 copies of the matrices, so that plain decoding itself gives
other words in a crowd than alone, now and then, where two tokens are nearly tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_drafters import ADVERSARIAL, right
from speculation_target import Answer, Answers, Target, changing, check_same, request

from paceline.request import EngineRequest
from paceline.worker import build
from paceline.worker.noise import gumbel, seed_words

THRESHOLD = 15  # tokens: three rows of depth 4


@pytest.fixture(scope="module")
def threshold(packed_files: tuple[Path, Path]) -> Iterator[Target]:
    """As users get it, with a threshold that does not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "max_packed_tokens", lambda *args: THRESHOLD)
        yield Target(*packed_files, exact=False, precision="packed", threads=2, max_num_seqs=16)


@pytest.fixture(scope="module")
def reproducible(packed_files: tuple[Path, Path]) -> Target:
    settings = {"reproducible": True, "max_num_seqs": 48}
    return Target(*packed_files, exact=False, precision="packed", threads=2, **settings)


def mixed(count: int, **more: Any) -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"top_k": 9, "frequency_penalty": 1.0, "logprobs": 2},
    ]
    return [request(i, length=3 + i % 8, max_tokens=16, **kinds[i % 5], **more) for i in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, None])
def test_one_kernel_whatever_the_batch(reproducible: Target, depth: int | None) -> None:
    requests = mixed(60)
    plain = reproducible.answer(requests)
    for drafter in (
        reproducible.own_drafter,
        reproducible.knowing(requests, plain, right),
        reproducible.knowing(requests, plain, ADVERSARIAL),
    ):
        check_same(plain, reproducible.answer(requests, drafter, changing() if depth is None else depth))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_below_the_threshold(threshold: Target, depth: int) -> None:
    requests = mixed(30)
    few = {"max_num_seqs": 3, "max_num_batched_tokens": THRESHOLD}
    plain = threshold.answer(requests, **few)
    for drafter in (threshold.own_drafter, threshold.knowing(requests, plain, ADVERSARIAL)):
        run = threshold.run(drafter, depth, **few)
        run.add(*requests)
        check_same(plain, run.drain())
        assert max(plan.num_tokens for plan, _ in run.worker.steps) > 3 * depth


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_across_the_threshold(threshold: Target, temperature: float) -> None:
    params = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True, "logprobs": 20}
    requests = [request(i, length=6, **params) for i in range(32)]
    few = {"max_num_seqs": 3, "max_num_batched_tokens": THRESHOLD, "prefix_caching": False}
    plain = threshold.answer(requests, **few)
    crowd = threshold.answer(requests, prefix_caching=False)  # sixteen rows: dense
    noise = max(_noise(plain[name], crowd[name]) for name in plain)
    assert 0.0 < noise < 0.3

    for depth in (2, 4):
        run = threshold.run(threshold.own_drafter, depth, prefix_caching=False)
        run.add(*requests)
        drafted = run.drain()
        assert any(plan.num_tokens > THRESHOLD for plan, _ in run.worker.steps)
        gaps = _gaps_at_divergence(requests, plain, drafted, temperature)
        assert gaps, "nothing differs: the dense copies have not run"
        # One logit less than it was, the other more; and the other's is as the drafted run has it.
        assert -noise <= min(gaps) <= max(gaps) <= 3 * noise


def _shared(mine: Answer, theirs: Answer) -> int:
    """Tokens before the first that differs."""
    pairs = zip(mine.token_ids, theirs.token_ids, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine.token_ids))


def _noise(mine: Answer, theirs: Answer) -> float:
    """The most that a logprob differs by where all tokens before it are the same."""
    most = 0.0
    for i in range(min(_shared(mine, theirs) + 1, len(mine.logprobs))):
        a, b = mine.logprobs[i], theirs.logprobs[i]
        known = dict(zip(b.top_ids, b.top_logprobs, strict=True))
        most = max(
            most, *(abs(p - known[t]) for t, p in zip(a.top_ids, a.top_logprobs, strict=True) if t in known)
        )
    return most


def _gaps_at_divergence(
    requests: list[EngineRequest], plain: Answers, drafted: Answers, temperature: float
) -> list[float]:
    """By how much, in logits, the plain token beat the other, where an answer leaves its plain one."""
    gaps: list[float] = []
    for each in requests:
        mine, theirs = plain[each.request_id], drafted[each.request_id]
        at = _shared(mine, theirs)
        if at == len(mine.token_ids):
            continue
        pair = (mine.token_ids[at], theirs.token_ids[at])
        gap = mine.logprobs[at].logprob - theirs.logprobs[at].logprob
        if temperature:
            assert each.params.seed is not None
            noise = gumbel(
                torch.tensor([len(each.prompt_ids) + at]),
                torch.tensor([each.choice]),
                torch.tensor([seed_words(each.params.seed)]),
                torch.tensor(pair),
            )[0]
            gap += temperature * float(noise[0] - noise[1])
        gaps.append(gap)
    return gaps
