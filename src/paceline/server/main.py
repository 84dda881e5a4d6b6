"""Starting and ending the server: port, engine, HTTP, signals, in that order.

As in vLLM the port is bound before the model is loaded (a taken one is known at once) and listened
on only when the engine is ready: until then a connection is refused, and `/health` answers 200 from
its first answer on. SIGINT or SIGTERM at any time: no new connections, answers under way end with an
error that says why, exit 0.

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
from collections.abc import Callable, Iterator

import uvicorn

from paceline import logs
from paceline.config import EngineConfig, ServerConfig
from paceline.errors import ConfigError
from paceline.models.hub import resolve_model
from paceline.server.app import Api
from paceline.server.bridge import EngineClient
from paceline.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

SHUTDOWN_GRACE = 3  # seconds that replies which have been ended may take to leave


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
        ModelError, EngineDeadError: the model cannot be found, or the engine not started.
    """
    logs.configure(server_config.log_level)
    with _bind(server_config.host, server_config.port) as listener:
        path = resolve_model(engine_config.model, engine_config.revision)
        tokenizer = load_tokenizer(path)
        name = server_config.served_model_name or engine_config.model
        log.info("loading %s", name)
        # The engine gets the path: what was found here must not be looked for again.
        config = dataclasses.replace(engine_config, model=str(path))

        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, stop.set)
            starting = asyncio.create_task(
                EngineClient.start(
                    config, tokenizer, log_level=server_config.log_level, factory=engine_factory
                )
            )
            if not await _unless_stopped(starting, stop):
                return
            client = starting.result()
            address = Address(_url(listener), name, client.limits.max_model_len)
            api = Api(client, tokenizer, name)
            await _serve(api, client, listener, stop, lambda: on_ready(address), server_config.log_level)

        asyncio.run(main())


async def _unless_stopped(task: asyncio.Task[EngineClient], stop: asyncio.Event) -> bool:
    """Wait for `task`; if `stop` comes first, cancel it and return False."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return True
        task.cancel()
        await asyncio.wait({task})
        return False
    finally:
        stopping.cancel()


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
    stop: asyncio.Event,
    on_listening: Callable[[], None],
    log_level: str,
) -> None:
    server = _Server(
        uvicorn.Config(
            api.app(),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=log_level == "debug",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_GRACE,
        ),
        on_listening,
    )

    async def end_on_signal() -> None:
        await stop.wait()
        log.info("shutting down")
        server.should_exit = True
        await client.close("the server is shutting down")

    ending = asyncio.create_task(end_on_signal())
    try:
        _listen(listener)
        await server.serve(sockets=[listener])
    finally:
        stop.set()
        await ending


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
