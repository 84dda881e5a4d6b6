"""What a request must satisfy to be accepted: the numbers of this engine, checked once at the door.

Knows nothing of who is running or waiting: a request that passes can run to its end alone, so it
runs to its end whatever the load.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RequestError
from paceline.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's sizes, in tokens and pages."""

    max_model_len: int  # prompt plus answer
    vocab_size: int
    page_size: int
    num_pages: int  # that one request can hold
    max_depth: int  # drafts of a row in a step

    def max_len(self, request: EngineRequest) -> int:
        """Most tokens the request may come to, prompt and answer.

        Raises:
            RequestError: it can never run here; the message has the numbers.
        """
        prompt_len, max_tokens = len(request.prompt_ids), request.params.max_tokens
        assert max_tokens is not None, "an EngineRequest has max_tokens set"
        if prompt_len == 0:
            raise RequestError("prompt", "the prompt is empty: at least one token is needed")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                "prompt",
                f"the prompt has {prompt_len} tokens, but at most {self.max_model_len - 1} leave room for an "
                f"answer in the context of {self.max_model_len}",
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            wrong = next(token for token in request.prompt_ids if not 0 <= token < self.vocab_size)
            raise RequestError(
                "prompt", f"token ids of a prompt must be in [0, {self.vocab_size}), got {wrong}"
            )
        request.params.check_token_ids(self.vocab_size)
        request.params.check_depth(self.max_depth)
        max_len = min(prompt_len + max_tokens, self.max_model_len)
        num_pages = -(-(max_len - 1) // self.page_size)  # the newest token has no K/V yet
        if num_pages > self.num_pages:
            raise RequestError(
                "max_tokens",
                f"a prompt of {prompt_len} tokens with max_tokens {max_tokens} needs {num_pages} pages of "
                f"{self.page_size} tokens, but the K/V pool has {self.num_pages}",
            )
        return max_len
