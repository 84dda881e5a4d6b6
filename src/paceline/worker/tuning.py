"""From how many tokens a step the bfloat16 matrices beat the packed ones: measured once, then remembered.

The answer depends on the processor (bfloat16 instructions or not), the matrices' shapes and the threads,
so those make the key of the cache file.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline._version import __version__
from paceline.kernels.parallel import Program, Team
from paceline.models.phases import Products
from paceline.models.weights import Layer, Matrix

logger = logging.getLogger(__name__)

_SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROUNDS = 9


def max_packed_tokens(layer: Layer, team: Team, cache_file: Path) -> int:
    """The largest step, in tokens, for which the packed kernels are not slower than the dense copies.

    Measured on one layer's matrices unless `cache_file` has it; an unreadable or unwritable cache only
    costs the measurement.
    """
    matrices = (layer.qkv, layer.o, layer.gate_up, layer.down)
    key = _key(matrices, team.num_threads)
    known = _read(cache_file)
    if key not in known:
        known[key] = _measure(matrices, team)
        _write(cache_file, known)
        logger.info("packed kernels are used up to %d tokens a step (measured)", known[key])
    return known[key]


def _key(matrices: tuple[Matrix, ...], num_threads: int) -> str:
    shapes = ",".join(
        f"{p.family}/{p.format.bits}/{p.format.block}/{p.scales.itemsize}:{p.num_rows}x{p.num_columns}"
        for p in (m.packed for m in matrices)
        if p is not None
    )
    return f"{processor()}|{num_threads}|{torch.__version__}|{__version__}|{shapes}"


def processor() -> str:
    """Model name and the instruction sets that decide the answer."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    flags = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"} & set(facts.get("flags", "").split())
    return f"{facts.get('model name', platform.processor())} {' '.join(sorted(flags))}"


def _measure(matrices: tuple[Matrix, ...], team: Team) -> int:
    """The last size before the dense matrices win, by the best of a few rounds; at least the first size.

    Sides and sizes take turns, so that a machine that is busy for a while slows all of them.
    """
    timers = {size: _timers(matrices, size, team) for size in _SIZES}
    rounds = [[(_seconds(p), _seconds(d)) for p, d in timers.values()] for _ in range(_ROUNDS)]
    best = _SIZES[0]
    for size, times in zip(timers, zip(*rounds, strict=True), strict=True):
        if min(packed for packed, _ in times) > min(dense for _, dense in times):
            return best
        best = size
    return best


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _timers(
    matrices: tuple[Matrix, ...], size: int, team: Team
) -> tuple[Callable[[], None], Callable[[], None]]:
    make, phases, inputs = Products(team, eps=0.0), [], []
    for m in matrices:
        assert m.packed is not None
        x, y = torch.randn(size, m.packed.num_columns), torch.empty(size, m.packed.num_rows)
        phases.append(make.gemm(m.packed, x, y))
        inputs.append((m, x))

    program = Program(phases)

    def packed() -> None:
        team.run(program)

    def dense() -> None:
        for matrix, x in inputs:
            matrix(x)

    packed()
    dense()
    return packed, dense


def _read(path: Path) -> dict[str, int]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(k, str) and isinstance(v, int)}


def _write(path: Path, known: dict[str, int]) -> None:
    """Replace the file whole, so that two processes at once leave a valid one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
