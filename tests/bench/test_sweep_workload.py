"""Equal work for every arm, and the stretch of time that counts."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_tokenizer

from paceline.bench.local import Encoder
from paceline.bench.window import Speculation, Trace, sample
from paceline.bench.workload import PROMPTS, Column, Deal, Prompt, Workload, read_prompts
from paceline.errors import ConfigError, PacelineError

ROOT = Path(__file__).resolve().parents[2]
MIX = ROOT / "benchmarks" / "data" / "mix.jsonl"
ABC = [Prompt("a"), Prompt("b"), Prompt("c")]


def test_the_prompts_in_the_package_are_the_benchmarks_own() -> None:
    assert PROMPTS.read_bytes() == (ROOT / "benchmarks" / "data" / "prompts.jsonl").read_bytes()
    assert len(read_prompts()) == 320
    assert max(len(prompt.text) for prompt in read_prompts(max_chars=300)) <= 300
    assert {prompt.temperature for prompt in read_prompts()} == {None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"turns": 3}\n', "line 2: needs JSON"),
        ("nothing\n", "line 1: needs JSON"),
        ('{"prompt": "too long"}\n', "no prompt of at most 3 characters"),
        ("\n", "no prompt"),
        (
            '{"prompt": "a"}\n{"prompt": "b", "temperature": "hot"}',
            'line 2: temperature must be a number, got "hot"',
        ),
        ('{"prompt": "a", "temperature": true}', "line 1: temperature must be a number, got true"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: temperature must be in"),
        ('\n{"prompt": "a", "temperature": -0.1}', "line 2: temperature must be in"),
        ('{"prompt": "a", "temperature": 101}', "line 1: temperature must be in"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_prompts(path, max_chars=3)
    assert str(caught.value).startswith("--prompts: ")


def test_a_missing_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts: cannot read .*No such file"):
        read_prompts(tmp_path / "nothing")


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 400), st.integers(0, 9))
def test_work_is_the_same_for_all_and_spread_over_time(
    clients: int, answer_len: int, min_tokens: int, round_id: int
) -> None:
    workload = Workload(ABC, answer_len, min_tokens)
    work = workload.work(Column(0.0, None, clients), round_id)
    assert work == workload.work(Column(0.0, None, clients), round_id)
    lengths = [job.answer_len for job in work.jobs]
    assert len(lengths) >= 2 * clients
    assert lengths[:clients] == sorted(lengths[:clients])
    assert set(lengths[clients:]) == {answer_len}
    assert len(lengths) * answer_len >= min_tokens
    seeds = {job.seed for r in (round_id, round_id + 1) for job in workload.work(work.column, r).jobs}
    assert len(seeds) == 2 * len(lengths), "no two jobs share their noise"


def test_contexts_are_reached_to_within_a_few_tokens(tmp_path: Path) -> None:
    encoder = Encoder(tiny_tokenizer(tmp_path))
    workload = Workload([Prompt("short"), Prompt("a longer one " * 30)], 8, 8, encoder.lengthen)
    jobs = workload.work(Column(0.0, 200, 2), 0).jobs
    for job in jobs:
        assert abs(len(encoder.encode(job.prompt)) - 200) <= 4
    assert jobs[0].prompt.endswith("short")


def test_a_prompt_may_have_its_own_temperature(tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"prompt": "b", "temperature": 2}, {"turns": ["c"], "temperature": None}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    found = read_prompts(path)
    assert sorted((prompt.text, prompt.temperature) for prompt in found if prompt.temperature) == [("b", 2.0)]
    workload = Workload(found, 8, 64, natural_stop=True)
    for job in workload.work(Column(0.7, None, 2), 0).jobs:
        assert job.temperature == (2.0 if job.prompt == "b" else 0.7)
        assert job.natural_stop
    assert workload.describe() == "answers of at most 8 tokens, prompts with temperatures of their own (2)"
    assert Workload(ABC, 8, 64).describe() == "answers of exactly 8 tokens"


def test_the_mix_is_half_easy_and_half_hopeless() -> None:
    records = [json.loads(line) for line in MIX.read_text().splitlines()]
    assert [record["temperature"] for record in records] == [0, 2.0] * 20
    assert len({record["prompt"] for record in records}) == len(read_prompts(MIX)) == 40


@given(st.integers(1, 12), st.integers(1, 400), st.integers(0, 5), st.integers(0, 99))
def test_as_many_requests_of_each_kind_are_always_in_flight(
    clients: int, min_tokens: int, round_id: int, seed: int
) -> None:
    """Whichever client is done first: the slow kind never takes the place of the fast one."""
    prompts = [Prompt(text, temperature) for text in "abc" for temperature in (0.0, 2.0)]
    work = Workload(prompts, 16, min_tokens).work(Column(0.5, None, clients), round_id)
    deal, draw = Deal(work), random.Random(seed)
    flying = list(deal.firsts)
    assert len(flying) == clients
    done = []
    while True:
        kinds = Counter(job.temperature for job in flying)
        assert clients == 1 or abs(kinds[0.0] - kinds[2.0]) <= 1
        done.append(flying.pop(draw.randrange(clients)))
        following = deal.after(done[-1])
        if following is None:
            break
        flying.append(following)
    seeds = [job.seed for job in (*done, *flying)]
    assert len(set(seeds)) == len(seeds), "no job is dealt twice"
    assert len(done) > clients // 2, "every client of a kind was busy until one found no job"


def trace(begin: float, times: list[float], num: float = 1.0, finished: bool = True) -> Trace:
    return Trace(begin, [(time, num) for time in times], times[-1] if finished else None)


def test_only_the_time_when_all_clients_are_busy_counts() -> None:
    traces = [
        trace(0.0, [1.0, 2.0, 3.0, 4.0]),  # client 1, whose next job is the third
        trace(0.0, [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], finished=False),  # the second client's only job
        trace(4.0, [5.0, 6.0]),  # ends at 6, and client 1 finds no job left
    ]
    got = sample(traces, concurrency=2)
    # From 2 (both have a first token) to 6: 3, 4 | 3, 4, 5, 6 | 5, 6.
    assert (got.num_tokens, got.seconds, got.rate) == (8.0, 4.0, 2.0)
    assert got.tpot == 1.0
    assert got.ttft == 1.0


def test_tokens_that_come_together_are_paced_by_what_followed() -> None:
    assert trace(0.0, [1.0, 2.0, 3.0], num=3.0).tpot == pytest.approx(2.0 / 6)
    assert trace(0.0, [1.0]).tpot is None


def test_no_window_is_an_error() -> None:
    with pytest.raises(PacelineError, match=r"never busy together.*--answer-len"):
        sample([trace(0.0, [5.0]), trace(0.0, [9.0, 10.0]), trace(5.0, [6.0])], concurrency=2)


def test_an_answer_that_ends_at_once_leaves_its_client_busy() -> None:
    traces = [
        Trace(0.0, [], end=3.0),  # nothing came of it; its client goes on with the third job
        trace(0.0, [2.0, 4.0, 6.0, 8.0], finished=False),
        trace(3.0, [4.0, 5.0, 6.0]),
    ]
    got = sample(traces, concurrency=2, num_steps=9)
    # From 3 to 6: 4, 6 | 4, 5, 6.
    assert (got.num_tokens, got.seconds, got.num_steps) == (5.0, 3.0, 9)
    with pytest.raises(PacelineError, match="answers are empty"):
        sample([Trace(0.0, [], end=1.0), Trace(1.0, [], end=2.0)], concurrency=1)


def test_acceptance_divides_by_the_rounds_that_drafted_so_far() -> None:
    drafted = Speculation(30, 50, 24, (18, 6), (100, 10, 20))
    assert drafted.acceptance_per_pos == [18 / 30, 6 / 20]
    assert drafted.accept_len == pytest.approx(1 + 24 / 30)
    assert drafted.mean_depth == pytest.approx(50 / 130)
    assert drafted.since(Speculation(10, 20, 8, (8,), (0, 0, 10))) == Speculation(
        20, 30, 16, (10, 6), (100, 10, 10)
    )
    assert drafted + Speculation(1, 3, 2, (1, 1, 0), (0, 0, 0, 1)) == Speculation(
        31, 53, 26, (19, 7, 0), (100, 10, 20, 1)
    )


def test_a_server_that_counts_no_rounds_at_depth_zero() -> None:
    drafted = Speculation(10, 40, 9, (6, 3, 0, 0, 0))
    assert drafted.acceptance_per_pos == [0.6, 0.3]
    assert drafted.mean_depth is None
