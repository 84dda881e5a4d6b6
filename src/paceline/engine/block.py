"""What a worker's answer is worth: whether it can be one, and where its request ends in it.

Pure functions over records; know nothing of queues, rows' owners or pages.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from paceline.engine.pages import InvariantError, ensure
from paceline.request import FinishReason
from paceline.step import GrammarEnd, Plan, StepResult


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a block of new tokens ends for its request."""

    num_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None


def cut(
    token_ids: tuple[int, ...],
    known_len: int,
    max_len: int,
    stop_ids: Set[int],
    grammar_end: GrammarEnd | None = None,
) -> Cut:
    """The part of a block up to its first stop token (included), its grammar's end or the length limit.

    A stop token in the last place allowed is a stop, and so is a grammar's end there.
    """
    if grammar_end is not None and grammar_end.num_tokens == 0:
        return _grammar_cut(grammar_end)
    for num_tokens, token in enumerate(token_ids, start=1):
        if token in stop_ids:
            return Cut(num_tokens, "stop", token)
        if grammar_end is not None and num_tokens == grammar_end.num_tokens:
            return _grammar_cut(grammar_end)
        if known_len + num_tokens >= max_len:
            return Cut(num_tokens, "length")
    return Cut(len(token_ids))


def _grammar_cut(end: GrammarEnd) -> Cut:
    return Cut(end.num_tokens, "stop" if end.error is None else "error", error=end.error)


def check_result(plan: Plan, result: StepResult) -> None:
    """Refuse an answer that cannot be one of this plan, before anything of it is committed.

    Raises:
        InvariantError: says what the worker got wrong.
    """
    ensure(result.step_id == plan.step_id, f"step {plan.step_id} was answered with step {result.step_id}")
    ensure(len(result.rows) == len(plan.rows), f"{len(plan.rows)} rows ran, {len(result.rows)} came back")
    for step, got in zip(plan.rows, result.rows, strict=True):
        if got.row != step.row:
            raise InvariantError(f"row {step.row} was answered with row {got.row}")
        most = 1 + step.depth if step.samples else 0
        if len(got.token_ids) > most:
            raise InvariantError(f"row {step.row} yielded {len(got.token_ids)} tokens of at most {most}")
        num_accepted = max(0, len(got.token_ids) - 1)
        if not num_accepted <= got.num_verified <= got.num_drafted <= step.depth or got.depth != step.depth:
            raise InvariantError(
                f"row {step.row} was planned with depth {step.depth}: {num_accepted} drafts accepted, "
                f"{got.num_verified} verified, {got.num_drafted} made at depth {got.depth}"
            )
        if got.logprobs is not None and len(got.logprobs) != len(got.token_ids):
            raise InvariantError(
                f"row {step.row} has {len(got.logprobs)} logprobs for {len(got.token_ids)} tokens"
            )
