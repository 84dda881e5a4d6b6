"""From a prompt and its sampling parameters to engine requests: defaults filled in, limits checked.

Used by the HTTP server and by `LLM` alike, so that both refuse the same things with the same words.
Knows the model's limits, not its weights; knows nothing of HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from paceline.errors import RequestError
from paceline.request import EngineRequest, SamplingParams


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must fit."""

    max_model_len: int  # prompt plus answer, in tokens
    vocab_size: int
    max_depth: int = 0  # drafts a round
    draft: str | None = None  # the drafter's name, if there is one


def prepare(
    request_id: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    limits: ModelLimits,
    first_index: int = 0,
) -> list[EngineRequest]:
    """One engine request per choice, named `request_id.index`, all with the same seed.

    `first_index` is the first choice's index among those of a reply to several prompts.

    Raises:
        RequestError: an empty or over-long prompt, `max_tokens` beyond the context, a token id outside
            the vocabulary, or a depth beyond the maximum; `param` names the field ("prompt" for the
            prompt, whatever it came from).
    """
    room = _room(len(prompt_ids), params.max_tokens, limits.max_model_len)
    _check_ids("prompt", prompt_ids, limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", tuple(params.logit_bias or ()), limits.vocab_size)
    params.check_depth(limits.max_depth, limits.draft)
    resolved = msgspec.structs.replace(
        params,
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        max_tokens=room if params.max_tokens is None else params.max_tokens,
    )
    return [
        EngineRequest(
            f"{request_id}.{first_index + choice}", list(prompt_ids), resolved, choice, first_index + choice
        )
        for choice in range(params.n)
    ]


def _room(prompt_len: int, max_tokens: int | None, max_model_len: int) -> int:
    """Tokens that the answer may have. Raises RequestError when the request does not fit the context."""
    if prompt_len == 0:
        raise RequestError("prompt", "the prompt is empty: at least one token is needed")
    if prompt_len >= max_model_len:
        raise RequestError(
            "prompt",
            f"the prompt has {prompt_len} tokens, and the model's context of {max_model_len} tokens "
            "must hold it and at least one more",
        )
    room = max_model_len - prompt_len
    if max_tokens is not None and max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"max_tokens is {max_tokens}, but a prompt of {prompt_len} tokens leaves {room} "
            f"of the model's context of {max_model_len} tokens",
        )
    return room


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(param, f"{param} has token id {wrong}, outside the vocabulary [0, {vocab_size})")
