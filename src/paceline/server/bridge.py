"""The server's requests on their way to the engine, and the engine's outputs on their way back.

One task receives. It turns outputs into text at once, whether or not anybody reads, so that a stop
string ends its row within a step of being generated. Knows nothing of HTTP or of how the process
is kept (`engine_process`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from paceline.config import EngineConfig
from paceline.engine.messages import Abort, Accepted, Add, FromEngine, Outputs, Ready, Refused, Stats
from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError
from paceline.output import OutputProcessor
from paceline.prepare import ModelLimits
from paceline.request import EngineRequest
from paceline.server.engine_process import EngineProcess
from paceline.server.generation import Generation
from paceline.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PROGRESS_INTERVAL = 10.0  # seconds between "still loading" lines


class EngineClient:
    """Requests to one engine process. A client whose engine has died stays dead; `start` makes a new one."""

    def __init__(self, process: EngineProcess, tokenizer: Tokenizer) -> None:
        self.stats: Stats | None = None  # the newest
        self.limits = ModelLimits(max_model_len=0, vocab_size=0)  # known once ready
        self._process = process
        self._processor = OutputProcessor(tokenizer)
        self._generations: dict[str, Generation] = {}  # by request id, choices still running
        self._accepting: dict[str, asyncio.Future[None]] = {}  # by group
        self._dead: EngineDeadError | None = None
        self._receiver: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        log_level: str = "info",
        factory: str | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it is ready, telling the log that it still loads.

        Raises:
            EngineDeadError: it could not start; the message is its own one-line reason.
        """
        process = await EngineProcess.start(config, log_level=log_level, factory=factory)
        client = cls(process, tokenizer)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client._receiver = asyncio.create_task(client._receive(ready))
        began = time.monotonic()
        try:
            while not (await asyncio.wait({ready}, timeout=PROGRESS_INTERVAL))[0]:
                log.info("still loading (%.0f s)", time.monotonic() - began)
            ready.result()
        except BaseException:
            process.kill()
            await client.close("the engine did not start")
            raise
        log.info("engine ready in %.1f s", time.monotonic() - began)
        return client

    @property
    def death(self) -> str | None:
        """Why requests are no longer taken; None while they are."""
        return None if self._dead is None else str(self._dead)

    async def submit(self, group: str, requests: Sequence[EngineRequest]) -> Generation:
        """Hand over all choices of one request and wait (at most a step) until the engine has taken them.

        Raises:
            QueueFullError, RequestError: the engine refused them.
            EngineDeadError: there is no engine.
        """
        if self._dead is not None:
            raise self._dead
        generation = Generation(group, requests)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting[group] = accepted
        for request in requests:
            self._generations[request.request_id] = generation
            self._processor.add(request)
        self._process.send(Add(group, list(requests)))
        try:
            await accepted
        except BaseException:
            self.abort(generation)
            raise
        finally:
            del self._accepting[group]
        return generation

    def abort(self, generation: Generation) -> None:
        """Give up what still runs of a request; its reader sees the end. Harmless when all has ended."""
        open_ids = list(generation.open_ids)
        generation.cancel()
        for request_id in open_ids:
            self._forget(request_id)
        if open_ids and self._dead is None:
            self._process.send(Abort(open_ids))

    async def close(self, reason: str) -> None:
        """Fail what still runs with `reason`, and end the engine process."""
        self._die(EngineDeadError(reason))
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait({self._receiver})
        await self._process.close()

    async def _receive(self, ready: asyncio.Future[None]) -> None:
        try:
            async for message in self._process.messages():
                if isinstance(message, Ready):
                    self.limits = ModelLimits(
                        max_model_len=message.max_model_len, vocab_size=message.vocab_size
                    )
                    ready.set_result(None)
                else:
                    self._take(message)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            # A fault of ours; without a receiver nobody would ever be answered, so everybody is told now.
            log.exception("the server failed while it read the engine's outputs")
            self._die(EngineDeadError(f"internal error: {type(error).__name__}"))
        if not ready.done() and self._dead is not None:
            ready.set_exception(self._dead)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                deltas, to_abort = self._processor.process(outputs)
                if to_abort:
                    self._process.send(Abort(to_abort))
                for delta in deltas:
                    self._generations[delta.request_id].deliver(delta)
                    if delta.finish_reason is not None:
                        del self._generations[delta.request_id]
            case Accepted(groups=groups):
                for group in groups:
                    self._answer(group, None)
            case Refused(group=group, kind="queue_full", reason=reason):
                self._answer(group, QueueFullError(reason))
            case Refused(group=group, param=param, reason=reason):
                self._answer(group, RequestError(param, reason))
            case Stats():
                self.stats = message

    def _answer(self, group: str, error: PacelineError | None) -> None:
        accepted = self._accepting.get(group)
        if accepted is None or accepted.done():
            return
        if error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def _forget(self, request_id: str) -> None:
        self._generations.pop(request_id, None)
        self._processor.drop(request_id)

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        log.debug("no engine any more: %s", error)
        for group in list(self._accepting):
            self._answer(group, error)
        for request_id, generation in list(self._generations.items()):
            self._forget(request_id)
            generation.fail(error)
