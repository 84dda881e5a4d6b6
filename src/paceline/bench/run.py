"""`paceline sweep` from its options to the files: opens what the arms need, measures, reports.

The one place where all parts meet. Knows flags' values, not how they are written; prints nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from signal import Signals
from typing import Any

from paceline import heap
from paceline._version import __version__
from paceline.bench import load_steps, page, report
from paceline.bench.arms import Arm
from paceline.bench.client import HttpTarget
from paceline.bench.interruption import Interruption
from paceline.bench.load_steps import Phase, Profile
from paceline.bench.local import Encoder, Engines, LocalTarget
from paceline.bench.machine import describe
from paceline.bench.report import About, Report
from paceline.bench.summary import summarize
from paceline.bench.sweep import Failure, Sweep, Target, one_line, opening_order
from paceline.bench.workload import PROMPTS, Column, Workload, read_prompts
from paceline.config import EngineConfig
from paceline.draft.load import resolve_draft
from paceline.engine.factory import build
from paceline.errors import ModelError, PacelineError
from paceline.models.hub import resolve_model
from paceline.tokenizer import load_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asked for, checked."""

    engine: EngineConfig
    loads: tuple[int, ...]  # concurrencies; of a profile, in the order of its phases
    temperatures: tuple[float, ...]
    contexts: tuple[int | None, ...]
    num_rounds: int
    warmup_steps: int
    max_seconds: float | None
    answer_len: int
    natural_stop: bool
    warm_prompts: bool
    turn_seconds: float | None
    min_tokens: int
    prompts: Path | None
    max_prompt_chars: int | None
    step_seconds: float
    out: Path
    command: str
    api_key: str | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be said at the end."""

    text: str
    written: list[str]  # a line for each file, or why there is none
    interrupted_by: Signals | None
    is_empty: bool  # nothing was measured
    failed: list[str]  # arms, at a load or altogether


class Workshop:
    """What arms share: the model's tokenizer and the engines; each made when first needed."""

    def __init__(self, arms: Sequence[Arm], options: Options, say: Say) -> None:
        self._arms, self._options, self._say = arms, options, say
        self._servers: list[HttpTarget] = []

    @cached_property
    def encoder(self) -> Encoder:
        """The model's reading of prompts."""
        config = self._options.engine
        return Encoder(load_tokenizer(resolve_model(config.model, config.revision)))

    @cached_property
    def engines(self) -> Engines:
        """Those in this process."""
        return Engines(self._options.engine, self._arms, build, self._options.turn_seconds is None)

    def check_draft(self) -> None:
        """Raises ModelNotFoundError or ConfigError where arms would draft, and `--draft` names nothing."""
        config = self._options.engine
        if any(arm.needs_drafter for arm in self._arms):
            resolve_draft(config.draft, config.model, config.draft_revision)

    def open(self, arm: Arm) -> Target:
        """The arm, ready to work."""
        if arm.url is not None:
            self._servers.append(HttpTarget(arm.url, self._options.api_key))
            return self._servers[-1]
        return self.open_local(arm)

    def open_local(self, arm: Arm) -> LocalTarget:
        """The arm on its engine."""
        self._say(f"{arm.name}: starting")
        launched, warms = self.engines.of(arm), self._options.warm_prompts
        heap.freeze()  # a collection would fall on whichever arm is running
        return LocalTarget(launched, self.encoder, arm.depth, warms_prompts=warms)

    def workload(self) -> Workload:
        """The prompts, and a tokenizer where their lengths matter."""
        options = self._options
        prompts = read_prompts(options.prompts or PROMPTS, options.max_prompt_chars)
        lengthen = None if options.contexts == (None,) else self.encoder.lengthen
        return Workload(prompts, options.answer_len, options.min_tokens, lengthen, options.natural_stop)

    def about(self, workload: Workload) -> About:
        """Where and how it was measured. After the engines were started."""
        options = self._options
        if any(arm.url is None for arm in self._arms):
            model, draft = options.engine.model, self.engines.draft or "none"
            model = Path(model).name if Path(model).is_absolute() else model
        else:
            served = [server.model or "unknown" for server in self._servers]
            model, draft = ", ".join(dict.fromkeys(served)), "as served"
        return About(
            version=__version__,
            device=describe(options.engine.device),
            model=model,
            draft=draft,
            work=workload.describe() + (", prompts from the prefix cache" if options.warm_prompts else ""),
            command=options.command,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            settings=self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "rounds": options.num_rounds,
            "warmup_steps": options.warmup_steps,
            "answer_len": options.answer_len,
            "natural_stop": options.natural_stop,
            "warm_prompts": options.warm_prompts,
            "turn_seconds": options.turn_seconds,
            "min_tokens": options.min_tokens,
            "max_prompt_chars": options.max_prompt_chars,
            "prefix_caching": options.engine.prefix_caching,
            "max_num_seqs": options.engine.max_num_seqs,
            "max_num_batched_tokens": options.engine.max_num_batched_tokens,
        }


def sweep(arms: Sequence[Arm], options: Options, say: Say) -> Outcome:
    """Measure every arm at every load, and write what came of it.

    Raises:
        ConfigError: the prompts or the draft head's revision cannot be used.
        ModelError: the model or the draft head cannot be loaded.
    """
    workshop = Workshop(arms, options, say)
    workshop.check_draft()
    workload = workshop.workload()
    columns = [
        Column(temperature, context, load)
        for temperature in options.temperatures
        for context in options.contexts
        for load in options.loads
    ]
    measuring = Sweep(
        arms,
        columns,
        workload,
        workshop.open,
        num_rounds=options.num_rounds,
        turn_seconds=options.turn_seconds,
        warmup_steps=options.warmup_steps,
        max_seconds=options.max_seconds,
        say=say,
    )
    with Interruption() as interruption:
        measuring.run()
    _tell(interruption, say)
    done = Report(
        workshop.about(workload),
        arms,
        measuring.measurements,
        measuring.failures,
        summarize(arms, measuring.measurements),
        measuring.is_complete,
    )
    files: dict[str, Callable[[], bytes]] = {"sweep.json": lambda: report.to_json(done).encode()}
    if done.measurements:
        files["sweep.html"] = lambda: page.to_html(done).encode()
        files["sweep.png"] = lambda: page.to_png(done)
    written = _write(options.out, files)
    interruption.restore()
    failed = list(dict.fromkeys(failure.arm for failure in measuring.failures))
    return Outcome(report.to_text(done), written, interruption.signal, not done.measurements, failed)


def profile(arms: Sequence[Arm], options: Options, say: Say) -> Outcome:
    """Take every arm through changing load, and write what came of it.

    Raises:
        ConfigError: the prompts cannot be used.
        ModelError: the model or the draft head cannot be loaded.
    """
    workshop = Workshop(arms, options, say)
    workshop.check_draft()
    workload, temperature = workshop.workload(), options.temperatures[0]
    phases = [Phase(load, options.step_seconds) for load in options.loads]
    courses: dict[str, list[load_steps.Bin]] = {}
    failures: list[Failure] = []
    with Interruption() as interruption:
        for arm in opening_order(arms):
            try:
                target = workshop.open_local(arm)
                say(f"{arm.name}: {sum(phase.seconds for phase in phases):.0f} s")
                load_steps.warm_up(target, load_steps.jobs_of(workload, temperature))
                jobs = load_steps.jobs_of(workload, temperature)
                courses[arm.name] = load_steps.follow(target, phases, jobs, time.perf_counter)
            except ModelError:
                raise
            except Exception as error:
                failures.append(Failure(arm.name, None, one_line(error)))
                say(f"{arm.name} failed: {one_line(error)}")
    _tell(interruption, say)
    about, is_complete = workshop.about(workload), interruption.signal is None
    done = Profile(about, arms, phases, courses, failures, is_complete)
    files: dict[str, Callable[[], bytes]] = {"profile.json": lambda: load_steps.to_json(done).encode()}
    if courses:
        files["profile.html"] = lambda: load_steps.to_html(done).encode()
        files["profile.png"] = lambda: page.row_png(load_steps.charts(done))
    written = _write(options.out, files)
    interruption.restore()
    failed = [failure.arm for failure in failures]
    return Outcome(load_steps.to_text(done), written, interruption.signal, not courses, failed)


def _tell(interruption: Interruption, say: Say) -> None:
    if interruption.signal is not None:
        say("interrupted: writing what there is")


def _write(folder: Path, files: dict[str, Callable[[], bytes]]) -> list[str]:
    """Write each file; one that cannot be made does not keep the others."""
    lines = []
    for name, make in files.items():
        try:
            (folder / name).write_bytes(make())
            lines.append(f"wrote {folder / name}")
        except (PacelineError, OSError) as error:
            lines.append(f"{folder / name} was not written: {one_line(error)}")
    return lines
