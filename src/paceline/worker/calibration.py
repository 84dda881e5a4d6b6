"""How long steps take on this machine: the samples that the governor's cost model is made from.

Steps run on the real worker over rows that are made up: what a step costs depends on how many tokens, rows,
drafts and cached positions it has and not on which, so nothing has to be computed before it is timed. The
drafter drafts in earnest and is timed by itself; its drafts are then exchanged for made-up ones, so that
the target always gets as many tokens as planned, also where the drafter finds nothing to propose.

Rows sample at temperature 1, as requests do that say nothing: drawing goes over the vocabulary once more
than taking the greatest, and a server of greedy requests learns the little that it saves while serving.

Knows nothing of what is made of the samples or where they are kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tqdm import tqdm

from paceline.draft.protocol import Choose, Drafter, Round, Settled
from paceline.errors import ConfigError, ModelError
from paceline.policy import DraftSample, TargetSample
from paceline.request import SamplingParams
from paceline.step import Plan, RowStart, RowStep
from paceline.worker.worker import ModelWorker

BUDGET_SECONDS = 12.0

_NUM_DENSE = 16  # numbers of tokens of which each is measured: there the curve has its steps
_SPARSE = (24, 32, 48, 64, 96, 128, 192, 256)
_DRAFTING_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_SHALLOW, _FEW_TOKENS = (
    3,
    64,
)  # deeper drafts are only measured in steps of few tokens: elsewhere nobody drafts
_COARSE_ROWS, _COARSE_DEPTHS = (1, 4, 16, 64), (0, 1, 3)  # measured first, where there is little time

_SHORT_CONTEXT, _LONG_CONTEXT = 64, 2048
_LONG_TOTAL = 4096  # tokens over all rows: memory that is touched stays taken
# Where short contexts have cells of as many tokens: only what differs is the context's.
_LONG_CELLS = ((1, 3), (4, 0), (4, 3), (16, 0), (16, 3))  # rows and depth
_PROMPTS = (16, 64, 256)

_FEWEST, _MOST = 3, 9  # timings of a cell
_FIRST_PASS_SHARE = 0.5  # of the budget; what does not fit into it is left out
_PARAMS = SamplingParams(temperature=1.0, seed=0)

Clock = Callable[[], float]


class Cell(NamedTuple):
    """A kind of step: rows alike, each with a context of so many tokens; and a prompt beside them."""

    num_rows: int
    depth: int
    context_len: int  # of each row
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """m, through the target for decoding rows."""
        return self.num_rows * (1 + self.depth)

    @property
    def size(self) -> int:
        """All tokens of the step."""
        return self.num_tokens + self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step of this engine can be."""

    num_rows: int
    num_tokens: int  # in one step
    max_len: int  # of a row
    num_pages: int  # page 0, the trash page, among them
    page_size: int
    deepest: int  # at least 1
    vocab_size: int


class Samples(NamedTuple):
    """A median for every cell that was measured."""

    target: list[TargetSample]
    drafts: list[DraftSample]
    spread: float = 0.0  # standard deviation of a cell's timings over their median; the median of cells


def plan_cells(limits: Limits) -> list[Cell]:
    """The cells to measure, those without which there is no cost model first.

    Raises:
        ConfigError: there is no room for a row that drafts.
    """
    most = min(limits.num_tokens, max(2 * limits.num_rows, _NUM_DENSE))
    short = min(_SHORT_CONTEXT, limits.max_len - limits.deepest - 2)
    plain = {*range(1, _NUM_DENSE + 1), *_SPARSE, limits.num_rows}
    cells = {Cell(rows, 0, short) for rows in plain}
    for rows in (*_DRAFTING_ROWS, limits.num_rows):
        for depth in {*_DEPTHS, limits.deepest}:
            if depth <= min(limits.deepest, _SHALLOW) or rows * (1 + depth) <= _FEW_TOKENS:
                cells.add(Cell(rows, depth, short))
    cells |= {Cell(1, depth, short) for depth in range(1, _NUM_DENSE)}
    for rows, depth in _LONG_CELLS:
        capacity = min((limits.num_pages - 1) // rows * limits.page_size, limits.max_len)
        long = min(_LONG_CONTEXT, _LONG_TOTAL // rows, capacity - limits.deepest - 2)
        if long >= 2 * short:
            cells.add(Cell(rows, depth, long))
    beside = min(1, limits.num_rows - 1)
    cells |= {Cell(beside, 0, short, num) for num in _PROMPTS}
    fitting = [cell for cell in cells if _fits(cell, limits) and cell.num_tokens <= most]
    needed = {Cell(1, 0, short), Cell(1, 1, short)}
    if not needed <= set(fitting):
        raise ConfigError(
            f"no room for a row that drafts: max_model_len {limits.max_len}, {limits.num_pages - 1} pages, "
            f"{limits.num_tokens} tokens a step"
        )

    def rank(cell: Cell) -> tuple[bool, bool, int, Cell]:
        is_coarse = cell.num_rows in _COARSE_ROWS and cell.depth in _COARSE_DEPTHS
        return cell not in needed, not is_coarse, cell.size, cell

    return sorted(fitting, key=rank)


def _fits(cell: Cell, limits: Limits) -> bool:
    rows = cell.num_rows + bool(cell.num_prompt_tokens)
    pages = cell.num_rows * _pages(cell.context_len + cell.depth + 2, limits)
    pages += _pages(cell.num_prompt_tokens + 1, limits) if cell.num_prompt_tokens else 0
    return (
        rows <= limits.num_rows
        and cell.size <= limits.num_tokens
        and pages < limits.num_pages
        and cell.context_len >= 2
        and cell.depth <= limits.deepest
        and max(cell.context_len + cell.depth, cell.num_prompt_tokens) + 2 <= limits.max_len
    )


def _pages(num_tokens: int, limits: Limits) -> int:
    return -(-num_tokens // limits.page_size)


def measure(
    worker: ModelWorker,
    limits: Limits,
    *,
    budget_seconds: float = BUDGET_SECONDS,
    clock: Clock = time.perf_counter,
    progress: bool = False,
) -> Samples:
    """Time steps of every kind, in turns; the worker has its rows free and its own drafter again afterwards.

    One pass warms up and finds out what each cell costs; those that do not fit into half of the budget are
    left out. The others are timed three to nine times, the dear ones less often.

    Args:
        worker: idle, with a drafter.
        budget_seconds: time to spend; exceeded by a step at most, once there is one timing of a plain step
            and one of a draft.

    Raises:
        ConfigError: there is no room for a row that drafts.
        ModelError: the drafter fails.
    """
    drafter = worker.drafter
    assert drafter is not None
    cells = plan_cells(limits)
    watched = _Watched(drafter, clock, limits, worker.device)
    bench = _Bench(worker, watched, limits, clock)
    begun = clock()
    bar = tqdm(
        total=len(cells) * (1 + _FEWEST), desc="timing", unit="step", disable=not progress, leave=False
    )
    with bar, worker.drafting_by(watched):
        try:
            timings = _first_pass(bench, cells, begun + _FIRST_PASS_SHARE * budget_seconds, bar)
            _more_passes(bench, timings, begun + budget_seconds, bar)
        finally:
            bench.clear()
    return _samples(timings)


class _Timing(NamedTuple):
    """Seconds of a step, and of the part that ends when its drafts are there."""

    whole: float
    drafting: float
    context_len: int  # over all rows


_Timings = dict[Cell, list[_Timing]]


def _first_pass(bench: _Bench, cells: Sequence[Cell], deadline: float, bar: tqdm) -> _Timings:
    timings: _Timings = {}
    for cell in cells:
        smaller = max((done for done in timings if done.size <= cell.size), key=_size, default=None)
        if smaller is not None and len(timings) >= 2:  # the two without which there is no model
            expected = timings[smaller][0].whole * cell.size / smaller.size
            if bench.clock() + expected > deadline:
                continue
        timings[cell] = [bench.run(cell)]
        bar.update()
    return timings


def _size(cell: Cell) -> int:
    return cell.size


def _more_passes(bench: _Bench, timings: _Timings, deadline: float, bar: tqdm) -> None:
    """Each cell as often as its share of the time allows, evenly spread over the passes."""
    costs = {cell: first.whole for cell, [first] in timings.items()}
    wanted = _shares(costs, deadline - bench.clock())
    bar.total = len(timings) + sum(wanted.values())
    bar.refresh()
    order = list(timings)
    for i in range(_MOST):
        for cell in order if i % 2 else reversed(order):
            is_due = i * wanted[cell] // _MOST < (i + 1) * wanted[cell] // _MOST
            if is_due and bench.clock() + costs[cell] <= deadline:
                timings[cell].append(bench.run(cell))
                bar.update()


def _shares(costs: dict[Cell, float], seconds: float) -> dict[Cell, int]:
    """How often to time each cell so that all take about `seconds`: about as long each, within the limits."""
    share = max(seconds, 0.0)
    while True:
        wanted = {
            cell: max(_FEWEST, min(_MOST, int(share / max(cost, 1e-9)))) for cell, cost in costs.items()
        }
        total = sum(num * costs[cell] for cell, num in wanted.items())
        if total <= seconds or max(wanted.values()) == _FEWEST:
            return wanted
        share *= 0.9


def _samples(timings: _Timings) -> Samples:
    samples, spreads = Samples([], []), []
    for cell, (first, *others) in timings.items():
        counted = others or [first]  # which has warmed up the others
        if len(counted) > 1:
            spreads.append(
                statistics.stdev(t.whole for t in counted) / statistics.median(t.whole for t in counted)
            )
        # The lower of two: whatever else runs on the machine makes steps longer, never shorter.
        target = statistics.median_low(t.whole - t.drafting for t in counted)
        context_len = counted[0].context_len
        samples.target.append(
            TargetSample(cell.num_tokens, cell.num_rows, context_len, target, cell.num_prompt_tokens)
        )
        if cell.depth:
            drafting = statistics.median_low(t.drafting for t in counted)
            samples.drafts.append(DraftSample(cell.num_rows, cell.depth, drafting))
    return samples._replace(spread=statistics.median(spreads) if spreads else 0.0)


class _Watched:
    """A drafter with a watch on it, whose drafts are exchanged for made-up ones."""

    def __init__(self, inner: Drafter, clock: Clock, limits: Limits, device: torch.device) -> None:
        self._inner, self._clock, self._device = inner, clock, device
        self.capture = inner.capture
        self.finished = 0.0
        made_up = torch.tensor(_made_up(limits.num_rows * limits.deepest, limits.vocab_size))
        self._made_up = made_up.view(limits.num_rows, limits.deepest).to(device)

    def settle(self, settled: Settled) -> None:
        """See `Drafter`. Part of every step, and so of the target's time, though serving hides much of it."""
        self._inner.settle(settled)

    def wait(self) -> None:
        """See `Drafter`."""
        self._inner.wait()

    def propose(self, drafting: Round, choose: Choose) -> torch.Tensor:
        """See `Drafter`."""
        drafts = self._inner.propose(drafting, choose)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.finished = self._clock()
        return self._made_up[: drafts.shape[0], : drafts.shape[1]].clone()


class _Bench:
    """Runs cells on a worker, one at a time, in rows and pages from the first ones on.

    All cells share the first pages, so what they read has been written to, but for the zeros with which K/V
    begins: memory that was never written is one page for all, which fits into a cache.
    """

    def __init__(self, worker: ModelWorker, watched: _Watched, limits: Limits, clock: Clock) -> None:
        self._worker, self._watched, self._limits, self.clock = worker, watched, limits, clock
        self._step_id = 0

    def run(self, cell: Cell) -> _Timing:
        """Time one step.

        Raises:
            ModelError: the drafter has failed in it.
        """
        starts = self._starts(cell)
        self._launch(starts=starts)
        decoding = [RowStep(row, 1, samples=True, depth=cell.depth) for row in range(cell.num_rows)]
        if cell.num_prompt_tokens:
            decoding.append(RowStep(cell.num_rows, cell.num_prompt_tokens, samples=False))
        begun = self.clock()
        self._launch(rows=tuple(decoding))
        self._watched.wait()
        ended = self.clock()
        self._launch(ends=tuple(start.row for start in starts))
        drafting = self._watched.finished - begun if cell.depth else 0.0
        return _Timing(ended - begun, drafting, cell.num_rows * cell.context_len)

    def _launch(
        self,
        ends: tuple[int, ...] = (),
        starts: tuple[RowStart, ...] = (),
        rows: tuple[RowStep, ...] = (),
    ) -> None:
        self._step_id -= 1  # an engine counts upwards
        result = self._worker.launch(Plan(self._step_id, ends, starts, rows)).result()
        if result.drafter_error is not None:
            raise ModelError(f"the drafter does not run: {result.drafter_error}")

    def _starts(self, cell: Cell) -> tuple[RowStart, ...]:
        limits, starts, page = self._limits, [], 1
        lens = [(cell.context_len, cell.context_len - 1)] * cell.num_rows
        if cell.num_prompt_tokens:
            lens.append((cell.num_prompt_tokens + 1, 0))
        for row, (known, computed) in enumerate(lens):
            end = page + _pages(known + cell.depth + 1, limits)
            starts.append(
                RowStart(
                    row=row,
                    token_ids=tuple(_made_up(known, limits.vocab_size)),
                    prompt_len=known,
                    computed_len=computed,
                    page_ids=tuple(range(page, end)),
                    params=_PARAMS,
                    choice=0,
                    max_len=limits.max_len,
                )
            )
            page = end
        return tuple(starts)

    def clear(self) -> None:
        """Give all rows back, whatever has happened."""
        self._worker.launch(Plan(0, tuple(range(self._limits.num_rows)), (), ()))


def _made_up(num: int, vocab_size: int) -> list[int]:
    """Token ids far from each other."""
    return [i * 7919 % vocab_size for i in range(1, num + 1)]
