"""The scheduler's numbers at one moment, as they travel to whoever shows them.

Knows nothing of how they are shown: the HTTP process gives them their metric names.
"""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of now, then counters since the start (they only grow)."""

    num_running: int  # requests that hold a row
    num_waiting: int  # accepted, without a row: new ones and preempted ones
    num_pages: int  # pages that requests can hold, the trash page not among them
    num_pages_used: int  # pages that a row holds
    num_pages_cached: int  # pages a prompt could hit, held by a row or not

    num_preemptions: int
    num_prompt_tokens_computed: int  # through the model in chunks; after a preemption, again
    num_prompt_tokens_cached: int  # prompt tokens that the prefix cache had at first admission
    num_generated_tokens: int  # delivered: nothing beyond a stop or a limit
