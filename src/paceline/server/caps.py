"""What one request may ask for: the server's own limits, beside the model's (`prepare`) and the engine's."""

from __future__ import annotations

from paceline.config import ServerConfig
from paceline.errors import RequestError
from paceline.request import SamplingParams


def check_caps(params: SamplingParams, config: ServerConfig, num_prompts: int = 1) -> None:
    """Refuse what the settings do not allow.

    Raises:
        RequestError: `param` names the field, the message its limit.
    """
    if num_prompts > config.max_prompts:
        raise RequestError(
            "prompt", f"at most {config.max_prompts} prompts in one request, got {num_prompts}"
        )
    if params.n > config.max_choices:
        raise RequestError("n", f"n must be at most {config.max_choices}, got {params.n}")
    if params.logprobs is not None and params.logprobs > config.max_logprobs:
        raise RequestError(
            "logprobs", f"logprobs must be at most {config.max_logprobs}, got {params.logprobs}"
        )
    if len(params.stop) > config.max_stop_strings:
        raise RequestError(
            "stop", f"stop must have at most {config.max_stop_strings} strings, got {len(params.stop)}"
        )
    longest = max(map(len, params.stop), default=0)
    if longest > config.max_stop_chars:
        raise RequestError(
            "stop", f"a stop string must have at most {config.max_stop_chars} characters, one has {longest}"
        )
