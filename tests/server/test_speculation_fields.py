"""Speculation over HTTP and in Python, with the fake engine, whose drafts are all right."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from served import Served, eventually
from test_http import CHAT, TEXT, chat_body, post, stream, text_body
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams, llm
from paceline.engine.stats import SpeculationStats
from paceline.errors import RequestError
from paceline.request import SpeculationSummary
from paceline.server.speculation import SpeculationOptions
from paceline.server.speculation_metrics import SpeculationMetrics


def metric(served: Served, name: str, **labels: str) -> float:
    text = served.client.get("/metrics").text
    values = []
    for found, shown, value in re.findall(r"^paceline:spec_decode_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        if found == name and all(f'{key}="{wanted}"' in shown for key, wanted in labels.items()):
            values.append(float(value))
    [value] = values
    return value


class TestRequests:
    @pytest.mark.parametrize(
        ("asked", "block"),
        [
            (None, 3),
            ({}, 3),
            ({"enabled": True}, 3),
            ({"depth": None, "enabled": None, "summary": None}, 3),
            ({"depth": 0}, 1),
            ({"enabled": False}, 1),
            ({"enabled": False, "depth": 0}, 1),
            ({"depth": 1}, 2),
            ({"depth": 8, "enabled": True}, 9),
        ],
    )
    def test_the_depth_reaches_the_engine(self, served: Served, asked: Any, block: int) -> None:
        body = text_body("<|slow|>abcd", max_tokens=36, speculation=asked, ignore_eos=True, logprobs=0)
        chunks = stream(served, TEXT, body)
        lens = {len(c["choices"][0]["logprobs"]["tokens"]) for c in chunks[:-1]}
        assert min(lens) == block  # what waits for a slow reader is joined
        assert all(num % block == 0 for num in lens)

    @pytest.mark.parametrize("path", [TEXT, CHAT])
    @pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
    def test_the_answer_is_the_same_at_every_depth(self, served: Served, path: str, depth: int) -> None:
        """Trap 3 among it: a stop string that is complete in the middle of a block cuts everything there."""
        more: dict[str, Any] = {"stop": ["d!"], "max_tokens": 50, "seed": 1}
        more |= {"logprobs": 1} if path == TEXT else {"logprobs": True, "top_logprobs": 1}
        body = {**(text_body("abcd!") if path == TEXT else chat_body("abcd!xyz")), **more}
        answers = [
            post(served, path, {**body, "speculation": {"depth": d}, "ignore_eos": True}) for d in (0, depth)
        ]
        for answer in answers:
            answer.pop("id")
            answer.pop("created")
        assert answers[0] == answers[1]
        [choice] = answers[0]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "d!")
        logprobs = choice["logprobs"]
        num_tokens = len(logprobs["tokens"] if path == TEXT else logprobs["content"])
        assert num_tokens == answers[0]["usage"]["completion_tokens"]

    @pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
    def test_a_stop_string_beyond_max_tokens_is_none(self, served: Served, depth: int) -> None:
        """Trap 4, and trap 2: exactly max_tokens, everywhere the count shows."""
        body = text_body("abcdefgh", stop="hab", max_tokens=9, logprobs=0, speculation={"depth": depth})
        before = generated(served)
        answer = post(served, TEXT, body)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abcdefgha", "length")
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 9
        assert generated(served) - before == 9


def generated(served: Served) -> float:
    [value] = re.findall(
        r"^paceline:generation_tokens_total\{.*\} (\S+)$", served.client.get("/metrics").text, re.MULTILINE
    )
    return float(value)


class TestSummaries:
    EXPECTED: dict[str, Any] = {  # noqa: RUF012  # one answer of 10 tokens in blocks of 1 + 3
        "num_rounds": 3,
        "num_drafted": 9,
        "num_verified": 9,
        "num_accepted": 9,
        "accept_len": 4.0,
        "acceptance_rate": 1.0,
        "accepted_per_pos": [3, 3, 3],
        "top_draft_prob_per_pos": [0.5, 0.5, 0.5],
    }

    @pytest.mark.parametrize("path", [TEXT, CHAT])
    def test_comes_with_the_choice(self, served: Served, path: str) -> None:
        body = {**(text_body("abc") if path == TEXT else chat_body("a" * 30)), "max_tokens": 10, "n": 2}
        assert all("speculation" not in choice for choice in post(served, path, body)["choices"])
        body["speculation"] = {"depth": 3, "summary": True}
        assert [c["speculation"] for c in post(served, path, body)["choices"]] == [self.EXPECTED] * 2
        shown = [c["choices"][0] for c in stream(served, path, body)]
        assert all(("speculation" in c) == (c["finish_reason"] is not None) for c in shown)
        assert [c["speculation"] for c in shown if c["finish_reason"]] == [self.EXPECTED] * 2

    def test_a_stop_string_does_not_lose_it(self, served: Served) -> None:
        """The engine does not know of the end; what it said with that block counts."""
        body = text_body("abcdef", stop="f", max_tokens=50, speculation={"depth": 3, "summary": True})
        [choice] = post(served, TEXT, body)["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["speculation"]["num_rounds"] == 2

    def test_without_rounds_there_are_no_rates(self, served: Served) -> None:
        body = text_body("abc", speculation={"enabled": False, "summary": True})
        [choice] = post(served, TEXT, body)["choices"]
        assert choice["speculation"] == {
            **dict.fromkeys(("num_rounds", "num_drafted", "num_verified", "num_accepted"), 0),
            **dict.fromkeys(("accept_len", "acceptance_rate")),
            "accepted_per_pos": [],
            "top_draft_prob_per_pos": [],
        }


class TestMetrics:
    def test_counters_follow_the_rounds(self, served: Served) -> None:
        names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
        before = {name: metric(served, name) for name in names}
        per_pos = metric(served, "num_accepted_tokens_per_pos_total", position="3")
        rounds = metric(served, "num_rounds_total", depth="4")
        post(served, TEXT, text_body("abc", max_tokens=10, speculation={"depth": 4}))
        assert eventually(lambda: metric(served, names[0]) == before[names[0]] + 2)
        assert metric(served, names[1]) == before[names[1]] + 8
        assert metric(served, names[2]) == before[names[2]] + 8
        assert metric(served, "num_accepted_tokens_per_pos_total", position="3") == per_pos + 2
        assert metric(served, "num_rounds_total", depth="4") == rounds + 2
        assert (metric(served, "drafter_on"), metric(served, "drafter_failed")) == (1, 0)

    def test_what_is_not_accepted_is_rejected_or_was_not_verified(self) -> None:
        metrics = SpeculationMetrics("m")
        stats = SpeculationStats(
            max_depth=2, num_rounds=4, num_drafted=8, num_verified=6, num_accepted=3, accepted_per_pos=[2, 1]
        )

        def values() -> dict[str, float]:
            families = [f for f in metrics.families(stats) if f.name.endswith("tokens")]
            return {f.name.removeprefix("paceline:spec_decode_num_"): f.samples[0].value for f in families}

        once = {"draft_tokens": 8, "accepted_tokens": 3, "rejected_tokens": 3, "unverified_tokens": 2}
        assert values() == once
        assert values() == once
        stats = SpeculationStats(num_drafted=1, num_verified=1)  # another life of the engine
        assert values() == {**once, "draft_tokens": 9, "rejected_tokens": 4}


class TestWithoutDrafter:
    def test_none_means_none(self, serve: Callable[..., Served]) -> None:
        served = serve("--draft", "none")
        assert served.client.get("/health").json()["speculation"] == {
            "status": "off",
            "depth": 0,
            "max_depth": 0,
        }
        assert served.client.get("/v1/models").json()["data"][0]["draft"] is None
        assert metric(served, "drafter_on") == 0
        response = served.client.post(TEXT, json=text_body(speculation={"depth": 1}))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == (
            "speculation.depth must be at most 0, got 1: there is no drafter (setting draft)"
        )
        post(served, TEXT, text_body(speculation={"depth": 0, "summary": True}))

    def test_a_drafter_that_fails_is_told_everywhere_and_harms_nobody(
        self, serve: Callable[..., Served]
    ) -> None:
        served = serve("--depth", "1", "--max-depth", "4")
        assert served.client.get("/health").json()["speculation"]["depth"] == 1
        answer = post(served, TEXT, text_body("<|undraft|>abc", max_tokens=9, speculation={"depth": 4}))
        assert answer["usage"]["completion_tokens"] == 9
        health = served.client.get("/health")
        assert health.status_code == 200
        assert health.json() == {
            "status": "ok",
            "speculation": {
                "status": "failed",
                "depth": 0,
                "max_depth": 4,
                "draft": "ngram",
                "reason": "RuntimeError: no drafts today",
            },
        }
        assert (metric(served, "drafter_on"), metric(served, "drafter_failed")) == (0, 1)
        asked = text_body("abc", speculation={"depth": 4, "summary": True})
        assert post(served, TEXT, asked)["choices"][0]["speculation"]["num_rounds"] == 0
        code, log = served.stop()
        assert code == 0
        assert log.count("the drafter failed and stays off") == 1
        assert "RuntimeError: no drafts today" in log

    def test_a_policy_that_fails_is_told_too_and_requests_may_still_ask_for_a_depth(
        self, serve: Callable[..., Served]
    ) -> None:
        served = serve("--depth", "1", "--max-depth", "4")
        assert metric(served, "policy_failed") == 0
        post(served, TEXT, text_body("<|misrule|>abc", max_tokens=9))
        assert served.client.get("/health").json() == {
            "status": "ok",
            "speculation": {
                "status": "on",
                "depth": 0,
                "max_depth": 4,
                "draft": "ngram",
                "reason": "the policy failed: ZeroDivisionError: no such luck",
            },
        }
        assert (metric(served, "policy_failed"), metric(served, "drafter_failed")) == (1, 0)
        asked = text_body("abc", speculation={"depth": 4, "summary": True})
        assert post(served, TEXT, asked)["choices"][0]["speculation"]["num_rounds"] > 0
        code, log = served.stop()
        assert code == 0
        assert "the policy failed; from now on" in log


class TestPython:
    @pytest.fixture
    def tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
        monkeypatch.setattr(llm, "build", fake_engine.build)
        return LLM(str(write_tiny_model(tmp_path / "tiny")), draft="ngram")

    def test_a_summary_when_asked_for(self, tiny: LLM) -> None:
        params = [
            SamplingParams(max_tokens=10, depth=3, speculation_summary=True),
            SamplingParams(max_tokens=10),
        ]
        asked, plain = tiny.generate(["abc", "abc"], params, progress=False)
        assert asked.text == plain.text
        summary = asked.choices[0].speculation
        assert isinstance(summary, SpeculationSummary)
        assert (summary.num_rounds, summary.accept_len, summary.acceptance_rate) == (3, 4.0, 1.0)
        assert plain.choices[0].speculation is None

    def test_too_deep_is_refused(self, tiny: LLM) -> None:
        with pytest.raises(RequestError, match=r"prompts\[0\]: depth must be at most 8, got 9") as caught:
            tiny.generate("abc", SamplingParams(depth=9), progress=False)
        assert caught.value.param == "depth"
        with pytest.raises(RequestError, match="depth must be at least 0, got -1"):
            SamplingParams(depth=-1)


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        (SpeculationOptions(), None),
        (SpeculationOptions(enabled=True), None),
        (SpeculationOptions(enabled=False), 0),
        (SpeculationOptions(depth=0), 0),
        (SpeculationOptions(enabled=True, depth=5), 5),
    ],
)
def test_what_depth_is_asked_for(options: SpeculationOptions, depth: int | None) -> None:
    assert options.asked_depth() == depth
