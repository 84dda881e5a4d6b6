"""Teams and programs: every task once, phases in order, whoever else wants the processor."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.parallel import Kernel, Phase, Program, Team, arg, arg_f32
from paceline.kernels.simd import load_i64, store_f32, store_i64

_HOG = "while True: pass"


def _count(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """Add one to each of the tasks' cells, and note thread and token."""
    for i in range(begin, end):
        store_i64(arg(args, 0) + i * 8, load_i64(arg(args, 0) + i * 8) + 1)
    store_i64(arg(args, 1) + begin * 8, thread)
    store_i64(arg(args, 2), token)


def _spread(args: int, thread: int, token: int, begin: int, end: int) -> None:
    """target[i] = sum of source + i: right only if the phase before has ended."""
    source, target, size = arg(args, 0), arg(args, 1), arg(args, 2)
    for i in range(begin, end):
        total = 0
        for j in range(size):
            total += load_i64(source + j * 8)
        store_i64(target + i * 8, total + i)


def _fill(args: int, thread: int, token: int, begin: int, end: int) -> None:
    for i in range(begin, end):
        store_f32(arg(args, 0) + i * 4, arg_f32(args, 1))


count, spread, fill = Kernel(_count), Kernel(_spread), Kernel(_fill)


class Chain:
    """Phases that alternate between two arrays, each needing the whole of the one before."""

    def __init__(self, size: int = 25, num_phases: int = 12) -> None:
        self.arrays = np.ones(size, np.int64), np.zeros(size, np.int64)
        self.num_phases = num_phases
        phases = []
        for i in range(num_phases):
            source, target = self.arrays[i % 2], self.arrays[1 - i % 2]
            phases.append(spread.bind(source, target, size, num_tasks=size, step=(1, 3, 12)[i % 3]))
        self.program = Program(phases)

    def check(self) -> None:
        """Start anew before a run, with `reset`; afterwards the last array must be this."""
        size = len(self.arrays[0])
        values = np.ones(size, np.uint64)
        for _ in range(self.num_phases):
            values = values.sum() + np.arange(size, dtype=np.uint64)
        np.testing.assert_array_equal(self.arrays[self.num_phases % 2].view(np.uint64), values)

    def reset(self) -> None:
        self.arrays[0][:], self.arrays[1][:] = 1, 0


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """As many endless loops as a small machine has cores, in other processes."""
    hogs = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(2)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


def kernel_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("paceline-kernel")}


@settings(max_examples=60, deadline=None)
@given(num_tasks=st.integers(0, 200), step=st.integers(1, 70), size=st.integers(0, 2), runs=st.integers(1, 5))
def test_every_task_runs_once(teams: list[Team], num_tasks: int, step: int, size: int, runs: int) -> None:
    team, counts, threads = teams[size], np.zeros(200, np.int64), np.full(200, -1, np.int64)
    phase = count.bind(counts, threads, np.zeros(1, np.int64), num_tasks=num_tasks, step=step)
    program = Program([phase])
    for _ in range(runs):
        team.run(program)
    assert counts.tolist() == [runs] * num_tasks + [0] * (200 - num_tasks)
    assert threads.max() < team.num_threads


def test_the_number_of_tasks_is_read_at_every_run(teams: list[Team]) -> None:
    for team in teams:
        counts, num_tasks = np.zeros(50, np.int64), np.zeros(1, np.int64)
        noted = np.zeros(50, np.int64), np.zeros(1, np.int64)
        program = Program([count.bind(counts, *noted, num_tasks=num_tasks)])
        for wanted in (0, 1, 50, 7, 0):
            num_tasks[0] = wanted
            team.run(program)
        assert counts.tolist() == [3] + [2] * 6 + [1] * 43


def test_arguments_may_change_between_runs(teams: list[Team]) -> None:
    first, second = np.zeros(8, np.float32), np.zeros(8, np.float32)
    phase = fill.bind(first, 0.1, num_tasks=8)
    program = Program([phase])
    teams[1].run(program)
    phase.set(0, second.ctypes.data)
    first[:] = 7.0
    teams[1].run(program)
    assert first.tolist() == [7.0] * 8
    assert second.tolist() == [np.float32(0.1)] * 8


def test_every_run_of_every_phase_has_its_token(teams: list[Team]) -> None:
    token, cells = np.zeros(1, np.int64), np.zeros(1, np.int64)
    phase = count.bind(cells, np.zeros(1, np.int64), token, num_tasks=1)
    seen = set()
    for num_phases in (1, 2, 3):
        program = Program([phase] * num_phases)
        for _ in range(20):
            teams[1].run(program)
            seen.add(int(token[0]))
    assert len(seen) == 60
    assert 0 not in seen  # fresh scratch holds zeros


def test_phases_wait_for_each_other(teams: list[Team]) -> None:
    for team in teams:
        chain = Chain()
        for _ in range(300):
            chain.reset()
            team.run(chain.program)
            chain.check()


@pytest.mark.usefixtures("busy_machine")
def test_results_are_right_on_a_busy_machine() -> None:
    team, chains = Team(4), [Chain(num_phases=5), Chain(size=3, num_phases=30), Chain(size=100)]
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        for chain in chains:
            chain.reset()
            team.run(chain.program)
            chain.check()
    team.close()


@pytest.mark.usefixtures("busy_machine")
def test_a_worker_that_comes_late_finds_no_task_of_the_next_run() -> None:
    """The number of tasks is set for the next step while a worker may still be looking at the last one."""
    team, counts, num_tasks = Team(4), np.zeros(64, np.int64), np.zeros(1, np.int64)
    noted = np.zeros(64, np.int64), np.zeros(1, np.int64)
    late, other = Program([count.bind(counts, *noted, num_tasks=num_tasks)]), Chain(num_phases=2)
    runs, deadline = 0, time.monotonic() + 2.0
    while time.monotonic() < deadline:
        num_tasks[0] = 2
        team.run(late)
        num_tasks[0] = 64
        team.run(other.program)
        runs += 1
    assert counts.tolist() == [runs] * 2 + [0] * 62
    team.close()


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize(("is_started", "num_runs"), [(False, 5_000), (True, 3_000)])
def test_programs_may_be_dropped_while_workers_lag(is_started: bool, num_runs: int) -> None:
    """A worker that was put aside looks at a job long after its end: it must still be there."""
    team = Team(3)
    for i in range(num_runs):
        cells = np.zeros(6, np.int64)
        phases = [count.bind(cells, np.zeros(6, np.int64), np.zeros(1, np.int64), num_tasks=6)] * 3
        (team.start if is_started else team.run)(Program(phases))
        team.finish()
        assert cells.tolist() == [3] * 6, i
    team.close()


def test_a_started_program_has_ended_when_somebody_asks(teams: list[Team]) -> None:
    """By `finish`, by the next run, or by the next start."""
    for team in teams:
        first, second = Chain(), Chain(num_phases=7)
        for i in range(300):
            first.reset()
            team.start(first.program)
            if i % 3 == 0:
                team.finish()
                first.check()
            second.reset()
            (team.run if i % 2 else team.start)(second.program)
            first.check()
            team.finish()
            second.check()
            team.finish()  # harmless


def test_a_started_program_goes_on_without_its_caller() -> None:
    team, chain = Team(2), Chain(num_phases=40)
    team.start(chain.program)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            chain.check()
            break
        except AssertionError:
            time.sleep(0.001)
    chain.check()
    team.close()


def test_what_was_lent_lives_until_the_end() -> None:
    team, chain = Team(2), Chain(num_phases=2)

    class Lent:
        pass

    lent = Lent()
    seen = weakref.ref(lent)
    team.start(chain.program, lent)
    del lent
    gc.collect()
    assert seen() is not None
    team.finish()
    assert seen() is None
    team.close()


def test_teams_work_side_by_side() -> None:
    failures: list[BaseException] = []

    def work(team: Team) -> None:
        try:
            chain = Chain()
            for _ in range(200):
                chain.reset()
                team.run(chain.program)
                chain.check()
        except BaseException as failure:
            failures.append(failure)

    made = [Team(2) for _ in range(3)]
    threads = [threading.Thread(target=work, args=(team,)) for team in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for team in made:
        team.close()
    assert not failures


def test_the_count_of_runs_may_wrap() -> None:
    """A server that runs for weeks comes to the 31 bits that a run's number has."""
    team, chain = Team(3), Chain()
    team.run(chain.program)
    generation = ctypes.c_int64.from_address(team._base)
    generation.value = 2**31 - 4
    for _ in range(8):
        chain.reset()
        team.run(chain.program)
        chain.check()
    assert generation.value == 5
    team.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="teams have one thread here")
def test_close_ends_the_threads() -> None:
    before = kernel_threads()
    team = Team(4)
    assert len(kernel_threads() - before) == 3
    time.sleep(0.1)  # the workers sleep by now
    team.close()
    assert kernel_threads() == before
    team.close()  # harmless


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="teams have one thread here")
@pytest.mark.parametrize("pause", [0.0, 0.1], ids=["spinning", "sleeping"])
def test_a_forgotten_team_ends_its_threads(pause: float) -> None:
    before = kernel_threads()
    for _ in range(20):
        team, chain = Team(3), Chain(num_phases=2)
        team.run(chain.program)
        mine = kernel_threads() - before
        assert len(mine) == 2
        time.sleep(pause / 10)
        del team
        for thread in mine:
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_an_idle_worker_sleeps() -> None:
    team, chain = Team(2), Chain()
    team.run(chain.program)
    time.sleep(0.3)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1
    team.run(chain.program)  # and wakes up
    team.close()


def test_a_phase_keeps_its_arrays_alive(teams: list[Team]) -> None:
    def phase() -> Phase:
        source, target = np.arange(1000), np.zeros(1000, np.int64)
        return spread.bind(source, target, 1000, num_tasks=1000)

    program = Program([phase(), phase()])
    gc.collect()
    np.full(100_000, -1).copy()  # takes what would have been freed
    teams[1].run(program)
    target = program._phases[0]._kept[1]
    assert isinstance(target, np.ndarray)
    np.testing.assert_array_equal(target, 499_500 + np.arange(1000))
