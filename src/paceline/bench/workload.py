"""What every arm is asked: the same prompts in the same order, answers of the same lengths.

A *column* is a load to measure at. Its *work* is a list of jobs for that many clients, each of which sends
its next job when its last is answered. The first jobs are of staggered lengths, so that answers do not
all end in the same step: the prompts of the next ones come spread over time, as they do in service.

Knows nothing of arms, engines or tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

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
class Job:
    """One request. The answer has exactly `answer_len` tokens, whatever the model would rather do."""

    prompt: str  # a user's message
    answer_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Work:
    """What an arm does in one round."""

    column: Column
    jobs: tuple[Job, ...]

    @property
    def num_tokens(self) -> int:
        """Answer tokens of all jobs."""
        return sum(job.answer_len for job in self.jobs)


def read_prompts(path: Path = PROMPTS, max_chars: int | None = None, seed: int = 0) -> list[str]:
    """The prompts of a file of JSON lines (`turns` or `prompt`), in an order that mixes its categories.

    Args:
        max_chars: longer prompts are left out.

    Raises:
        ConfigError: the file cannot be read, a line has no prompt, or none is short enough.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--prompts: cannot read {path}: {reason}") from None
    prompts = [
        _prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    fitting = [prompt for prompt in prompts if max_chars is None or len(prompt) <= max_chars]
    if not fitting:
        limit = "" if max_chars is None else f" of at most {max_chars} characters (--max-prompt-chars)"
        raise ConfigError(f"--prompts: {path} has no prompt{limit}")
    random.Random(seed).shuffle(fitting)
    return fitting


def _prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
        prompt = record["prompt"] if "prompt" in record else "\n".join(record["turns"])
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'--prompts: {where}: needs JSON with "prompt" or "turns"')
    return prompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes the work of any column and round.

    Args:
        lengthen: brings a prompt to so many tokens, out of a filler text; needed for columns with a
            context, which a tokenizer has to count.
    """

    prompts: Sequence[str]
    answer_len: int
    min_tokens: int  # answer tokens in one round, at least
    lengthen: Callable[[str, str, int], str] | None = None

    def work(self, column: Column, round_id: int) -> Work:
        """The same for every arm; other prompts in every round, as long as there are any.

        Two jobs for each client at least: the second ones are measured while the first ones end.
        """
        clients, answer_len = column.concurrency, self.answer_len
        num_jobs = max(2 * clients, -(-self.min_tokens // answer_len))
        jobs = []
        for i in range(num_jobs):
            length = max(1, answer_len * (i + 1) // clients) if i < clients else answer_len
            number = round_id * num_jobs + i
            jobs.append(Job(self._prompt(column, number), length, SEED + number))
        return Work(column, tuple(jobs))

    def _prompt(self, column: Column, number: int) -> str:
        prompt = self.prompts[number % len(self.prompts)]
        if column.context_len is None:
            return prompt
        assert self.lengthen is not None, "columns with a context need a tokenizer"
        others = (self.prompts[(number + i) % len(self.prompts)] for i in range(1, len(self.prompts) + 1))
        return self.lengthen(prompt, "\n\n".join(others), column.context_len)
