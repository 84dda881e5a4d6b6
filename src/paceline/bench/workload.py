"""What every arm is asked: the same prompts in the same order, answers of the same lengths.

A *column* is a load to measure at. Its *work* is a list of jobs for that many clients, each of which sends
its next job when its last is answered. The first jobs are of staggered lengths, so that answers do not
all end in the same step: the prompts of the next ones come spread over time, as they do in service.

Prompts may have temperatures of their own. Then each client keeps to prompts of one temperature (a *lane*
of the work), so that as many requests of each kind are in flight all the time, however fast each kind is.

Knows nothing of arms, engines or tokens.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RequestError
from paceline.request import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")
SEED = 20_261_129


@dataclass(frozen=True, slots=True, order=True)
class Column:
    """A load."""

    temperature: float
    context_len: int | None  # tokens that every prompt is brought to; None: prompts as they are
    concurrency: int  # requests in flight

    def __str__(self) -> str:
        requests = "1 request" if self.concurrency == 1 else f"{self.concurrency} requests"
        context = "" if self.context_len is None else f", context {self.context_len}"
        return f"{requests}, temperature {self.temperature:g}{context}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, and the temperature of its answer; None: the column's."""

    text: str
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: str  # a user's message
    answer_len: int  # tokens
    seed: int
    temperature: float
    natural_stop: bool = False  # the model may end the answer sooner; else it has exactly these tokens
    lane: int = 0  # a client takes its next job from that of its last


@dataclass(frozen=True, slots=True)
class Work:
    """What an arm does in one round."""

    column: Column
    jobs: tuple[Job, ...]  # the first ones are the clients' firsts, one each

    @property
    def num_tokens(self) -> int:
        """Answer tokens of all jobs, at most."""
        return sum(job.answer_len for job in self.jobs)


class Deal:
    """The jobs of a work while it is done: each client's first, and what comes after a job that ended."""

    def __init__(self, work: Work) -> None:
        self.firsts = work.jobs[: work.column.concurrency]
        self._lanes: dict[int, deque[Job]] = {}
        for job in work.jobs[len(self.firsts) :]:
            self._lanes.setdefault(job.lane, deque()).append(job)

    def after(self, job: Job) -> Job | None:
        """The next job of the client that did this one; None: there is none left for it."""
        lane = self._lanes.get(job.lane)
        return lane.popleft() if lane else None


def read_prompts(path: Path = PROMPTS, max_chars: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts of a file of JSON lines (`turns` or `prompt`), in an order that mixes its categories.

    A line may have a `temperature`, which goes before the column's.

    Args:
        max_chars: longer prompts are left out.

    Raises:
        ConfigError: the file cannot be read, a line has no prompt or a temperature that no request could
            have, or no prompt is short enough.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--prompts: cannot read {path}: {reason}") from None
    prompts = [
        _prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    fitting = [prompt for prompt in prompts if max_chars is None or len(prompt.text) <= max_chars]
    if not fitting:
        limit = "" if max_chars is None else f" of at most {max_chars} characters (--max-prompt-chars)"
        raise ConfigError(f"--prompts: {path} has no prompt{limit}")
    random.Random(seed).shuffle(fitting)
    return fitting


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
        text = record["prompt"] if "prompt" in record else "\n".join(record["turns"])
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or not text:
        raise ConfigError(f'--prompts: {where}: needs JSON with "prompt" or "turns"')
    return Prompt(text, _temperature(record.get("temperature"), where))


def _temperature(value: Any, where: str) -> float | None:
    """As the API would take it."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--prompts: {where}: temperature must be a number, got {json.dumps(value)}")
    try:
        return float(SamplingParams(temperature=value).temperature)
    except RequestError as error:
        raise ConfigError(f"--prompts: {where}: {error}") from None


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes the work of any column and round.

    Args:
        lengthen: brings a prompt to so many tokens, out of a filler text; needed for columns with a
            context, which a tokenizer has to count.
        natural_stop: answers may end before `answer_len` tokens, where the model ends them.
    """

    prompts: Sequence[Prompt]
    answer_len: int
    min_tokens: int  # answer tokens in one round, at least (were none to end sooner)
    lengthen: Callable[[str, str, int], str] | None = None
    natural_stop: bool = False

    def work(self, column: Column, round_id: int) -> Work:
        """The same for every arm; other prompts in every round, as long as there are any.

        Two jobs for each client at least: the second ones are measured while the first ones end.
        """
        clients, answer_len = column.concurrency, self.answer_len
        lanes = self._lanes(clients)
        a_lane = max(2 * -(-clients // len(lanes)), -(-self.min_tokens // (answer_len * len(lanes))))
        num_jobs = a_lane * len(lanes)
        jobs = []
        for i in range(num_jobs):
            number = round_id * num_jobs + i
            lane = i % len(lanes)
            prompts = lanes[lane]
            place = number // len(lanes)
            temperature = prompts[place % len(prompts)].temperature
            job = Job(
                prompt=self._text(prompts, place, column.context_len),
                answer_len=max(1, answer_len * (i + 1) // clients) if i < clients else answer_len,
                seed=SEED + number,
                temperature=column.temperature if temperature is None else temperature,
                natural_stop=self.natural_stop,
                lane=lane,
            )
            jobs.append(job)
        return Work(column, tuple(jobs))

    def describe(self) -> str:
        """What every arm is asked, in words."""
        long = "at most" if self.natural_stop else "exactly"
        answers = f"answers of {long} {self.answer_len} tokens"
        own = sorted({p.temperature for p in self.prompts if p.temperature is not None})
        if not own:
            return answers
        shown = ", ".join(f"{temperature:g}" for temperature in own)
        return f"{answers}, prompts with temperatures of their own ({shown})"

    def _lanes(self, clients: int) -> list[list[Prompt]]:
        """The prompts by their temperatures; all together where there are fewer clients than that."""
        lanes: dict[float | None, list[Prompt]] = {}
        for prompt in self.prompts:
            lanes.setdefault(prompt.temperature, []).append(prompt)
        return [list(self.prompts)] if clients < len(lanes) else list(lanes.values())

    def _text(self, prompts: Sequence[Prompt], place: int, context_len: int | None) -> str:
        text = prompts[place % len(prompts)].text
        if context_len is None:
            return text
        assert self.lengthen is not None, "columns with a context need a tokenizer"
        others = (prompts[(place + i) % len(prompts)].text for i in range(1, len(prompts) + 1))
        return self.lengthen(text, "\n\n".join(others), context_len)
