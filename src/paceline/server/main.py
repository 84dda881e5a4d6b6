"""Starting and ending the server: port, engine, HTTP, signals, in that order.

As in vLLM the port is bound before the model is loaded (a taken one is known at once) and listened
on only when the engine is ready: until then a connection is refused, and `/health` answers 200 from
its first answer on. At the first SIGINT or SIGTERM no more connections are taken, and answers under way
have `drain_seconds` to finish; then, or at a second signal, they end with an error that says why. Exit 0.

Prints nothing: what the user should see goes through `on_ready`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from paceline import heap, logs
from paceline.config import EngineConfig, ServerConfig
from paceline.draft.load import resolve_draft
from paceline.errors import ConfigError, EngineDeadError
from paceline.models.hub import resolve_model
from paceline.server.app import Api
from paceline.server.bridge import EngineClient
from paceline.server.connection import connection_class
from paceline.server.gate import Gate
from paceline.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

SHUTDOWN_GRACE = 3.0  # seconds that replies which have been ended may take to leave
STOPPING = "the server is shutting down"


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens and what it serves."""

    url: str  # as a client on this machine writes it
    model_name: str
    max_model_len: int


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    on_ready: Callable[[Address], None],
    engine_factory: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        on_ready: called once, when requests are answered.
        engine_factory: "module:function" that builds another engine than the real one, in its process.

    Raises:
        ConfigError: the port cannot be listened on.
        ModelError, EngineDeadError: the model cannot be found, or no engine started or kept alive.
    """
    logs.configure(server_config.log_level)
    with _bind(server_config.host, server_config.port) as listener:
        path = resolve_model(engine_config.model, engine_config.revision)
        tokenizer = load_tokenizer(path)
        name = server_config.served_model_name or engine_config.model
        log.info("loading %s", name)
        # The engine gets the path: what was found here must not be looked for again. And a path does not tell
        # which head was shipped for the model.
        draft = resolve_draft(engine_config.draft, engine_config.model, engine_config.draft_revision)
        config = dataclasses.replace(engine_config, model=str(path), draft=draft)

        async def main() -> None:
            signals = _Signals()
            starting = asyncio.create_task(
                EngineClient.start(config, server_config, tokenizer, factory=engine_factory)
            )
            if not await _first(starting, signals.next()):
                starting.cancel()
                await asyncio.wait({starting})
                return
            client = starting.result()
            address = Address(_url(listener), name, client.limits.max_model_len)
            api = Api(client, tokenizer, name, server_config.tool_call_parser)
            heap.freeze()
            await _serve(api, client, listener, signals, lambda: on_ready(address), server_config)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())


class _Signals:
    """SIGINT and SIGTERM, from now on, one at a time."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, self._arrived.put_nowait, signum)

    async def next(self) -> signal.Signals:
        """Wait for the next one."""
        return await self._arrived.get()


async def _first(task: asyncio.Future[Any], other: Awaitable[object], seconds: float | None = None) -> bool:
    """Wait for either or for so many seconds; returns whether `task` is done. `other` is given up."""
    rival = asyncio.ensure_future(other)
    try:
        await asyncio.wait({task, rival}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        rival.cancel()
    return task.done()


class _Server(uvicorn.Server):
    """uvicorn's server, with signals left to us and word of when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()


async def _serve(
    api: Api,
    client: EngineClient,
    listener: socket.socket,
    signals: _Signals,
    on_listening: Callable[[], None],
    config: ServerConfig,
) -> None:
    """Answer requests until a signal and the drain after it, or until no engine can be kept alive."""
    gate = Gate(api.app(), api_keys=config.api_keys, max_body_bytes=config.max_body_bytes)
    server = _Server(
        uvicorn.Config(
            gate,
            http=connection_class(config.max_header_bytes),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=config.log_level == "debug",
            server_header=False,
        ),
        on_listening,
    )
    _listen(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(signals.next())
    try:
        ends: set[asyncio.Future[Any]] = {serving, stopping, client.gave_up}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        if stopping.done():
            log.info(
                "shutting down: answers under way have %g s; once more ends at once", config.drain_seconds
            )
            await _first(serving, signals.next(), seconds=config.drain_seconds)
    finally:
        stopping.cancel()
        await client.close(STOPPING)
        if not await _first(serving, signals.next(), seconds=SHUTDOWN_GRACE):
            server.force_exit = True  # whoever has not read the end by now gets it no more
        await serving
    if client.gave_up.done():
        raise EngineDeadError(client.gave_up.result())


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address and not listening yet. Raises ConfigError in one line."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} cannot be resolved: {error.strerror}") from None
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from None
    return bound


def _listen(bound: socket.socket) -> None:
    """Two servers may bind one port, but only one may listen on it: raises ConfigError as `_bind` does."""
    host, port = bound.getsockname()[:2]
    try:
        bound.listen()
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} is taken: choose another with --port, or 0 for any free one")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}")


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
