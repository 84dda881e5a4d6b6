"""What the server and the engine process say to each other: msgpack, one tagged record per message.

Knows the words, not the wire (`engine.process`, `server.bridge`).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from paceline.engine.stats import SchedulerStats
from paceline.request import EngineRequest, RequestOutput


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Add(Message, frozen=True):
    """All choices of one request, taken together or refused together."""

    group: str
    requests: list[EngineRequest]


class Abort(Message, frozen=True):
    """Give these rows up; no output follows. Unknown ids are ignored: they have just ended."""

    request_ids: list[str]


class Shutdown(Message, frozen=True):
    """End the process, whatever runs."""


class Ready(Message, frozen=True, kw_only=True):
    """The model is loaded; requests may come."""

    max_model_len: int  # prompt plus answer, in tokens
    vocab_size: int
    max_depth: int = 0  # drafts of a row in a step; 0: there is no drafter
    depth: int | str = 0  # for requests that do not say; "auto": chosen at every step
    draft: str | None = None  # the drafter's name


class Accepted(Message, frozen=True):
    """These groups were added, and each of their requests will get its last output."""

    groups: list[str]


class Refused(Message, frozen=True):
    """The group was not added."""

    group: str
    kind: Literal["queue_full", "request"]
    param: str | None
    reason: str


class Outputs(Message, frozen=True):
    """Everything that one step gave."""

    outputs: list[RequestOutput]


class Stats(Message, frozen=True):
    """Where the engine stands: sent when ready, each second or so while it works, and when it falls idle."""

    scheduler: SchedulerStats


class Failed(Message, frozen=True):
    """The engine cannot start or go on; the process ends after this one-line reason."""

    reason: str


ToEngine: TypeAlias = Add | Abort | Shutdown
FromEngine: TypeAlias = Ready | Accepted | Refused | Outputs | Stats | Failed
