"""The engine's own process: `python -m paceline.engine.process OPTIONS`, started by the server.

One thread runs the loop: read what the server sent, run a step, send what it gave. While there is
work the socket is only looked at; when idle the process sleeps in it. Sending never waits: what a
slow reader leaves behind is the server's to bound.

How it ends: by `Shutdown`; or when standard input closes, which the kernel does when the server
dies in any way, so that no engine outlives its server; or by a failure, told as `Failed` with exit
code 1. SIGINT is ignored: Ctrl-C reaches the whole process group, and the server answers it.

Knows nothing of text or HTTP. Nothing heavy is imported before the model is asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import zmq

from paceline import heap, logs
from paceline.config import EngineConfig
from paceline.engine.factory import Factory, StepEngine
from paceline.engine.messages import (
    Abort,
    Accepted,
    Add,
    Failed,
    FromEngine,
    Outputs,
    Refused,
    Shutdown,
    Stats,
    ToEngine,
)
from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError, describe

log = logging.getLogger("paceline.engine.process")  # __name__ is "__main__" here

STATS_INTERVAL = 1.0  # seconds
DEFAULT_FACTORY = "paceline.engine.factory:build"


class Options(msgspec.Struct, frozen=True):
    """The command line: one JSON object."""

    address: str
    config: EngineConfig
    log_level: str = "info"
    factory: str = DEFAULT_FACTORY  # "module:function"


class Wire:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # never wait for the reader
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """All messages that are there; if `wait` and there is none, sleep until one comes."""
        try:
            yield self._decoder.decode(self._socket.recv(0 if wait else zmq.DONTWAIT))
            while True:
                yield self._decoder.decode(self._socket.recv(zmq.DONTWAIT))
        except zmq.Again:
            return

    def close(self) -> None:
        """Close, after what was sent has left (at most a second)."""
        self._socket.close(linger=1000)
        self._context.term()


def serve(engine: StepEngine, wire: Wire) -> None:
    """The loop; returns on Shutdown.

    Raises:
        EngineDeadError: a step failed. The outputs that say so to every request have been sent.
    """
    wire.send(Stats(engine.stats()))
    next_stats = 0.0
    while True:
        accepted: list[str] = []
        for message in wire.receive(wait=not engine.has_work):
            match message:
                case Add(group=group):
                    refused = _add(engine, message)
                    if refused is None:
                        accepted.append(group)
                    else:
                        wire.send(refused)
                case Abort(request_ids=request_ids):
                    for request_id in request_ids:
                        engine.abort(request_id)
                case Shutdown():
                    return
        if accepted:
            wire.send(Accepted(accepted))
        if engine.has_work:
            outputs = engine.step()
            if outputs:
                wire.send(Outputs(outputs))
        now = time.monotonic()
        if now >= next_stats or not engine.has_work:
            wire.send(Stats(engine.stats()))
            next_stats = now + STATS_INTERVAL


def _add(engine: StepEngine, message: Add) -> Refused | None:
    """Add all requests of the group or none."""
    for i, request in enumerate(message.requests):
        try:
            engine.add(request)
        except (QueueFullError, RequestError) as error:
            for added in message.requests[:i]:
                engine.abort(added.request_id)
            if isinstance(error, RequestError):
                return Refused(message.group, "request", error.param, str(error))
            return Refused(message.group, "queue_full", None, str(error))
    return None


def _load(factory: str) -> Factory:
    module, _, function = factory.partition(":")
    loaded: Factory = getattr(importlib.import_module(module), function)
    return loaded


def _die_with_parent() -> None:
    """Exit at once when standard input closes: its other end is the server's."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: list[str]) -> int:
    """Run the process; the only argument is `Options` as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    options = msgspec.json.decode(argv[0], type=Options)
    logs.configure(options.log_level)
    wire = Wire(options.address)
    try:
        built = _load(options.factory)(options.config)
        heap.freeze()
        wire.send(built.ready)
        serve(built.engine, wire)
    except EngineDeadError as error:
        log.error("%s", error, exc_info=error.__cause__)
        wire.send(Failed(str(error)))
        return 1
    except PacelineError as error:
        wire.send(Failed(str(error)))
        return 1
    except Exception as error:
        # Not a mistake of the user's: the traceback is for the log, one line for everybody else.
        log.exception("the engine failed")
        wire.send(Failed(describe(error)))
        return 1
    finally:
        wire.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
