"""The processes of a running server, seen from outside. Each may end while it is looked at."""

from __future__ import annotations

from contextlib import suppress

import psutil


def is_running(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_of(server: int) -> int | None:
    """The process id of a server's engine, if there is one at the moment."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(server).children():
            with suppress(psutil.NoSuchProcess):
                if "paceline.engine.process" in child.cmdline():
                    return child.pid
    return None


def resident_bytes(pid: int) -> int:
    """Of one process. Raises psutil.NoSuchProcess once it has ended."""
    return psutil.Process(pid).memory_info().rss
