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
from typing import Any

from paceline._version import __version__
from paceline.bench import load_steps, page, report
from paceline.bench.arms import Arm
from paceline.bench.client import HttpTarget
from paceline.bench.load_steps import Phase, Profile
from paceline.bench.local import Encoder, Engines, LocalTarget
from paceline.bench.machine import describe
from paceline.bench.report import About, Report
from paceline.bench.summary import summarize
from paceline.bench.sweep import Failure, Sweep, Target, one_line, opening_order
from paceline.bench.workload import PROMPTS, Column, Workload, read_prompts
from paceline.config import EngineConfig
from paceline.engine.factory import build
from paceline.errors import PacelineError
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
    max_seconds: float | None
    answer_len: int
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
    was_interrupted: bool
    is_empty: bool  # nothing was measured


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
        return Engines(self._options.engine, self._arms, build)

    def open(self, arm: Arm) -> Target:
        """The arm, ready to work."""
        if arm.url is not None:
            self._servers.append(HttpTarget(arm.url, self._options.api_key))
            return self._servers[-1]
        return self.open_local(arm)

    def open_local(self, arm: Arm) -> LocalTarget:
        """The arm on its engine."""
        self._say(f"{arm.name}: starting")
        return LocalTarget(self.engines.of(arm), self.encoder, arm.depth)

    def workload(self) -> Workload:
        """The prompts, and a tokenizer where their lengths matter."""
        options = self._options
        prompts = read_prompts(options.prompts or PROMPTS, options.max_prompt_chars)
        lengthen = None if options.contexts == (None,) else self.encoder.lengthen
        return Workload(prompts, options.answer_len, options.min_tokens, lengthen)

    def about(self) -> About:
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
            command=options.command,
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            settings=self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        options = self._options
        return {
            "rounds": options.num_rounds,
            "answer_len": options.answer_len,
            "min_tokens": options.min_tokens,
            "max_prompt_chars": options.max_prompt_chars,
            "prefix_caching": options.engine.prefix_caching,
            "max_num_seqs": options.engine.max_num_seqs,
            "max_num_batched_tokens": options.engine.max_num_batched_tokens,
        }


def sweep(arms: Sequence[Arm], options: Options, say: Say) -> Outcome:
    """Measure every arm at every load, and write what came of it."""
    workshop = Workshop(arms, options, say)
    columns = [
        Column(temperature, context, load)
        for temperature in options.temperatures
        for context in options.contexts
        for load in options.loads
    ]
    measuring = Sweep(
        arms,
        columns,
        workshop.workload(),
        workshop.open,
        num_rounds=options.num_rounds,
        max_seconds=options.max_seconds,
        say=say,
    )
    try:
        measuring.run()
    except KeyboardInterrupt:
        say("interrupted: writing what there is")
    done = Report(
        workshop.about(),
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
    return Outcome(report.to_text(done), written, not done.is_complete, not done.measurements)


def profile(arms: Sequence[Arm], options: Options, say: Say) -> Outcome:
    """Take every arm through changing load, and write what came of it."""
    workshop = Workshop(arms, options, say)
    workload, temperature = workshop.workload(), options.temperatures[0]
    phases = [Phase(load, options.step_seconds) for load in options.loads]
    courses: dict[str, list[load_steps.Bin]] = {}
    failures: list[Failure] = []
    is_complete = False
    try:
        for arm in opening_order(arms):
            say(f"{arm.name}: {sum(phase.seconds for phase in phases):.0f} s")
            try:
                target = workshop.open_local(arm)
                load_steps.warm_up(target, load_steps.jobs_of(workload, temperature), temperature)
                jobs = load_steps.jobs_of(workload, temperature)
                courses[arm.name] = load_steps.follow(target, phases, jobs, temperature, time.perf_counter)
            except Exception as error:
                failures.append(Failure(arm.name, None, one_line(error)))
                say(f"{arm.name} failed: {one_line(error)}")
        is_complete = True
    except KeyboardInterrupt:
        say("interrupted: writing what there is")
    done = Profile(workshop.about(), arms, phases, courses, failures, is_complete)
    files: dict[str, Callable[[], bytes]] = {"profile.json": lambda: load_steps.to_json(done).encode()}
    if courses:
        files["profile.html"] = lambda: load_steps.to_html(done).encode()
        files["profile.png"] = lambda: page.row_png(load_steps.charts(done))
    return Outcome(load_steps.to_text(done), _write(options.out, files), not is_complete, not courses)


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
