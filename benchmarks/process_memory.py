"""The memory of a process and all its descendants, watched from outside (Linux: /proc/PID/smaps_rollup).

PSS counts a page shared by n processes as 1/n page in each. So processes outside the tree that map the same
files make its PSS smaller than it would be alone; RSS, which counts shared pages in full in every process, is
the upper bound. Nothing is read from inside the processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_FIELDS = ("Rss", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")


@dataclass(frozen=True, slots=True)
class Moment:
    """The whole tree at one moment, in bytes: per process, by name, the fields of `smaps_rollup`."""

    seconds: float  # since the watching began
    processes: Mapping[str, Mapping[str, int]]

    def total(self, field: str) -> int:
        """Sum of a field over the processes."""
        return sum(process[field] for process in self.processes.values())


class MemoryWatcher:
    """Samples a process tree from a thread of its own; use as a context manager.

    Args:
        pid: the root of the tree.
        interval: seconds between samples.
    """

    def __init__(self, pid: int, interval: float = 0.25) -> None:
        self._pid, self._interval = pid, interval
        self._moments: list[Moment] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watcher")

    def __enter__(self) -> MemoryWatcher:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Time since the watching began."""
        return time.monotonic() - self._began

    def peak(self, since: float = 0.0) -> Moment:
        """The moment of greatest PSS. Raises ValueError if there was no sample since then."""
        return max(
            (moment for moment in self._moments if moment.seconds >= since),
            key=lambda moment: moment.total("Pss"),
        )

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            processes = read_tree(self._pid)
            if processes:
                self._moments.append(Moment(self.seconds, processes))


def read_tree(root: int) -> dict[str, dict[str, int]]:
    """The fields of every process of a tree, in bytes, by a name made of what it runs and its pid.

    Processes that end meanwhile are left out; {} when the root has ended.
    """
    found = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        folder = Path("/proc") / str(pid)
        try:
            found[_name(folder, pid)] = read_rollup(folder / "smaps_rollup")
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def read_rollup(path: Path) -> dict[str, int]:
    """The fields above, in bytes. Raises OSError if the process has ended."""
    fields = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _FIELDS:
            fields[name] = int(rest.split()[0]) * 1024
    if len(fields) != len(_FIELDS):
        raise ProcessLookupError(f"{path} has no memory to tell of")  # a zombie
    return fields


def _name(folder: Path, pid: int) -> str:
    """The module of `python -m module`, or the program's name, and the pid."""
    words = (folder / "cmdline").read_bytes().split(b"\0")
    after = words[words.index(b"-m") + 1 :] if b"-m" in words else [Path(words[0].decode()).name.encode()]
    return f"{after[0].decode()} [{pid}]"
