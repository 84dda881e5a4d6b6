"""The watcher against real processes of known appetite."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from process_memory import MemoryWatcher, Moment, read_tree

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")

MB = 10**6
# A parent whose child holds 60 MB; both wait until standard input closes.
PARENT = """
import subprocess, sys
code = "x = bytes(1) * 60_000_000; print(1, flush=True); input()"
subprocess.run([sys.executable, "-c", code], stdin=0)
"""


@pytest.fixture
def parent():
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.communicate(timeout=10)


def test_a_tree_includes_the_children(parent: subprocess.Popen[str]) -> None:
    processes = read_tree(parent.pid)
    assert len(processes) == 2
    biggest = max(processes.values(), key=lambda fields: fields["Pss"])
    assert 60 * MB < biggest["Pss_Anon"] < 100 * MB
    assert sum(fields["Pss"] for fields in processes.values()) - biggest["Pss"] < 30 * MB
    for fields in processes.values():
        parts = fields["Pss_Anon"] + fields["Pss_File"] + fields["Pss_Shmem"]
        assert fields["Pss"] == pytest.approx(parts, abs=16 * 1024)
        assert fields["Pss"] <= fields["Rss"]


def test_a_process_that_has_ended_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_tree(process.pid) == {}


def test_the_peak_is_kept_after_it_has_passed() -> None:
    code = "x = bytes(1) * 80_000_000; print(1, flush=True); input(); del x; print(2, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with MemoryWatcher(process.pid, interval=0.01) as watcher:
            process.stdout.readline()
            time.sleep(0.2)
            print(file=process.stdin, flush=True)
            process.stdout.readline()
            freed = watcher.seconds
            time.sleep(0.2)
        process.communicate("\n")
    assert watcher.peak().total("Pss_Anon") > 80 * MB
    assert watcher.peak(since=freed + 0.02).total("Pss_Anon") < 40 * MB


def test_totals_are_over_all_processes() -> None:
    assert Moment(0.0, {"a": {"Pss": 1}, "b": {"Pss": 2}}).total("Pss") == 3
