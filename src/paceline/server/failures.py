"""Which HTTP status, which headers and which of OpenAI's error types a failure has."""

from __future__ import annotations

from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError
from paceline.server.responses import ErrorBody, ErrorDetail

# Seconds after which to try again. A row is free within a second or so; a model is loaded again in a few.
RETRY_AFTER = {429: 1, 503: 5}


class UnknownModelError(RequestError):
    """The request names another model than the one served."""


class BodyTooLargeError(RequestError):
    """The request's body is beyond the limit."""


class BadKeyError(RequestError):
    """The request brings no API key, or a wrong one."""

    def __init__(self) -> None:
        super().__init__(None, "a valid API key is needed: send it as 'Authorization: Bearer KEY'")


class SlowReaderError(PacelineError):
    """The client does not read its stream; more is waiting for it than is kept."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the stream is read too slowly: more than {limit} tokens were waiting")


def status_of(error: PacelineError) -> int:
    """The HTTP status."""
    match error:
        case UnknownModelError():
            return 404
        case BodyTooLargeError():
            return 413
        case BadKeyError():
            return 401
        case RequestError():
            return 400
        case QueueFullError():
            return 429
        case EngineDeadError():
            return 503
    return 500


def body_of(error: PacelineError) -> ErrorBody:
    """The JSON body."""
    match error:
        case UnknownModelError(param=param):
            detail = ErrorDetail(str(error), "invalid_request_error", param, "model_not_found")
        case BadKeyError():
            detail = ErrorDetail(str(error), "invalid_request_error", None, "invalid_api_key")
        case RequestError(param=param):
            detail = ErrorDetail(str(error), "invalid_request_error", param, None)
        case QueueFullError():
            detail = ErrorDetail(str(error), "rate_limit_error", None, "queue_full")
        case EngineDeadError():
            detail = ErrorDetail(str(error), "service_unavailable_error", None, "engine_dead")
        case SlowReaderError():
            detail = ErrorDetail(str(error), "server_error", None, "slow_reader")
        case _:
            detail = ErrorDetail(str(error), "server_error", None, None)
    return ErrorBody(detail)
