"""The records that scheduler and worker exchange, and the two seams between them.

A step is a ragged batch over *rows*. A row is a slot of the worker's state tensors (length,
last token, block table, sampling parameters); a request keeps one row from admission until it
finishes or is preempted. The scheduler plans with upper bounds and never reads the device; the
worker holds the truth and reports it one record per row.

Everything here is frozen and complete when made: nobody fills a record in later.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowStart:
    """A request takes a row: all that the worker must know of it, said once.

    `token_ids` are the known tokens: the prompt and, after a preemption, what was generated
    before it. K/V of the first `computed_len` positions is already in `page_ids`.
    """

    row: int
    token_ids: tuple[int, ...]
    prompt_len: int
    computed_len: int
    page_ids: tuple[int, ...]
    params: SamplingParams
    choice: int
    max_len: int  # prompt plus generated tokens never exceed this (the device clamps to it)


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one row does in one step.

    The row computes `query_len` of its known tokens, from where it stands. If that reaches the
    newest one (`samples`), the step yields 1 to 1 + `depth` new tokens; otherwise it is a chunk
    of a prompt and yields none.
    """

    row: int
    query_len: int
    samples: bool
    depth: int = 0
    new_page_ids: tuple[int, ...] = ()  # appended to the row's block table before the step
    shadow_depth: int = 0  # at depth 0: drafts to make beside the step and to report, not to verify


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first `ends` give their rows back, then `starts` take rows, then `rows` run."""

    step_id: int
    ends: tuple[int, ...]
    starts: tuple[RowStart, ...]
    rows: tuple[RowStep, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens through the target model, drafts included."""
        return sum(r.query_len + r.depth for r in self.rows)


@dataclass(frozen=True, slots=True)
class GrammarEnd:
    """Where the grammar of a row lets nothing follow."""

    num_tokens: int  # of the result's tokens, those before the end
    error: str | None = None  # why it cannot go on; None: the answer is complete


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row of a plan came to: `len(token_ids)` is its accept_len, 0 for a prompt chunk.

    A row whose grammar failed before a token was chosen yields none, and says so in `grammar_end`.
    `prompt_logprobs`, for rows that ask, has an entry for the token after each computed one, as far
    as those are the prompt's.
    """

    row: int
    depth: int  # the depth it was made with, which need not be the current one
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token, for rows that ask
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    grammar_end: GrammarEnd | None = None
    num_drafted: int = 0  # drafts that the drafter proposed
    num_verified: int = 0  # of them, those that went through the target
    draft_probs: tuple[float, ...] | None = None  # the drafter's top probability at each, for rows that ask
    shadow_ids: tuple[int, ...] = ()  # drafts that nobody verified, of the tokens from this step's first on


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan, in the plan's row order."""

    step_id: int
    rows: tuple[RowResult, ...]
    drafter_error: str | None = None  # why the drafter has turned itself off, in one line


class Pending(Protocol):
    """A launched step whose result may still be on the device."""

    def result(self) -> StepResult:
        """Wait for the step and return what it came to."""
        ...


class Worker(Protocol):
    """Runs plans. Keeps per-row state; knows nothing of requests, queues or text."""

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Begin, off the step's path, what a row with these parameters needs before it may start.

        None: nothing. An exception of the future is the reason why such a row cannot run.
        """
        ...

    def launch(self, plan: Plan) -> Pending:
        """Apply `plan.ends` and `plan.starts`, start the step, and return without waiting."""
        ...
