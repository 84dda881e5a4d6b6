"""The server's requests on their way to the engine, and the engine's outputs on their way back.

One task keeps an engine running and receives from it. It turns outputs into text at once, whether or not
anybody reads, so that a stop string ends its row within a step of being generated. When an engine dies,
everybody who waits for it is told, and another one is started; requests are refused in between.

Knows nothing of HTTP or of how one process is kept (`engine_process`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from paceline.config import EngineConfig, ServerConfig
from paceline.engine.messages import (
    Abort,
    Accepted,
    Add,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Stats,
    ToEngine,
)
from paceline.engine.stats import SchedulerStats
from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError
from paceline.output import OutputProcessor
from paceline.prepare import ModelLimits
from paceline.request import EngineRequest, RequestOutput, SamplingParams
from paceline.server.activity import Activity
from paceline.server.caps import check_caps
from paceline.server.engine_process import EngineProcess
from paceline.server.failures import SlowReaderError
from paceline.server.generation import Generation
from paceline.server.live import History
from paceline.server.restarts import MAX_QUICK_DEATHS, Deaths
from paceline.server.speculation import SpeculationHealth
from paceline.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PROGRESS_INTERVAL = 10.0  # seconds between "still loading" lines


class EngineClient:
    """Requests to the engine, in all lives of its process. Made by `start`; `close` must be awaited."""

    def __init__(
        self, config: EngineConfig, server_config: ServerConfig, tokenizer: Tokenizer, factory: str | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.limits = ModelLimits(max_model_len=0, vocab_size=0)  # known once ready
        self.stats: SchedulerStats | None = (
            None  # the engine's latest; its counters begin anew with each life
        )
        self.history = History(time.monotonic())
        self.num_restarts = 0
        self._depth: int | str = 0  # drafts a round of requests that do not say
        self.gave_up: asyncio.Future[str] = loop.create_future()  # done with the reason: no engine will come
        self._config = config
        self._server_config = server_config
        self._factory = factory
        self._processor = OutputProcessor(tokenizer)
        self._activity = Activity()
        self._generations: dict[str, Generation] = {}  # by request id, choices still running
        self._accepting: dict[str, asyncio.Future[None]] = {}  # by group
        self._process: EngineProcess | None = None
        self._dead: EngineDeadError | None = EngineDeadError("the engine is loading the model")
        self._first_ready: asyncio.Future[None] = loop.create_future()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        server_config: ServerConfig,
        tokenizer: Tokenizer,
        *,
        factory: str | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it is ready, telling the log that it still loads.

        Raises:
            EngineDeadError: it could not start; the message is its own one-line reason.
        """
        client = cls(config, server_config, tokenizer, factory)
        client._keeper = asyncio.create_task(client._keep())
        began = time.monotonic()
        try:
            while not (await asyncio.wait({client._first_ready}, timeout=PROGRESS_INTERVAL))[0]:
                log.info("still loading (%.0f s)", time.monotonic() - began)
            client._first_ready.result()
        except BaseException:
            client.kill()
            await client.close("the engine did not start")
            raise
        return client

    @property
    def death(self) -> str | None:
        """Why requests are not taken at present; None while they are."""
        return None if self._dead is None else str(self._dead)

    @property
    def speculation(self) -> SpeculationHealth:
        """Whether requests can draft, as the engine's latest report has it."""
        failed = None if self.stats is None else self.stats.speculation.drafter_error
        given_up = None if self.stats is None else self.stats.policy.error
        return SpeculationHealth(
            status="failed" if failed else "on" if self.limits.max_depth else "off",
            depth=0 if failed or given_up else self._depth,
            max_depth=self.limits.max_depth,
            draft=self.limits.draft,
            reason=failed or (given_up and f"the policy failed: {given_up}"),
        )

    def check(self, params: SamplingParams, num_prompts: int = 1) -> None:
        """Refuse what the settings do not allow; cheap, so that it can come before anything is made of `n`.

        Raises:
            RequestError: `param` names the field.
        """
        check_caps(params, self._server_config, num_prompts)

    async def submit(self, group: str, requests: Sequence[EngineRequest]) -> Generation:
        """Hand over all choices of one request and wait (at most a step) until the engine has taken them.

        Raises:
            QueueFullError, RequestError: they are refused.
            EngineDeadError: there is no engine.
        """
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        generation = Generation(group, requests)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accepting[group] = accepted
        for request in requests:
            self._generations[request.request_id] = generation
            self._processor.add(request)
        self._send(Add(group, list(requests)))
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
        generation.cancel()
        self._drop(generation)

    def kill(self) -> None:
        """End the engine process at once. Another is started, unless `close` follows."""
        if self._process is not None:
            self._process.kill()

    async def close(self, reason: str) -> None:
        """Fail what still runs with `reason`, and end the engine process."""
        self._fail_all(EngineDeadError(reason))
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})

    # The engine's lives.

    async def _keep(self) -> None:
        """Keep an engine running until too many die quickly, or the first cannot start."""
        deaths = Deaths(self._server_config.quick_death_seconds)
        while True:
            error, lived = await self._live()
            if not self._first_ready.done():
                self._first_ready.set_exception(error)
                return
            if deaths.note(lived):
                self.gave_up.set_result(
                    f"{MAX_QUICK_DEATHS} engines in a row died quickly, the last one so: {error}"
                )
                return
            log.error("starting another engine: %s", error)
            self.num_restarts += 1

    async def _live(self) -> tuple[EngineDeadError, float | None]:
        """One engine process from its start to its death; everybody has been told when this returns.

        Returns:
            why it died, and the seconds from when it was ready (None: it never was).
        """
        began = time.monotonic()
        ready_at = None
        try:
            self._process = await EngineProcess.start(
                self._config, log_level=self._server_config.log_level, factory=self._factory
            )
            hang_seconds = self._server_config.hang_seconds
            async for message in self._process.messages(lambda: bool(self._generations), hang_seconds):
                if isinstance(message, Ready):
                    ready_at = time.monotonic()
                    self._begin(message)
                    log.info("engine ready in %.1f s", time.monotonic() - began)
                else:
                    self._take(message)
        except EngineDeadError as error:
            self._fail_all(death := error)
        except Exception as error:
            # A fault of ours; without a receiver nobody would ever be answered, so everybody is told now.
            log.exception("the server failed while it read the engine's outputs")
            self._fail_all(death := EngineDeadError(f"internal error: {type(error).__name__}"))
            self.kill()
        else:
            raise AssertionError("messages end with an error")
        finally:
            lived = None if ready_at is None else time.monotonic() - ready_at
            process, self._process = self._process, None
            if process is not None:
                await process.close()
        return death, lived

    def _begin(self, ready: Ready) -> None:
        self.limits = ModelLimits(
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            max_depth=ready.max_depth,
            draft=ready.draft,
        )
        self._depth = ready.depth
        self._dead = None
        if not self._first_ready.done():
            self._first_ready.set_result(None)

    def _fail_all(self, error: EngineDeadError) -> None:
        """Tell everybody who waits, and whoever comes until there is another engine."""
        self._dead = error
        for group in list(self._accepting):
            self._answer(group, error)
        for request_id, generation in list(self._generations.items()):
            self._forget(request_id)
            generation.fail(error)

    # What the engine says.

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs):
                self._deliver(outputs)
            case Accepted(groups=groups):
                for group in groups:
                    self._answer(group, None)
            case Refused(group=group, kind="queue_full", reason=reason):
                self._answer(group, QueueFullError(reason))
            case Refused(group=group, param=param, reason=reason):
                self._answer(group, RequestError(param, reason))
            case Stats(scheduler=stats):
                self.stats, now = stats, time.monotonic()
                log.debug("%s", stats)
                self.history.add(stats, now)
                if line := self._activity.line(stats, now):
                    log.info("%s", line)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        deltas, to_abort = self._processor.process(outputs)
        if to_abort:
            self._send(Abort(to_abort))
        limit = self._server_config.max_unread_tokens
        for delta in deltas:
            generation = self._generations.get(delta.request_id)
            if generation is None:  # dropped a moment ago, for a choice of the same request
                continue
            generation.deliver(delta)
            if delta.finish_reason is not None:
                del self._generations[delta.request_id]
            elif generation.num_unread > limit:
                generation.fail(SlowReaderError(limit))
                self._drop(generation)

    def _answer(self, group: str, error: PacelineError | None) -> None:
        accepted = self._accepting.get(group)
        if accepted is None or accepted.done():
            return
        if error is None:
            accepted.set_result(None)
        else:
            accepted.set_exception(error)

    def _drop(self, generation: Generation) -> None:
        """End the rows of a request that still run."""
        open_ids = [i for i in generation.open_ids if i in self._generations]
        for request_id in open_ids:
            self._forget(request_id)
        if open_ids:
            self._send(Abort(open_ids))

    def _forget(self, request_id: str) -> None:
        self._generations.pop(request_id, None)
        self._processor.drop(request_id)

    def _send(self, message: ToEngine) -> None:
        """To the engine, if there is one; what it never got, its death has answered."""
        if self._process is not None:
            self._process.send(message)
