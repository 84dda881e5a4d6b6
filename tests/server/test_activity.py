"""When there is a line about the load, and what it says."""

from __future__ import annotations

from paceline.engine.stats import SchedulerStats
from paceline.server.activity import Activity


def stats(running: int, tokens: int) -> SchedulerStats:
    return SchedulerStats(
        num_running=running,
        num_waiting=1 if running else 0,
        num_pages=100,
        num_pages_used=25,
        num_pages_cached=0,
        num_preemptions=0,
        num_prompt_tokens_computed=0,
        num_prompt_tokens_cached=0,
        num_generated_tokens=tokens,
    )


def test_a_line_every_ten_seconds_of_work_with_the_rate_of_those_seconds() -> None:
    activity = Activity()
    lines = [activity.line(stats(2, 1000 + 50 * second), 7.0 + second) for second in range(25)]
    assert [i for i, line in enumerate(lines) if line] == [10, 20]
    assert lines[10] == lines[20] == "2 running, 1 waiting, 50.0 tok/s, K/V 25% used"


def test_no_line_while_idle_and_idle_time_is_not_counted() -> None:
    activity = Activity()
    assert activity.line(stats(1, 0), 0.0) is None
    assert activity.line(stats(0, 10), 9.0) is None
    assert activity.line(stats(1, 10), 100.0) is None
    assert activity.line(stats(1, 110), 110.0) == "1 running, 1 waiting, 10.0 tok/s, K/V 25% used"
