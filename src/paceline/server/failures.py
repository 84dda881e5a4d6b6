"""Which HTTP status and which of OpenAI's error types a failure has."""

from __future__ import annotations

from paceline.errors import EngineDeadError, PacelineError, QueueFullError, RequestError
from paceline.server.protocol import ErrorBody, ErrorDetail


class UnknownModelError(RequestError):
    """The request names another model than the one served."""


class BodyTooLargeError(RequestError):
    """The request's body is beyond the limit."""


def status_of(error: PacelineError) -> int:
    """The HTTP status."""
    match error:
        case UnknownModelError():
            return 404
        case BodyTooLargeError():
            return 413
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
        case RequestError(param=param):
            detail = ErrorDetail(str(error), "invalid_request_error", param, None)
        case QueueFullError():
            detail = ErrorDetail(str(error), "rate_limit_error", None, "queue_full")
        case EngineDeadError():
            detail = ErrorDetail(str(error), "service_unavailable_error", None, "engine_dead")
        case _:
            detail = ErrorDetail(str(error), "server_error", None, None)
    return ErrorBody(detail)
