"""What a request is, and what comes back for it: the records that cross the process border.

Knows nothing of HTTP, text or torch. Both processes import this module.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec

from paceline.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1  # of tokens or choices; beyond any model, and a number that every process can read


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must be: every text that the whole of it may come to.

    `json` is a JSON schema, `regex` a regular expression without look-around, `lark` a grammar in
    llguidance's dialect of Lark.
    """

    kind: Literal["json", "regex", "lark"]
    source: str


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How to choose each next token. Checked when made.

    Processors act in this order, as in vLLM: `grammar`, `logit_bias`, `min_tokens`, penalties, then
    temperature, `top_k`, `top_p`, `min_p`. Logprobs are the model's own, before all of them.

    Raises:
        RequestError: a value is out of range; `param` names it.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1], relative to the most likely token
    seed: int | None = None  # None: a fresh 64-bit seed is drawn
    n: int = 1  # choices; each gets its own row
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0  # before this many, stop tokens cannot be sampled
    stop: tuple[str, ...] = ()  # found in the text, by the process that has it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0  # on tokens generated so far
    frequency_penalty: float = 0.0  # likewise, times their count
    repetition_penalty: float = 1.0  # on tokens of the prompt and generated so far
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: and the k most likely
    prompt_logprobs: int | None = None  # the same for the prompt's tokens but the first
    grammar: Grammar | None = None  # the answer ends where it lets nothing follow
    depth: int | None = None  # drafts a round, at most; None: the engine's choice. Never changes the words
    speculation_summary: bool = False  # what drafting did for this answer comes with it

    def __post_init__(self) -> None:
        self._check_types()
        self._check("temperature", 0.0, 100.0)
        self._check("top_k", -1, MAX_COUNT)
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError("top_p", f"top_p must be in (0, 1], got {self.top_p}")
        self._check("min_p", 0.0, 1.0)
        self._check("n", 1, MAX_COUNT)
        self._check("min_tokens", 0, MAX_COUNT)
        self._check("presence_penalty", -2.0, 2.0)
        self._check("frequency_penalty", -2.0, 2.0)
        self._check("repetition_penalty", 0.0, 100.0)
        if self.repetition_penalty <= 0.0:
            raise RequestError("repetition_penalty", "repetition_penalty must be greater than 0")
        if self.seed is not None:
            self._check("seed", -(2**63), MAX_SEED)
        if self.max_tokens is not None:
            self._check("max_tokens", 1, MAX_COUNT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    "min_tokens",
                    f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check(name, 0, MAX_LOGPROBS)
        if self.depth is not None and self.depth < 0:  # `check_depth` knows the most
            self._check("depth", 0, MAX_COUNT)
        if any(not s for s in self.stop):
            raise RequestError("stop", "stop strings must not be empty")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias) or abs(bias) > 100.0:
                raise RequestError("logit_bias", f"logit_bias[{token}] must be in [-100, 100], got {bias}")

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            RequestError: `param` is `logit_bias` or `stop_token_ids`.
        """
        for param, token_ids in (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(param, f"{param}: token id {token_id} is not in [0, {vocab_size - 1}]")

    def check_depth(self, max_depth: int, draft: str | None = None) -> None:
        """Refuse a depth that the engine does not go to. `draft` names its drafter, if it has one.

        Raises:
            RequestError: `param` is `depth`.
        """
        if self.depth is None or self.depth <= max_depth:
            return
        why = "" if draft is not None else ": there is no drafter (setting draft)"
        raise RequestError("depth", f"depth must be at most {max_depth}, got {self.depth}{why}")

    def _check_types(self) -> None:
        """A wrong type must stop here: one step further it would stop the engine. Lists become tuples."""
        try:
            fitting: Any = msgspec.convert(self, _fields(), from_attributes=True)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at ")
            param = re.sub(r".*`\$\.(.*)`$", r"\1", path)
            raise RequestError(param, f"{param}: {what[0].lower()}{what[1:]}") from None
        for name in ("stop", "stop_token_ids"):
            msgspec.structs.force_setattr(self, name, getattr(fitting, name))

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value < low and high == MAX_COUNT:
            raise RequestError(name, f"{name} must be at least {low}, got {value}")
        if not low <= value <= high:
            raise RequestError(name, f"{name} must be in [{low}, {high}], got {value}")


@cache
def _fields() -> type[msgspec.Struct]:
    """The fields of SamplingParams, for msgspec to check the types of values that it did not read."""
    hints = get_type_hints(SamplingParams)
    return msgspec.defstruct("Fields", [(name, hints[name]) for name in SamplingParams.__struct_fields__])


class EngineRequest(msgspec.Struct, frozen=True):
    """One choice of one request, ready for the engine: ids in, nothing left to default.

    `params.seed` and `params.max_tokens` are set; `params.stop` is the caller's business.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    choice: int = 0  # among the prompt's `n`; a part of the noise
    index: int = 0  # among all choices of a reply to several prompts


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, from the model before any processor."""

    logprob: float  # of the chosen token
    top_ids: list[int]  # most likely first
    top_logprobs: list[float]


class SpeculationSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What drafting came to for one choice, over its rounds with drafts.

    Counted before anything is cut: the last round may have accepted tokens beyond a stop, which nobody got.
    """

    num_rounds: int  # steps in which something was drafted for it
    num_drafted: int  # proposed
    num_verified: int  # of them, those that went through the model
    num_accepted: int  # of them, those that were right
    accepted_per_pos: list[int]  # rounds whose draft at this position was accepted, from the first
    top_draft_prob_per_pos: list[float]  # the drafter's highest probability there: mean over rounds

    @property
    def accept_len(self) -> float | None:
        """Tokens a round: those accepted and the bonus token, the model's own. None without rounds."""
        return 1 + self.num_accepted / self.num_rounds if self.num_rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of proposed (not of verified). None when nothing was proposed."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


class RequestOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step gave one request. The last one carries `finish_reason`.

    `token_ids` are the new tokens only, already cut at the first stop token (which is
    included, and named by `stop_token_id`), at the grammar's end or at the length limit.

    `prompt_logprobs`, when asked for, come in pieces, one entry for each prompt token but the first,
    each once and in order; the last piece comes at the latest with the first new token.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None  # one per token, when asked for
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache had
    speculation: SpeculationSummary | None = None  # so far, when asked for: any may turn out to be the last
    error: str | None = None  # with finish_reason "error"
    error_param: str | None = None  # the field of the request that is to blame; None: the engine
