"""Runs programs of kernels on a small team of threads.

A *kernel* is a C function `void f(args, thread, token, begin, end)` that does tasks [begin, end) of a phase;
a *program* is a list of phases that run one after another, each spread over the team. The whole of a program
is one native call.

Threads take tasks from a counter, so that a thread which the system has put aside delays nobody unless it
holds a task: on a busy machine an OpenMP region waits for its slowest thread at every barrier, here the
others simply do its share. (Measured beside a process that keeps one of two cores busy: see
`benchmarks/`.) Idle workers spin for a moment, then sleep on a semaphore.

Where unnamed POSIX semaphores do not exist (macOS) a team is its calling thread alone.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils

from paceline.kernels.simd import load_f32, load_i64, op

_I64 = ir.IntType(64)
_SPINS = 20_000  # polls of an idle worker before it sleeps: a few hundred microseconds
_SPINS_BEFORE_YIELD = 2_000
_MAX_KEPT = 1_000
_MAX_GENERATION = 2**31 - 1  # of the runs' numbers, which share a word with a task's: then from 1 again

# Places in a team's memory, in int64. Each hot word has its own cache line.
_GENERATION, _JOB, _STOP, _NUM_WORKERS, _SEM_WAIT, _SEM_POST, _YIELD = 0, 8, 16, 24, 25, 26, 27
_WORKERS, _WORKER_WORDS = 32, 16  # per worker: sleeping and busy flags, then at +8 its semaphore
_PHASE_WORDS = 4  # kernel, args, address of the number of tasks, tasks taken at a time
_COUNTER_WORDS = 16  # generation << 32 | next task, the number of tasks, then at +8 the tasks done


def _pointer(b: Any, address: Any) -> Any:
    return b.inttoptr(address, _I64.as_pointer())


@op(types.int64, types.int64)
def _get(b: Any, address: Any) -> Any:
    return b.load_atomic(_pointer(b, address), "seq_cst", 8)


@op(types.void, types.int64, types.int64)
def _set(b: Any, address: Any, value: Any) -> None:
    b.store_atomic(value, _pointer(b, address), "seq_cst", 8)


@op(types.int64, types.int64, types.int64)
def _add(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", _pointer(b, address), value, "seq_cst")


@op(types.boolean, types.int64, types.int64, types.int64)
def _replace(b: Any, address: Any, old: Any, new: Any) -> Any:
    swapped = b.cmpxchg(_pointer(b, address), old, new, "seq_cst", "seq_cst")
    return b.extract_value(swapped, 1)


@op(types.void, types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
def _call_kernel(b: Any, address: Any, *args: Any) -> None:
    fn = ir.FunctionType(ir.VoidType(), [_I64] * 5)
    b.call(b.inttoptr(address, fn.as_pointer()), args)


@op(types.void, types.int64, types.int64)
def _call_with(b: Any, address: Any, pointer: Any) -> None:
    """`int f(void *)`, also for `int f(void)`: the extra register is ignored."""
    fn = ir.FunctionType(ir.IntType(32), [_I64])
    b.call(b.inttoptr(address, fn.as_pointer()), [pointer])


@op(types.void, types.int64)
def _pause(b: Any, _unused: Any) -> None:
    """Tell the core that this is a spin loop."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        fn_type = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, fn_type, "llvm.x86.sse2.pause"), [])
    elif machine in ("aarch64", "arm64"):
        fn_type = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        b.call(cgutils.get_or_insert_function(b.module, fn_type, "llvm.aarch64.hint"), [ir.IntType(32)(1)])


@njit  # type: ignore[untyped-decorator]
def _phases(team: int, job: int, generation: int, thread: int) -> None:
    """Take part in the job; leave when it is over or has been replaced by another."""
    num_phases, phases, counters = load_i64(job), load_i64(job + 8), load_i64(job + 16)
    for p in range(num_phases):
        phase, counter = phases + p * _PHASE_WORDS * 8, counters + p * _COUNTER_WORDS * 8
        kernel, args = load_i64(phase), load_i64(phase + 8)
        num_tasks, step = _get(counter + 8), load_i64(phase + 24)
        token = (generation << 20) + p
        while True:
            taken = _get(counter)
            if taken >> 32 != generation:
                return
            begin = taken & 0xFFFFFFFF
            if begin >= num_tasks:
                break
            if not _replace(counter, taken, taken + step):
                continue
            end = min(begin + step, num_tasks)
            _call_kernel(kernel, args, thread, token, begin, end)
            _add(counter + 64, end - begin)
        spins = 0
        while _get(counter + 64) < num_tasks:
            if _get(counter) >> 32 != generation:
                return
            _pause(0)
            spins += 1
            if spins > _SPINS_BEFORE_YIELD:
                _call_with(load_i64(team + _YIELD * 8), 0)


@njit  # type: ignore[untyped-decorator]
def _publish(team: int, job: int) -> int:
    """Make the job the team's, and wake who sleeps; returns the run's number."""
    generation = load_i64(team + _GENERATION * 8) % _MAX_GENERATION + 1
    counters = load_i64(job + 16)
    for p in range(load_i64(job)):
        phase, counter = load_i64(job + 8) + p * _PHASE_WORDS * 8, counters + p * _COUNTER_WORDS * 8
        # In this order: who reads what belongs to this run finds its generation, too. The number of tasks is
        # a copy, since a worker may come late to a run, when the caller has already set the next one's.
        _set(counter, generation << 32)
        _set(counter + 8, load_i64(load_i64(phase + 16)))
        _set(counter + 64, 0)
    _set(team + _JOB * 8, job)
    _set(team + _GENERATION * 8, generation)
    for w in range(load_i64(team + _NUM_WORKERS * 8)):
        worker = team + (_WORKERS + w * _WORKER_WORDS) * 8
        if _get(worker) != 0:
            _call_with(load_i64(team + _SEM_POST * 8), worker + 64)
    return generation  # type: ignore[no-any-return]


def _run(team: int, job: int) -> None:
    _phases(team, job, _publish(team, job), 0)


def _start(team: int, job: int) -> None:
    _publish(team, job)


def _finish(team: int, job: int) -> None:
    """The calling thread's part in the job that was published last."""
    _phases(team, job, load_i64(team + _GENERATION * 8), 0)


def _work(team: int, thread: int) -> None:
    """A worker's life: wait for a job, take part, wait again."""
    worker = team + (_WORKERS + (thread - 1) * _WORKER_WORDS) * 8
    seen, spins = 0, 0
    while _get(team + _STOP * 8) == 0:
        generation = _get(team + _GENERATION * 8)
        if generation != seen:
            seen, spins = generation, 0
            _set(worker + 8, 1)  # busy, before the job is looked up: see Team.run
            _phases(team, _get(team + _JOB * 8), generation, thread)
            _set(worker + 8, 0)
            continue
        spins += 1
        if spins < _SPINS:
            _pause(0)
            continue
        _set(worker, 1)
        if _get(team + _GENERATION * 8) == seen and _get(team + _STOP * 8) == 0:
            _call_with(load_i64(team + _SEM_WAIT * 8), worker + 64)
        _set(worker, 0)
        spins = 0


@functools.cache
def _native(function: Callable[[int, int], None]) -> Any:
    """A callable that releases the GIL, from `void f(int64, int64)`."""
    compiled = cfunc(types.void(types.int64, types.int64), cache=True)(function)
    return compiled, ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(compiled.address)


@njit(inline="always")  # type: ignore[untyped-decorator]
def arg(args: int, index: int) -> int:
    """A kernel's argument `index`, as int64."""
    return load_i64(args + index * 8)  # type: ignore[no-any-return]


@njit(inline="always")  # type: ignore[untyped-decorator]
def arg_f32(args: int, index: int) -> float:
    """A kernel's argument `index`, bound as a Python float, as float32."""
    return load_f32(args + index * 8)  # type: ignore[no-any-return]


def address_of(array: np.ndarray[Any, Any] | torch.Tensor) -> int:
    """Address of the first element."""
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return int(array.__array_interface__["data"][0])


class Kernel:
    """A function of this module's convention, compiled when first needed and cached on disk.

    It must stand at module level, so that numba's cache can find its code again. `thread` is the
    index of the calling thread in its team; `token` differs for every run of every phase.
    """

    def __init__(self, function: Callable[[int, int, int, int, int], None]) -> None:
        self._function = function

    @functools.cached_property
    def address(self) -> int:
        """Address of the compiled function."""
        # The error model: a kernel has nobody to raise an exception to.
        self._compiled = cfunc(types.void(*[types.int64] * 5), cache=True, error_model="numpy")(
            self._function
        )
        return int(self._compiled.address)

    def bind(self, *args: Argument, num_tasks: int | np.ndarray[Any, Any], step: int = 1) -> Phase:
        """A phase with these arguments: numbers as they are, arrays by address (and kept alive).

        Args:
            num_tasks: how many; an int64 array of one element is read anew at every run.
            step: tasks that a thread takes at a time.
        """
        return Phase(self, args, num_tasks, step)


Argument = int | float | np.ndarray[Any, Any] | torch.Tensor


class Phase:
    """A kernel with its arguments and its number of tasks: made once, run many times."""

    __slots__ = ("_args", "_kept", "_num_tasks", "words")

    def __init__(
        self, kernel: Kernel, args: tuple[Argument, ...], num_tasks: int | np.ndarray[Any, Any], step: int
    ) -> None:
        self._args = np.zeros(len(args), np.int64)
        for i, value in enumerate(args):
            if isinstance(value, float):
                self._args.view(np.float32)[2 * i] = value
            else:
                self._args[i] = value if isinstance(value, int) else address_of(value)
        self._num_tasks = np.array([num_tasks], np.int64) if isinstance(num_tasks, int) else num_tasks
        self._kept = args
        self.words = (kernel.address, address_of(self._args), address_of(self._num_tasks), step)

    def set(self, index: int, value: int) -> None:
        """Change one integer argument."""
        self._args[index] = value


class Program:
    """Phases in order."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self._phases = tuple(phases)
        self._words = np.array([p.words for p in phases], np.int64)
        # A line of its own for each counter: aligned by hand, since numpy aligns to 16 bytes.
        self._memory = np.zeros(len(phases) * _COUNTER_WORDS + 8, np.int64)
        counters = -(-address_of(self._memory) // 64) * 64
        self._job = np.array([len(phases), address_of(self._words), counters], np.int64)
        self.address = address_of(self._job)


class Team:
    """`num_threads` threads, the calling one included. One program runs at a time.

    The threads end with `close`, or when the team is no longer referenced.
    """

    def __init__(self, num_threads: int) -> None:
        libc = ctypes.CDLL(None)
        can_sleep = sys.platform.startswith("linux")
        self.num_threads = num_threads if can_sleep else 1
        num_workers = self.num_threads - 1
        self._memory = np.zeros(_WORKERS + num_workers * _WORKER_WORDS + 8, np.int64)
        self._base = -(-address_of(self._memory) // 64) * 64
        words = self._memory[(self._base - address_of(self._memory)) // 8 :]
        words[_NUM_WORKERS] = num_workers
        words[_YIELD] = _function_address(libc, "sched_yield")
        if num_workers:
            words[_SEM_WAIT] = _function_address(libc, "sem_wait")
            words[_SEM_POST] = _function_address(libc, "sem_post")
        semaphores = [self._base + (_WORKERS + w * _WORKER_WORDS + 8) * 8 for w in range(num_workers)]
        for semaphore in semaphores:
            libc.sem_init(ctypes.c_void_p(semaphore), 0, 0)
        self._flags = words[_WORKERS:]
        self._kept: list[Program] = []
        self._started: Program | None = None
        self._lent: list[object] = []
        self._run, self._start, self._finish = (_native(f)[1] for f in (_run, _start, _finish))
        work = _native(_work)[1]
        self._workers = [
            threading.Thread(
                target=_live,
                args=(work, self._base, w + 1, self._memory, self._kept, self._lent),
                name=f"paceline-kernel-{w + 1}",
                daemon=True,
            )
            for w in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()
        self._end = weakref.finalize(self, _end_workers, libc, words, semaphores, self._workers)

    def run(self, program: Program) -> None:
        """Run a program to its end, after what was started before."""
        self.finish()
        self._keep(program)
        self._run(self._base, program.address)

    def start(self, program: Program, *lent: object) -> None:
        """Let the other threads run a program, after what was started before, and return meanwhile.

        It has ended when `finish` or `run` returns. Without other threads it runs at once.

        Args:
            lent: what its arguments point to and it does not keep alive itself.
        """
        if self.num_threads == 1:
            self.run(program)
            return
        self.finish()
        self._keep(program)
        self._lent[:], self._started = lent, program
        self._start(self._base, program.address)

    def finish(self) -> None:
        """Help to end the program that was started; at once if there is none."""
        if self._started is not None:
            self._finish(self._base, self._started.address)
            self._started = None
            self._lent.clear()

    def _keep(self, program: Program) -> None:
        # A worker that was put aside may look at a program long after its end, so programs are kept
        # until all workers have been seen idle. The job that one may still look up is the last one's.
        if len(self._kept) >= _MAX_KEPT:
            while any(self._flags[1::_WORKER_WORDS]):
                time.sleep(0)
            del self._kept[:-1]
        self._kept.append(program)

    def close(self) -> None:
        """End the workers and wait for them. The team cannot run anything afterwards."""
        self._end()


def _live(work: Callable[[int, int], None], base: int, thread: int, *kept: object) -> None:
    """A worker's thread; `kept` is the memory that it may look at until it ends, whoever forgets it."""
    work(base, thread)


def _end_workers(
    libc: ctypes.CDLL, words: np.ndarray[Any, Any], semaphores: list[int], workers: list[threading.Thread]
) -> None:
    """Also run when the process exits: a worker left alone would free tensors in a dying interpreter."""
    words[_STOP] = 1
    for semaphore in semaphores:
        libc.sem_post(ctypes.c_void_p(semaphore))
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()


def _function_address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
