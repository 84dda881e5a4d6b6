"""`LLM` over the fake engine, in this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from tiny_model import write_tiny_model

from paceline import LLM, SamplingParams, llm
from paceline.config import EngineConfig
from paceline.engine.factory import BuiltEngine
from paceline.errors import ConfigError, EngineDeadError, PacelineError, RequestError


@pytest.fixture
def make_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(llm, "build", fake_engine.build)
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    model = write_tiny_model(tmp_path / "tiny")
    return lambda **settings: LLM(str(model), **{"draft": "ngram", "depth": 2, **settings})


@pytest.fixture
def tiny(make_llm: Any) -> Iterator[LLM]:
    with make_llm() as made:
        yield made


def test_one_prompt_or_several_as_text_or_ids(tiny: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    ids = tiny.tokenizer.encode("cd")
    assert [c.text for c in tiny.generate("ab", params, progress=False)] == ["abab"]
    assert [c.text for c in tiny.generate(ids, params, progress=False)] == ["cdcd"]
    mixed = tiny.generate(["ab", ids], params, progress=False)
    assert [(c.prompt, c.prompt_ids[0], c.text) for c in mixed] == [
        ("ab", tiny.tokenizer.encode("a")[0], "abab"),
        (None, ids[0], "cdcd"),
    ]
    assert tiny.generate([], params, progress=False) == []


def test_results_come_in_order_whatever_ends_first(tiny: LLM) -> None:
    lengths = [30, 1, 17, 2, 9]
    prompts = [f"{n}:" for n in lengths]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    for prompt, n, completion in zip(
        prompts, lengths, tiny.generate(prompts, params, progress=False), strict=True
    ):
        assert (completion.prompt, len(completion.token_ids)) == (prompt, n)
        assert completion.text == (prompt * n)[:n]


def test_more_prompts_than_the_queue_holds(make_llm: Any) -> None:
    small = make_llm(max_num_seqs=2, max_queue=1)
    completions = small.generate([f"{i};" for i in range(50)], SamplingParams(max_tokens=7), progress=False)
    assert [c.text for c in completions] == [(f"{i};" * 7)[:7] for i in range(50)]


def test_choices_stop_strings_and_logprobs(tiny: LLM) -> None:
    params = SamplingParams(n=2, stop=("c",), logprobs=1, max_tokens=50)
    [completion] = tiny.generate("abcd", params, progress=False)
    assert [(c.index, c.text, c.finish_reason, c.stop_reason) for c in completion.choices] == [
        (0, "ab", "stop", "c"),
        (1, "ab", "stop", "c"),
    ]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 3


def test_chat_takes_one_conversation_or_several(tiny: LLM) -> None:
    hello, bye = ([{"role": "user", "content": text}] for text in ("hello", "bye"))
    assert [c.text for c in tiny.chat(hello, progress=False)] == ["user\nhello"]
    assert [c.text for c in tiny.chat([hello, bye], progress=False)] == ["user\nhello", "user\nbye"]


def test_stream_yields_as_it_goes_and_aborts_when_left(tiny: LLM, tmp_path: Path) -> None:
    pieces = tiny.stream("abc", SamplingParams(max_tokens=1000))
    assert [next(pieces).text for _ in range(2)] == ["abc", "abc"]
    pieces.close()
    assert (tmp_path / "journal").read_text().splitlines()[-1].startswith("abort")


def test_streams_may_be_read_in_turns(tiny: LLM) -> None:
    first, second = (tiny.stream(prompt, SamplingParams(max_tokens=12)) for prompt in ("ab", "cd"))
    ones, twos = [next(first).text], [next(second).text]
    assert tiny.generate("ef", SamplingParams(max_tokens=16), progress=False)[0].text == "ef" * 8
    ones.append(next(first).text)
    twos += [delta.text for delta in second]
    ones += [delta.text for delta in first]
    assert ("".join(ones), "".join(twos)) == ("ab" * 6, "cd" * 6)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompts must be a text, token ids or a list of these, got NoneType"),
        ([1, "a"], r"prompts\[0\]: a prompt must be a text or a list of token ids"),
        (["a", [1.5]], r"prompts\[1\]: a prompt must be a text or a list of token ids"),
        ([{"prompt": "a"}], r"prompts\[0\]: a prompt must be"),
    ],
)
def test_what_is_no_prompt_is_refused(tiny: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        tiny.generate(prompts, progress=False)


def test_a_prompt_that_is_too_long_is_named_before_anything_runs(tiny: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt has 4096 tokens"):
        tiny.generate(["ok", "x" * 4096], progress=False)
    assert not (tmp_path / "journal").exists()


def test_parameters_must_be_one_or_one_each(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params for 3 prompts"):
        tiny.generate(["a", "b", "c"], [SamplingParams()] * 2, progress=False)


def test_ctrl_c_ends_the_call_and_leaves_the_object_usable(tiny: LLM, tmp_path: Path) -> None:
    def interrupt() -> None:
        time.sleep(0.15)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        tiny.generate(["<|slow|>a"] * 3, SamplingParams(max_tokens=4000), progress=False)
    journal = (tmp_path / "journal").read_text().splitlines()
    assert sum(line.startswith("abort") for line in journal) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tiny.generate("ab", SamplingParams(max_tokens=2), progress=False)[0].text == "ab"


def test_an_engine_that_fails_says_so(tiny: LLM) -> None:
    with pytest.raises(EngineDeadError, match="boom"):
        tiny.generate("<|raise|>", progress=False)
    with pytest.raises(EngineDeadError):
        tiny.generate("ab", progress=False)


def test_progress_shows_the_rate(
    tiny: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.generate(["ab"] * 3, SamplingParams(max_tokens=5))
    assert capsys.readouterr().err == ""  # nobody watches a file
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tiny.generate(["ab"] * 3, SamplingParams(max_tokens=5))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "tok/s" in shown


def test_settings_are_checked_and_a_closed_object_says_so(make_llm: Any) -> None:
    with pytest.raises(ConfigError, match="page_size must be a power of two, got 3"):
        make_llm(page_size=3)
    for name, value, kind in (
        ("threads", 1.5, "a whole number"),
        ("page_size", True, "a whole number"),
        ("max_queue", None, "a whole number"),
        ("debug", "no", "true or false"),
        ("model", 5, "text"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be {kind}, got {value!r}"):
            EngineConfig(**{name: value})
    with pytest.raises(TypeError, match="no_such_setting"):
        make_llm(no_such_setting=1)
    made = make_llm()
    made.close()
    with pytest.raises(PacelineError, match="closed"):
        made.generate("a", progress=False)


def test_the_engine_gets_the_path_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_llm: Any
) -> None:
    seen: list[EngineConfig] = []

    def build(config: EngineConfig) -> BuiltEngine:
        seen.append(config)
        return fake_engine.build(config)

    monkeypatch.setattr(llm, "build", build)
    make_llm(max_queue=7)
    assert (seen[0].model, seen[0].max_queue) == (str(tmp_path / "tiny"), 7)
