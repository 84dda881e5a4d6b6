"""The exception tree.

PacelineError
├── ConfigError          a setting is wrong: names the setting and its limit
├── ModelError           a model cannot be loaded: names the file, tensor or field
│   ├── ModelNotFoundError       no such file, folder, hub id or built-in name
│   ├── UnsupportedModelError    readable, but not something Paceline runs
│   └── CheckpointError          a missing, extra, misshapen or truncated tensor
├── RequestError         a request is wrong: carries the field it names (HTTP 400)
├── QueueFullError       no room to wait in (HTTP 429)
└── EngineDeadError      the engine process is gone (HTTP 503)
"""


class PacelineError(Exception):
    """Base of everything Paceline raises for callers; the message is one clear line."""


class ConfigError(PacelineError):
    """A setting is wrong."""


class ModelError(PacelineError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No such file, folder, hub id or built-in name."""


class UnsupportedModelError(ModelError):
    """The checkpoint is readable, but asks for something Paceline does not run."""


class CheckpointError(ModelError):
    """A tensor is missing, extra, misshapen or truncated; the message names it."""


class RequestError(PacelineError):
    """A request is wrong. `param` names the field, as OpenAI's error object does."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(PacelineError):
    """The waiting queue is at its limit."""


class EngineDeadError(PacelineError):
    """The engine process has died; the request was not finished."""


def describe(error: BaseException) -> str:
    """What failed, in one line, for whoever does not see the traceback: its type and its first line."""
    words = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
