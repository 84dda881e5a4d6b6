"""The steps of a server as a file for `paceline replay`: JSON lines in the `steps` schema of `policy.replay`.

The step's path only appends to a queue. A thread writes twice a second, so a process that is killed loses
as much. FILE has at most `max_bytes`; then it becomes FILE.1, and the FILE.1 before is gone. So does a FILE
that is there at the start: the trace of an engine that died survives its successor.

What cannot be written turns tracing off, with one warning: serving goes on. Requests appear as small
numbers. Knows nothing of the scheduler or of how decisions are made.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import threading
from collections import deque
from collections.abc import Hashable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.errors import ConfigError
from paceline.policy import CostModel, Decision
from paceline.policy.replay import SCHEMA

log = logging.getLogger(__name__)

INTERVAL = 0.5  # seconds between writes
MAX_WAITING = 20_000  # steps; beyond that the file system is too slow, and new ones are left out
MAX_KEYS = 4096  # requests whose numbers are remembered
_BEGINS = b'{"schema":'  # as the header does


def check_path(path: Path) -> None:
    """Refuse what cannot become a trace, or what somebody may miss.

    Raises:
        ConfigError: its folder is not there, or it is there and is no trace.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"trace: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"trace: {path} is not a file")
    try:
        with path.open("rb") as file:
            begins = file.read(len(_BEGINS))
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror}") from None
    if not _BEGINS.startswith(begins):  # an empty file, or one that was cut off, is nobody's loss
        raise ConfigError(f"trace: {path} is not a trace, and would be replaced")


class _Entry(NamedTuple):
    decision: Decision
    depths: tuple[int, ...]
    accepted: tuple[int, ...]
    seconds: float


class StepTrace:
    """Writes a trace until `close`, or until the file cannot be written.

    Args:
        path: FILE.
        max_bytes: of FILE; FILE.1 may be as large.
        max_depth: deepest that any row may draft.
        costs: what `paceline replay` takes a step to cost.

    Raises:
        ConfigError: it cannot be written to at all, or is somebody else's.
    """

    def __init__(self, path: Path, max_bytes: int, max_depth: int, costs: CostModel) -> None:
        depths = list(range(max_depth + 1))
        header = {"schema": SCHEMA, "kind": "steps", "depths": depths, "costs": costs.to_dict()}
        self._header = msgspec.json.encode(header) + b"\n"
        self._path, self._max_bytes = path, max_bytes
        self._queue: deque[_Entry] = deque()
        self._num_left_out = 0
        self._numbers: dict[Hashable, int] = {}  # of requests, the one seen last at the end
        self._num_keys = 0
        self._is_on = True
        check_path(path)
        try:
            self._file = self._new_file()
        except OSError as error:
            raise ConfigError(f"trace: cannot write {path}: {error.strerror}") from None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-trace", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def add(
        self, decision: Decision, depths: tuple[int, ...], accepted: tuple[int, ...], seconds: float
    ) -> None:
        """A step has run: how deep each of the decision's rows drafted, and what of it was accepted."""
        if not self._is_on:
            return
        if len(self._queue) < MAX_WAITING:
            self._queue.append(_Entry(decision, depths, accepted, seconds))
        else:
            self._num_left_out += 1

    def close(self) -> None:
        """Write what there is, and end."""
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join()

    # The thread's.

    def _run(self) -> None:
        try:
            while not self._closing.wait(INTERVAL):
                self._write_waiting()
            self._write_waiting()
        except OSError as error:
            log.warning("tracing is off: cannot write %s: %s", self._path, error.strerror)
        finally:
            self._is_on = False
            self._queue.clear()
            self._file.close()

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        size = self._size
        while self._queue:
            line = msgspec.json.encode(self._record(self._queue.popleft())) + b"\n"
            if size + len(line) > self._max_bytes and size > len(self._header):
                self._write(b"".join(lines))
                self._file.close()
                self._file = self._new_file()
                lines, size = [], self._size
            lines.append(line)
            size += len(line)
        self._write(b"".join(lines))
        if self._num_left_out:
            log.warning("the trace lacks %d steps: %s is written too slowly", self._num_left_out, self._path)
            self._num_left_out = 0

    def _record(self, entry: _Entry) -> dict[str, Any]:
        decision, load = entry.decision, entry.decision.load
        rows = []
        of_rows = zip(decision.rows, decision.depths, entry.depths, entry.accepted, strict=True)
        for view, decided, depth, accepted in of_rows:
            room = depth if depth < decided else view.max_depth  # the scheduler may have found less
            rows.append([self._number(view.key), depth, accepted, view.pinned, room])
        return {
            "context_len": load.context_len,
            "num_prompt_tokens": load.num_prompt_tokens,
            "seconds": round(entry.seconds, 7),
            "reason": decision.reason.value,
            "rows": rows,
        }

    def _number(self, key: Hashable) -> int:
        """A request's number. Those seen last are remembered: more than can run at once."""
        number = self._numbers.pop(key, None)
        if number is None:
            number = self._num_keys
            self._num_keys += 1
            if len(self._numbers) >= MAX_KEYS:
                del self._numbers[next(iter(self._numbers))]
        self._numbers[key] = number
        return number

    def _new_file(self) -> io.FileIO:
        if self._path.exists():
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        file = io.FileIO(self._path, "w")
        self._file, self._size = file, 0
        self._write(self._header)
        return file

    def _write(self, data: bytes) -> None:
        """All of it or nothing: a line that the disk has no room for is taken back."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(data)
