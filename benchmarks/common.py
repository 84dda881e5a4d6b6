"""What every benchmark shares: real prompts, taking turns, paired ratios, and the results files.

A benchmark writes `results/NAME.json` and a table beside it, `results/NAME.md`. Its *parts* can be measured
one at a time: a part measured again replaces its row, and the others stay, provided that they were
measured on the same device with the same versions.

Knows nothing of engines or models, and imports nothing heavy: a benchmark may measure memory first.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import operator
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

FOLDER = Path(__file__).resolve().parent
PROMPTS = FOLDER / "data" / "prompts.jsonl"
RESULTS = FOLDER / "results"

Op = Literal[">=", "<=", ">", "<", "=="]
Row: TypeAlias = dict[str, Any]
Input = TypeVar("Input")
Outcome = TypeVar("Outcome")

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}


# Prompts.


def read_prompts(path: Path = PROMPTS, seed: int = 0) -> list[str]:
    """All turns of the prompt file, in an order that mixes its categories and depends on `seed` alone."""
    with path.open(encoding="utf-8") as lines:
        texts = ["\n".join(json.loads(line)["turns"]) for line in lines]
    random.Random(seed).shuffle(texts)
    return texts


class PromptCutter:
    """Cuts prompts of exact lengths from one long text, no two from the same place.

    Windows follow one another. From the end of the text it goes on at the first place where no earlier
    prompt began: a prompt begins like no earlier one, and no prefix cache can help.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._begins: set[int] = set()
        self._next = 0

    def cut(self, length: int) -> list[int]:
        """The next `length` tokens.

        Raises:
            ValueError: the text is too short, or every place in it has been used.
        """
        last = len(self._token_ids) - length
        places = itertools.chain(range(self._next, last + 1), range(min(self._next, last + 1)))
        begin = next((place for place in places if place not in self._begins), None)
        if begin is None:
            raise ValueError(f"no {length} fresh tokens are left in a text of {len(self._token_ids)}")
        self._begins.add(begin)
        self._next = begin + length
        return list(self._token_ids[begin : begin + length])

    def batch(self, num: int, length: int) -> list[list[int]]:
        """`num` prompts of `length` tokens."""
        return [self.cut(length) for _ in range(num)]


# Turns and ratios.


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One batch of requests, from their submission together to the last token.

    The decode phase begins when every request has its first token and ends with the step in which the
    first one finishes: throughout it every request is decoding, and nothing else runs.
    """

    prompt_seconds: float  # submission to the moment when the last request has its first token
    decode_seconds: float
    decode_tokens: int  # over all requests
    whole_seconds: float
    whole_tokens: int  # generated, over all requests
    num_cached_tokens: int  # prompt tokens that a prefix cache had
    token_ids: tuple[tuple[int, ...], ...]  # generated, per request

    @property
    def decode_rate(self) -> float:
        """Tokens a second in the decode phase."""
        return self.decode_tokens / self.decode_seconds

    @property
    def whole_rate(self) -> float:
        """Generated tokens a second, prompts included in the time."""
        return self.whole_tokens / self.whole_seconds


def take_turns(
    sides: Mapping[str, Callable[[Input], Outcome]], inputs: Sequence[Input], pause: float = 0.1
) -> list[dict[str, Outcome]]:
    """Run every side on every input, one after the other; who begins changes with every input.

    Args:
        pause: seconds before each turn, in which the threads of the side before fall asleep.

    Returns:
        One outcome per side, for each input.
    """
    names = list(sides)
    rounds = []
    for i, given in enumerate(inputs):
        first = i % len(names)
        outcomes = {}
        for name in names[first:] + names[:first]:
            time.sleep(pause)
            outcomes[name] = sides[name](given)
        rounds.append({name: outcomes[name] for name in names})
    return rounds


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far the single values lie from it."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of one value or more. Raises statistics.StatisticsError for none."""
        listed = sorted(values)
        return cls(statistics.median(listed), listed[0], listed[-1], len(listed))

    def show(self, digits: int = 2) -> str:
        """As a table cell: `1.32 (1.30–1.35)`."""
        if self.num == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def paired_ratios(rounds: Sequence[Mapping[str, float]], over: str, under: str) -> Spread:
    """The spread of `over / under`, taken within each round: drift of the machine cancels."""
    return Spread.of(values[over] / values[under] for values in rounds)


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two answers have in common before they part."""
    num = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num += 1
    return num


# Results.


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that was asked for. `value` is None where it was not measured."""

    name: str
    value: float | None
    op: Op
    bar: float

    @property
    def is_met(self) -> bool | None:
        """Whether the value meets the bar; None if there is no value."""
        return None if self.value is None else _COMPARE[self.op](self.value, self.bar)

    def show(self) -> str:
        """As a table cell: `≥ 1.4 ✓`."""
        mark = {True: " ✓", False: " ✗", None: " (not measured)"}[self.is_met]
        return f"{self.op.replace('>=', '≥').replace('<=', '≤')} {self.bar:g}{mark}"


class Results:
    """The results files of one benchmark, with the rows they hold.

    Args:
        name: of the files, `name.json` and `name.md`.
        packages: whose versions matter, beside Python's and Paceline's.
        folder: where the files are.
        is_fresh: start without the rows of earlier runs.
        command: what was typed, if not a program of this folder.
    """

    def __init__(
        self,
        name: str,
        packages: Sequence[str],
        folder: Path = RESULTS,
        is_fresh: bool = False,
        command: str | None = None,
    ) -> None:
        self.device = describe_device()
        self.versions = {"python": platform.python_version(), **_versions(["paceline", *packages])}
        self._name, self._folder = name, folder
        self._command = command or command_line(sys.argv)
        self._rows: dict[str, Row] = {}
        if not is_fresh:
            self._rows = {row["part"]: row for row in self._earlier_rows()}

    def _earlier_rows(self) -> list[Row]:
        path = self._folder / f"{self._name}.json"
        if not path.is_file():
            return []
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if (earlier["device"], earlier["versions"]) != (self.device, self.versions):
            return []
        rows: list[Row] = earlier["rows"]
        return rows

    def row(self, part: str) -> Row | None:
        """What is known of a part, measured now or earlier."""
        return self._rows.get(part)

    def put(self, part: str, row: Row) -> None:
        """Keep what was just measured."""
        self._rows[part] = {"part": part, **row, "date": _now(), "command": self._command}

    def write(self, order: Sequence[str], bars: Sequence[Bar], table: str) -> None:
        """Write both files: rows in this order of parts, and the table under its heading."""
        document = {
            "name": self._name,
            "device": self.device,
            "versions": self.versions,
            "date": _now(),
            "command": self._command,
            "rows": [self._rows[part] for part in order if part in self._rows],
            "bars": [asdict(bar) for bar in bars],
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (self._folder / f"{self._name}.json").write_text(text + "\n", encoding="utf-8")
        (self._folder / f"{self._name}.md").write_text(self.heading() + table, encoding="utf-8")

    def heading(self) -> str:
        """Title, device and versions, for people."""
        where = ", ".join(f"{name} {value}" for name, value in self.device.items())
        what = ", ".join(f"{name} {value}" for name, value in self.versions.items())
        return f"# {self._name}\n\n{where}.  \n{what}.  \nWritten {_now()}.\n\n"


def describe_device() -> dict[str, str]:
    """The machine, in words that tell whether two results can be compared; no names of hosts or users."""
    device = {"cpu": platform.processor() or platform.machine(), "cores": str(_num_cores())}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
        device["cpu"] = facts.get("model name", device["cpu"])
        pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        device["memory"] = f"{pages * page_size / 1e9:.0f} GB"
    except (OSError, ValueError):  # not Linux
        pass
    device["system"] = platform.system()
    return device


def command_line(argv: Sequence[str]) -> str:
    """The command as one would type it in the repository; other paths are cut to their names."""
    arguments = [Path(word).name if os.sep in word else word for word in argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *arguments])


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def _num_cores() -> int:
    """Cores this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
