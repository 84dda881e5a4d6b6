"""One life of an engine process, seen from the server: start, messages both ways, end.

The socket is a file in a private temporary folder; standard input of the process is a pipe that is
never written to: its closing tells an engine that its server is gone. The process has a session of its
own, so that a terminal's Ctrl-C reaches the server alone. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from asyncio import FIRST_COMPLETED
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from paceline.config import EngineConfig
from paceline.engine.messages import Failed, FromEngine, Shutdown, ToEngine
from paceline.errors import EngineDeadError

MAX_SOCKET_PATH = 100  # bytes; a unix socket's limit is 107 on Linux and 103 on macOS
LAST_WORDS = 0.2  # seconds that messages of a process that has just ended may take to arrive
SHUTDOWN_GRACE = 5.0  # seconds until a process that was asked to end is killed
MAX_AT_ONCE = (
    8  # messages taken in before the streams may send: one that is behind sends fewer, larger chunks
)
TICK = 1.0  # seconds between two looks at an engine that says nothing


class EngineProcess:
    """A running engine process. Made by `start`; `close` must be awaited."""

    def __init__(
        self, folder: Path, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, process: Process
    ):
        self._folder = folder
        self._context = context
        self._socket = socket
        self._process = process
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def start(
        cls, config: EngineConfig, *, log_level: str, factory: str | None = None
    ) -> EngineProcess:
        """Start the process; its first message is Ready or Failed.

        `factory`, as "module:function", builds another engine than the real one.
        """
        try:
            folder = _private_folder()
        except OSError as error:
            raise EngineDeadError(f"no folder for the engine's socket: {error.strerror}") from None
        address = f"ipc://{folder / 'engine'}"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        options: dict[str, object] = {"address": address, "config": config, "log_level": log_level}
        if factory is not None:
            options["factory"] = factory
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "paceline.engine.process", msgspec.json.encode(options).decode()),
                stdin=PIPE,
                stdout=DEVNULL,  # standard output is the server's; the engine logs to standard error
                start_new_session=True,
            )
        except BaseException:
            _discard(context, folder)
            raise
        return cls(folder, context, socket, process)

    def send(self, message: ToEngine) -> None:
        """Send without waiting; the socket has no limit, and what it holds the scheduler's queue bounds."""
        self._socket.send(self._encoder.encode(message))

    async def messages(self, is_busy: Callable[[], bool], hang_seconds: float) -> AsyncIterator[FromEngine]:
        """What the engine says, until it ends.

        An engine that says nothing for `hang_seconds` (0: any time) although it `is_busy` is killed. Only
        seconds in which this process ran count: a machine that was asleep accuses nobody.

        Raises:
            EngineDeadError: the process has ended, was hung or said Failed; the message is the reason.
        """
        ended = asyncio.ensure_future(self._process.wait())
        silence, num_at_once = 0.0, 0
        while True:
            received = asyncio.ensure_future(self._socket.recv())
            try:
                if received.done() and num_at_once < MAX_AT_ONCE:
                    num_at_once += 1
                else:
                    num_at_once = 0
                    await asyncio.sleep(0)
                while not received.done() and not ended.done():
                    if not (await asyncio.wait({received, ended}, timeout=TICK, return_when=FIRST_COMPLETED))[
                        0
                    ]:
                        silence = silence + TICK if is_busy() else 0.0
                        if 0 < hang_seconds <= silence:
                            self.kill()
                            raise EngineDeadError(f"the engine hangs: no sign of life for {silence:.0f} s")
                if not received.done():
                    await asyncio.wait({received}, timeout=LAST_WORDS)
                if not received.done():
                    raise EngineDeadError(f"the engine process died ({_how(ended.result())})")
                message = self._decoder.decode(received.result())
            finally:
                received.cancel()
            silence = 0.0
            if isinstance(message, Failed):
                raise EngineDeadError(message.reason)
            yield message

    def kill(self) -> None:
        """End the process at once: it may be loading, and not listen."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """End the process, by request and then by force, and remove the socket."""
        if self._process.returncode is None:
            self.send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), SHUTDOWN_GRACE)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        _discard(self._context, self._folder)


def _discard(context: zmq.asyncio.Context, folder: Path) -> None:
    context.destroy(linger=0)
    shutil.rmtree(folder, ignore_errors=True)


def _private_folder() -> Path:
    """A new folder only this user can enter, with a path short enough for a socket's address."""
    folder = tempfile.mkdtemp(prefix="paceline-")
    if len(os.fsencode(folder)) + len("/engine") > MAX_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
    return Path(folder)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
