"""One request inside the scheduler: its tokens, where they stand, and what is in flight for it.

    0 ........ computed_len ........ known_len ............ max_len
    | K/V is committed | known, K/V to come | not known yet |

Committed fields change only when a step is committed. Steps in flight are kept apart, as bounds:
each that samples adds at least one token and at most 1 + depth. Knows nothing of other
requests, of free pages or of the budget.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass, field

from paceline.engine.drafting import Tally
from paceline.engine.pages import ensure
from paceline.request import EngineRequest, TokenLogprobs
from paceline.step import RowResult, RowStart, RowStep

NO_ROW = -1


class Status(enum.Enum):
    """WAITING holds nothing; RUNNING holds a row; the other two still hold theirs for a step in flight."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()  # its steps in flight still count; then it waits again
    ENDED = enum.auto()  # its steps in flight are dropped; then it is gone


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state; equal to nothing but itself."""

    request: EngineRequest
    arrival: int  # smaller is older
    max_len: int  # prompt plus generated tokens
    stop_ids: Set[int]
    token_ids: list[int]  # known: the prompt, then what was generated

    status: Status = Status.WAITING
    row: int = NO_ROW
    page_ids: list[int] = field(default_factory=list)
    computed_len: int = 0  # committed tokens with K/V in `page_ids`
    digests: list[bytes] = field(default_factory=list)  # of the first full pages of `token_ids`
    num_published: int = 0  # of `page_ids`, from the first
    num_cached_tokens: int = 0  # of the prompt, at first admission
    num_prompt_logprobs: int = 0  # delivered, of the prompt's tokens from the second on
    num_preemptions: int = 0
    tally: Tally | None = None  # of its rounds, when asked for

    planned_len: int = 0  # tokens computed once every step in flight is done; of use until `decoding`
    decoding: bool = False  # a step that samples was launched since it took its row
    num_in_flight: int = 0  # steps launched and not committed
    min_new_in_flight: int = 0  # tokens that those yield, at least
    max_new_in_flight: int = 0  # and at most

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def known_len(self) -> int:
        """Committed tokens."""
        return len(self.token_ids)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are asked for and not all delivered."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and self.num_prompt_logprobs < len(self.request.prompt_ids) - 1

    @property
    def remaining(self) -> int:
        """Tokens it may still lack when every step in flight is done; 0: those surely finish it."""
        return max(0, self.max_len - self.known_len - self.min_new_in_flight)

    @property
    def upper_len(self) -> int:
        """Most tokens it can know once every step in flight is done."""
        return self.known_len + self.max_new_in_flight

    def take_prompt_logprobs(self, got: RowResult) -> list[TokenLogprobs] | None:
        """Those not delivered before a preemption; called before `computed_len` moves."""
        if got.prompt_logprobs is None:
            return None
        new = list(got.prompt_logprobs[max(0, self.num_prompt_logprobs - self.computed_len) :])
        self.num_prompt_logprobs += len(new)
        return new or None

    def launch(self, step: RowStep) -> None:
        """A step of this row is on its way."""
        self.num_in_flight += 1
        self.planned_len += step.query_len
        if step.samples:
            self.decoding = True
            self.min_new_in_flight += 1
            self.max_new_in_flight += 1 + step.depth

    def settle(self, step: RowStep) -> None:
        """That step has come back; what it yielded is committed apart."""
        self.num_in_flight -= 1
        if step.samples:
            self.min_new_in_flight -= 1
            self.max_new_in_flight -= 1 + step.depth

    def occupy(self, row: int, hits: list[int], hit_len: int) -> RowStart:
        """Take a row, with `hits` as the pages of the first `hit_len` tokens."""
        self.status = Status.RUNNING
        self.row, self.page_ids = row, hits
        self.computed_len = self.planned_len = hit_len
        self.num_published = len(hits)
        return RowStart(
            row=row,
            token_ids=tuple(self.token_ids),
            prompt_len=len(self.request.prompt_ids),
            computed_len=hit_len,
            page_ids=tuple(hits),
            params=self.request.params,
            choice=self.request.choice,
            max_len=self.max_len,
        )

    def vacate(self) -> None:
        """Forget row and pages, keep the tokens."""
        self.row, self.page_ids = NO_ROW, []
        self.computed_len = self.planned_len = self.num_published = 0
        self.decoding = False

    def check(self, page_size: int) -> None:
        """Prove that its lengths and bounds agree, for one that holds a row.

        Raises:
            InvariantError: names what does not.
        """
        name = f"request {self.request_id}"
        ensure(
            self.computed_len < self.known_len <= self.max_len, f"{name} computed {self.computed_len} tokens"
        )
        ensure(self.computed_len <= len(self.page_ids) * page_size, f"{name} has {len(self.page_ids)} pages")
        num_full = self.computed_len // page_size
        ensure(
            self.num_published <= num_full, f"{name} published {self.num_published} of {num_full} full pages"
        )
        at_rest = (self.min_new_in_flight, self.max_new_in_flight) == (0, 0)
        ensure(at_rest or self.num_in_flight > 0, f"{name} expects tokens of no step")
