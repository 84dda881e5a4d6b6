"""A worker without weights that believes nothing it is told.

Its drafter proposes `depth` drafts, and is sure of the first: each one behind is half as probable as the
one before.

Its K/V cache holds, for each slot, a fingerprint of the token there and of all before it. Every
step reads the whole row back through its block table, so a page given to two rows, a wrong prefix
hit, a chunk that was skipped or a stale write shows at once. Tokens are a function of the row's own
history, hence independent of batch, chunks, depth and preemption.

As on a device, `launch` acts at once and in order, and the host sees the result when it asks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config import EngineConfig
from paceline.request import EngineRequest, TokenLogprobs
from paceline.step import Plan, RowResult, RowStart, RowStep, StepResult

VOCAB_SIZE = 40
EOS = 0
TRASH_PAGE = 0
REJECTED = -1  # what a draft that was not accepted leaves in its slot

NextToken = Callable[[Sequence[int]], int]


def fingerprint(parent: int, token: int) -> int:
    return (parent * 1_000_003 + token + 1) % ((1 << 61) - 1)


def hashed(history: Sequence[int]) -> int:
    value = 7
    for token in history:
        value = fingerprint(value, token)
    return (value >> 7) % VOCAB_SIZE


def logprob_of(history: Sequence[int], token: int) -> TokenLogprobs:
    return TokenLogprobs(-len(history) - token / 100, [token], [0.0])


def alone(
    request: EngineRequest, max_model_len: int, next_token: NextToken = hashed
) -> tuple[list[int], str]:
    """What the request must come to: its tokens and finish reason, by the definition and nothing else."""
    history, params = list(request.prompt_ids), request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    limit = min(len(history) + params.max_tokens, max_model_len)
    while True:
        history.append(next_token(history))
        if history[-1] in stops or len(history) == limit:
            reason = "stop" if history[-1] in stops else "length"
            return history[len(request.prompt_ids) :], reason


@dataclass
class Row:
    start: RowStart
    history: list[int]
    computed_len: int
    page_ids: list[int]


@dataclass
class Done:
    answer: StepResult

    def result(self) -> StepResult:
        return self.answer


class FakeWorker:
    """`accepts` says how many of `depth` drafts are right after a history; by default all of them."""

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        next_token: NextToken = hashed,
        accepts: Callable[[Sequence[int], int], int] = lambda history, depth: depth,
    ) -> None:
        self.config, self.next_token, self.accepts = config, next_token, accepts
        self.kv = [[REJECTED] * config.page_size for _ in range(num_pages)]
        self.rows: dict[int, Row] = {}
        self.plans: list[Plan] = []
        self.drafter_error: str | None = None  # set by a test: from the next step on nothing is drafted

    def launch(self, plan: Plan) -> Done:
        assert plan.step_id == len(self.plans)
        assert 0 < plan.num_tokens <= self.config.max_num_batched_tokens
        self.plans.append(plan)
        for row in plan.ends:
            del self.rows[row]
        for start in plan.starts:
            assert start.row not in self.rows
            assert 0 <= start.row < self.config.max_num_seqs
            assert start.computed_len < len(start.token_ids)
            assert start.computed_len == len(start.page_ids) * self.config.page_size, (
                "only full pages are hit"
            )
            self.rows[start.row] = Row(start, list(start.token_ids), start.computed_len, list(start.page_ids))
        assert len({step.row for step in plan.rows}) == len(plan.rows)
        for step in plan.rows:
            self.rows[step.row].page_ids.extend(step.new_page_ids)
        self._check_owners()
        rows = tuple(self._run(self.rows[step.row], step) for step in plan.rows)
        return Done(StepResult(plan.step_id, rows, self.drafter_error))

    def _check_owners(self) -> None:
        """A page that a row may still write is in no other row's table."""
        holders: dict[int, int] = {}
        for row in self.rows.values():
            for page in row.page_ids:
                assert TRASH_PAGE < page < len(self.kv)
                holders[page] = holders.get(page, 0) + 1
        for row in self.rows.values():
            writable = row.page_ids[row.computed_len // self.config.page_size :]
            assert all(holders[page] == 1 for page in writable), f"row {row.start.row} shares a writable page"

    def _run(self, row: Row, step: RowStep) -> RowResult:
        num_known, max_len = len(row.history), row.start.max_len
        if step.samples and num_known >= max_len:
            return self._result(row, step, ())  # full: the host does not know yet
        assert step.query_len >= 1
        end = row.computed_len + step.query_len
        assert (end == num_known) == step.samples, f"{end} of {num_known} tokens, samples={step.samples}"
        self._compute(row, end)
        if not step.samples:
            return RowResult(step.row, step.depth, ())
        num_right = 0 if self.drafter_error else self.accepts(row.history, step.depth)
        accept_len = 1 + min(num_right, step.depth, max_len - num_known - 1)
        logprobs = []
        for _ in range(accept_len):
            token = self.next_token(row.history)
            logprobs.append(logprob_of(row.history, token))
            row.history.append(token)
        self._compute(row, len(row.history) - 1)
        for position in range(len(row.history) - 1, min(num_known + step.depth, max_len - 1)):
            self._write(row, position, REJECTED)
        wanted = row.start.params.logprobs is not None
        return self._result(row, step, tuple(row.history[num_known:]), tuple(logprobs) if wanted else None)

    def _result(
        self,
        row: Row,
        step: RowStep,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None = None,
    ) -> RowResult:
        num_drafted = 0 if self.drafter_error else step.depth
        probs = tuple(0.5**i for i in range(num_drafted)) if row.start.params.speculation_summary else None
        num_verified = max(len(token_ids) - 1, num_drafted - 1)  # a worker may leave the last draft out
        return RowResult(
            step.row,
            step.depth,
            token_ids,
            logprobs,
            num_drafted=num_drafted,
            num_verified=num_verified if num_drafted else 0,
            draft_probs=probs,
        )

    def _compute(self, row: Row, end: int) -> None:
        """Read K/V of the computed tokens, write that of the others up to `end`."""
        value = 7
        for position, token in enumerate(row.history[:end]):
            value = fingerprint(value, token)
            if position >= row.computed_len:
                self._write(row, position, value)
            page, offset = divmod(position, self.config.page_size)
            held = self.kv[row.page_ids[page]][offset]
            assert held == value, f"row {row.start.row} reads another's K/V at position {position}"
        row.computed_len = max(row.computed_len, end)

    def _write(self, row: Row, position: int, value: int) -> None:
        page, offset = divmod(position, self.config.page_size)
        assert page < len(row.page_ids), f"row {row.start.row} writes position {position} beyond its pages"
        self.kv[row.page_ids[page]][offset] = value
