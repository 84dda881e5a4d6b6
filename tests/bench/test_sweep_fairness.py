"""What makes a sweep fair: loads are met before they count, tokens count whatever the lengths, kinds stay."""

from __future__ import annotations

import itertools

import pytest
from priced_bench import CONFIG, LOADS, PRICES, Bench
from priced_engine import Clock, PricedEngine, Prices, Words, built, prompts

from paceline.bench.arms import Arm, arm_of
from paceline.bench.local import Launched, LocalTarget
from paceline.bench.sweep import Target
from paceline.bench.workload import Column, Prompt, Work, Workload


def test_arms_that_adapt_have_met_the_load_before_they_count() -> None:
    arms = (arm_of("plain"), arm_of("1"), arm_of("auto"))
    bench = Bench(*arms)
    bench.sweep(loads=(1, 4), num_rounds=2).run()
    alone = bench.runs
    bench = Bench(*arms)
    sweep = bench.sweep(loads=(1, 4), num_rounds=2, warmup_steps=1000)
    steps: dict[int, int] = {1: 0, 4: 0}
    opened = bench.open

    def counting(arm: Arm) -> Target:
        target = opened(arm)

        class Counted:
            def run(self, work: Work):  # type: ignore[no-untyped-def]
                got = target.run(work)
                if arm.name == "auto" and all(m.column != work.column for m in sweep.measurements):
                    steps[work.column.concurrency] += got.num_steps
                return got

        return Counted()

    sweep._open_target = counting
    sweep.run()
    assert all(1000 <= num < 1400 for num in steps.values()), steps
    extra = [run for run in bench.runs if run not in alone]
    assert {name for name, _ in extra} == {"auto"}, "others have one round of warm-up"
    assert len({work.jobs[0].seed for _, work in extra}) > 2, "of other prompts"
    assert [run for run in bench.runs if run in alone] == alone
    assert len(sweep.measurements) == 2 * 2 * 2 * 3
    assert any("warm-up: auto has had 1" in line for line in bench.said)


def test_short_of_time_the_warm_up_gives_way_to_what_counts() -> None:
    arms = (arm_of("plain"), arm_of("auto"))
    bench = Bench(*arms)
    bench.sweep(num_rounds=2).run()
    limit = 1.2 * bench.clock.now
    bench = Bench(*arms)
    sweep = bench.sweep(num_rounds=2, warmup_steps=100_000, max_seconds=limit)
    sweep.run()
    assert bench.clock.now <= limit
    assert len(sweep.measurements) == len(LOADS) * 2 * 2 * 2


def test_warm_prompts_have_been_seen_before_the_clock_runs() -> None:
    clock = Clock()
    engine = PricedEngine(clock, PRICES, lambda _: 0, 4)
    asked: list[tuple[float, int]] = []
    add = engine.add

    def noted(request) -> None:  # type: ignore[no-untyped-def]
        asked.append((tuple(request.prompt_ids), request.params.max_tokens))
        add(request)

    engine.add = noted  # type: ignore[method-assign]
    work = Workload(prompts(), 64, 640).work(Column(0.0, None, 4), 0)
    cold = LocalTarget(Launched(CONFIG, built(engine)), Words(), None, clock)  # type: ignore[arg-type]
    expected = cold.run(work)
    timed, asked[:] = list(asked), []
    warm = LocalTarget(Launched(CONFIG, built(engine)), Words(), None, clock, warms_prompts=True)  # type: ignore[arg-type]
    got = warm.run(work)
    num_prompts = len({job.prompt for job in work.jobs})
    assert [num for _, num in asked[:num_prompts]] == [1] * num_prompts
    assert {prompt for prompt, _ in asked[:num_prompts]} >= {prompt for prompt, _ in timed}
    assert asked[num_prompts:] == timed
    assert (got.rate, got.num_tokens) == pytest.approx((expected.rate, expected.num_tokens))


def test_in_short_turns_all_arms_meet_the_same_machine() -> None:
    """One that is three times as slow every other second, about as long as the work of an arm; both alike."""

    def rates(turn_seconds: float | None) -> tuple[list[float], list[str]]:
        bench, order = Bench(arm_of("plain"), arm_of("0")), []

        def uneven(arm: Arm) -> Target:
            class Uneven(PricedEngine):
                def step(self):  # type: ignore[no-untyped-def]
                    order.append(arm.name)
                    before = self.clock.now
                    outputs = super().step()
                    if int(before) % 2:
                        self.clock.now += 2 * (self.clock.now - before)
                    return outputs

            engine = Uneven(bench.clock, PRICES, lambda _: 0, 0 if arm.role == "plain" else 4)
            return LocalTarget(Launched(CONFIG, built(engine)), Words(), arm.depth, bench.clock)  # type: ignore[arg-type]

        sweep = bench.sweep(loads=(4,), num_rounds=4)
        sweep._open_target, sweep._turn_seconds = uneven, turn_seconds
        sweep.run()
        assert sweep.failures == []
        found = {(m.arm, m.pass_id, m.round_id): m.sample.rate for m in sweep.measurements}
        return [found["depth 0", p, r] / found["plain", p, r] for p in (1, 2) for r in range(1, 5)], order

    short, order = rates(0.1)
    whole, _ = rates(None)
    assert short == pytest.approx([1.0] * 8, abs=0.06)
    assert max(abs(ratio - 1) for ratio in whole) > 0.15
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 50


def test_time_stands_still_between_turns() -> None:
    clock = Clock()
    engines = [PricedEngine(clock, PRICES, lambda _: 1, 4) for _ in range(2)]
    first, second = (LocalTarget(Launched(CONFIG, built(e)), Words(), None, clock) for e in engines)  # type: ignore[arg-type]
    work = Workload(prompts(), 64, 640).work(Column(0.0, None, 4), 0)
    whole, ride = first.run(work), second.begin(work)
    num_turns = 0
    while not ride.go_on(0.05):
        clock.now += 7.0  # others
        num_turns += 1
    got = ride.result()
    assert num_turns > 10
    assert (got.rate, got.num_tokens, got.num_steps) == pytest.approx(
        (whole.rate, whole.num_tokens, whole.num_steps)
    )
    assert not engines[1].live


def lengths(request) -> int:  # type: ignore[no-untyped-def]
    return 6 + request.params.seed * 7 % 50


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_answers_of_uneven_lengths_count_by_their_tokens(load: int, depth: int) -> None:
    clock = Clock()
    engine = PricedEngine(clock, PRICES, lambda _: depth, 4, ends_at=lengths)
    target = LocalTarget(Launched(CONFIG, built(engine)), Words(), None, clock)  # type: ignore[arg-type]
    work = Workload(prompts(), 64, 6400, natural_stop=True).work(Column(0.0, None, load), 0)
    got = target.run(work)
    assert got.num_tokens < 0.8 * work.num_tokens
    # A prompt's step gives its row one token, as a plain one does, and answers' last blocks are cut.
    assert got.rate == pytest.approx(PRICES.rate(load, depth), rel=0.02 + 0.05 * depth)
    engine.ends_at = lambda request: 1
    assert target.run(work).rate == pytest.approx(PRICES.rate(load, 0), rel=0.01)
    fixed = Workload(prompts(), 64, 6400).work(Column(0.0, None, load), 0)
    assert target.run(fixed).num_tokens > 0.9 * (fixed.num_tokens - 64 * load)


def test_both_kinds_of_a_mix_stay_in_flight() -> None:
    clock = Clock()
    seen: list[list[float]] = []

    class Watched(PricedEngine):
        def step(self):  # type: ignore[no-untyped-def]
            seen.append(sorted(entry[0].params.temperature for entry in self.live.values()))
            return super().step()

        def _depth(self, request, num_decoding: int) -> int:  # type: ignore[no-untyped-def]
            return 4 if request.params.temperature == 0.0 else 0  # the easy ones are much faster

    engine = Watched(clock, Prices(acceptance=1.0), lambda _: 0, 4)
    target = LocalTarget(Launched(CONFIG, built(engine)), Words(), None, clock)  # type: ignore[arg-type]
    mix = [Prompt(f"prompt {i}", 2.0 * (i % 2)) for i in range(8)]
    got = target.run(Workload(mix, 50, 1000).work(Column(0.7, None, 4), 0))
    assert len(seen) == got.num_steps
    assert all(temperatures == [0.0, 0.0, 2.0, 2.0] for temperatures in seen)
    assert got.rate == pytest.approx((2 * 5 + 2) / (0.010 + 0.001 * (2 * 5 + 2)), rel=0.1)
