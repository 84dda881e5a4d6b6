"""The live page: one HTML file that needs nothing from anywhere else, and the reply it polls.

The file holds nothing of this server, so it is served without an API key; what it shows comes from `/live`,
which asks for one. Knows the numbers, not how they are drawn.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import resources

from paceline.errors import RequestError
from paceline.server.bridge import EngineClient
from paceline.server.live import Live

# The page may run its own script and ask its own server, and nothing else.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


@cache
def page() -> str:
    """The HTML."""
    return resources.files("paceline.server").joinpath("live.html").read_text(encoding="utf-8")


def live(client: EngineClient, model_name: str, since: float, now: float) -> Live:
    """What has happened since a time (seconds since 1970), and how things stand; `now` is monotonic."""
    stats, policy = client.stats, None if client.stats is None else client.stats.policy
    return Live(
        model=model_name,
        now=client.history.epoch(now),
        unavailable=client.death,
        speculation=client.speculation,
        num_running=0 if stats is None else stats.num_running,
        num_waiting=0 if stats is None else stats.num_waiting,
        kv_cache_usage=0.0 if stats is None else stats.num_pages_used / stats.num_pages,
        num_guard_trips=0 if policy is None else policy.num_guard_trips,
        cost_drift=None if policy is None else policy.drift,
        believed_acceptance=[] if policy is None else policy.acceptance,
        recent=[] if policy is None else policy.recent,
        points=client.history.points(since, now),
    )


def parse_since(text: str | None) -> float:
    """The query parameter `since`; 0 if it is not there.

    Raises:
        RequestError: it is no finite number.
    """
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError("since", f"since must be a number of seconds since 1970, got {text!r}")
    return value
