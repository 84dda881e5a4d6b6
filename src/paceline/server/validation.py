"""From a request's bytes to a checked record, with errors that name the field.

msgspec does the work; its messages end in a JSON path, which becomes the `param` of OpenAI's error
object. A field typed `NotYet` takes only null: any other value is refused as not supported yet.
"""

from __future__ import annotations

import re
from typing import TypeAlias, TypeVar

import msgspec

from paceline.errors import RequestError

NotYet: TypeAlias = None

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`(?: - at `\$\.?(?P<path>.*)`)?$")
_WRONG = re.compile(r"(?P<what>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$")


def decode(body: bytes, kind: type[T]) -> T:
    """Read a JSON body as a `kind`.

    Raises:
        RequestError: not JSON, an unknown or missing field, or a value of the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except RecursionError:
        raise RequestError(None, "the body nests objects or arrays too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(None, f"the body is not valid JSON: {error}") from None


def _explain(message: str) -> RequestError:
    if match := _UNKNOWN.match(message):
        param = _join(match["path"], match["field"])
        return RequestError(param, f"unknown field: {param}")
    if match := _MISSING.match(message):
        param = _join(match["path"], match["field"])
        return RequestError(param, f"missing field: {param}")
    if match := _WRONG.match(message):
        param, what = match["path"], match["what"]
        if what.startswith("Expected `null`"):
            return RequestError(param, f"{param} is not supported yet")
        what = what[0].lower() + what[1:]
        return RequestError(param, f"{param}: {'in a key, ' if match['key'] else ''}{what}")
    return RequestError(None, message[0].lower() + message[1:])


def _join(path: str | None, field: str) -> str:
    return f"{path}.{field}" if path else field
