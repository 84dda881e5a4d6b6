"""The live page: what it is told, and what a browser makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from browser import Browser, find_chromium
from hypothesis import given
from hypothesis import strategies as st
from served import Served, eventually
from test_http import TEXT, post, text_body

from paceline.engine.stats import PolicyStats, SchedulerStats, SpeculationStats
from paceline.server.live import INTERVAL, MAX_POINTS, History, Live
from paceline.server.live_page import page

CHROMIUM = find_chromium()


def report(num_tokens: int, **more: object) -> SchedulerStats:
    """The numbers of an engine that has made so many tokens, at depth 1, half of the drafts right."""
    numbers = dict.fromkeys(SchedulerStats.__struct_fields__[:9], 0) | {
        "num_pages": 1,
        "num_generated_tokens": num_tokens,
    }
    return SchedulerStats(
        **numbers | more,
        speculation=SpeculationStats(
            max_depth=1, rounds_by_depth=[0, num_tokens], accepted_per_pos=[num_tokens // 2]
        ),
        policy=PolicyStats(
            steps={"pays": [0, num_tokens]},
            plain_seconds=0.02 * num_tokens,
            decoding_seconds=0.01 * num_tokens,
        ),
    )


class TestHistory:
    def test_points_are_differences_a_second_apart(self) -> None:
        history = History(100.0)
        for tenth in range(31):  # a report every tenth of a second
            history.add(report(10 * tenth), 100 + tenth / 10)
        points = history.points(0, 103.05)
        assert [point.num_tokens for point in points] == [100, 100, 100]
        assert [point.seconds for point in points] == [1, 1, 1]
        assert points[0].steps == {"pays": [0, 100]}
        assert (points[0].rounds_by_depth, points[0].accepted_per_pos) == ([0, 100], [50])
        assert (points[0].plain_seconds, points[0].decoding_seconds) == (2, 1)
        assert [p.at - history.epoch(100) for p in points] == pytest.approx([1, 2, 3], abs=1e-3)

    def test_the_last_report_before_idleness_is_shown_soon(self) -> None:
        history = History(0.0)
        history.add(report(0), 0.0)
        history.add(report(7), 0.3)
        assert history.points(0, 0.4) == []
        [point] = history.points(0, 0.3 + INTERVAL)
        assert (point.num_tokens, point.seconds) == (7, 0.3)
        history.add(report(9), 50.0)
        assert [p.num_tokens for p in history.points(0, 50.0)] == [7, 2]

    def test_only_what_is_new_is_told(self) -> None:
        history = History(0.0)
        for second in range(5):
            history.add(report(second), second)
        first, *rest = history.points(0, 5)
        assert history.points(first.at, 5) == rest

    def test_another_engine_begins_anew(self) -> None:
        history = History(0.0)
        for second, num in enumerate([0, 50, 90, 0, 20]):
            history.add(report(num), second)
        assert [p.num_tokens for p in history.points(0, 5)] == [50, 40, 20]

    @given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(0, 50)), max_size=40))
    def test_nothing_is_counted_twice_or_lost(self, reports: list[tuple[float, int]]) -> None:
        history, now, total = History(0.0), 0.0, 0
        history.add(report(0), 0.0)
        for gap, num in reports:
            now, total = now + gap, total + num
            history.add(report(total), now)
        points = history.points(0, now + INTERVAL + 0.01)
        assert sum(point.num_tokens for point in points) == total
        assert [p.at for p in points] == sorted(p.at for p in points)

    def test_it_is_bounded(self) -> None:
        history = History(0.0)
        for second in range(MAX_POINTS + 50):
            history.add(report(second), second)
        assert len(history.points(0, 0)) == MAX_POINTS


class TestEndpoint:
    def test_it_says_how_things_stand(self, served: Served) -> None:
        post(served, TEXT, text_body("abcd", max_tokens=40))
        assert eventually(lambda: served.client.get("/live").json()["points"] != [])
        reply = served.client.get("/live")
        live = msgspec.json.decode(reply.content, type=Live)
        assert (live.model, live.unavailable) == ("tiny", None)
        assert (live.speculation.draft, live.num_running) == ("ngram", 0)
        assert live.recent[-1].reason == "pays"
        assert abs(live.now - time.time()) < 5
        newer = served.client.get("/live", params={"since": live.now}).json()
        assert newer["points"] == []

    @pytest.mark.parametrize("since", ["yesterday", "nan", "inf"])
    def test_since_must_be_a_time(self, served: Served, since: str) -> None:
        reply = served.client.get("/live", params={"since": since})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "since"

    def test_the_page_is_open_and_its_numbers_are_not(self, serve: Callable[..., Served]) -> None:
        served = serve("--api-key", "secret")
        shown = served.client.get("/")
        assert (shown.status_code, shown.text) == (200, page())
        assert "default-src 'none'" in shown.headers["content-security-policy"]
        assert served.client.get("/live").status_code == 401
        assert served.client.get("/live", headers={"Authorization": "Bearer secret"}).status_code == 200

    def test_the_page_asks_nobody_else(self) -> None:
        assert "http" not in page().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
class TestBrowser:
    @pytest.fixture
    def browser(self, tmp_path: Path) -> Iterator[Browser]:
        assert CHROMIUM is not None
        browser = Browser(CHROMIUM, tmp_path / "profile")
        yield browser
        browser.close()

    def test_it_shows_what_the_server_does(self, serve: Callable[..., Served], browser: Browser) -> None:
        served = serve("--depth", "auto")
        browser.open(served.url)
        browser.wait_for("document.querySelector('#model').innerText === 'tiny'")
        assert "Nothing yet" in browser.text("#nothing")
        with _load(served):
            browser.wait_for("document.querySelectorAll('#recent tr').length === 16")
            browser.wait_for("document.querySelectorAll('#depths .cell').length > 2")
            browser.wait_for("document.querySelector('#load').innerText.startsWith('3')")
            browser.wait_for("Number(document.querySelector('#rate').innerText) > 10")
            browser.wait_for("document.querySelectorAll('#positions .bar').length > 0")
            browser.wait_for("document.querySelectorAll('#rates path').length === 2")  # plain among them
        assert browser.text("#drafter").startswith("drafter ngram · depth auto")
        assert "warmup" in browser.text("#depths-legend")
        assert float(browser.text("#accepted")) > 1
        assert browser.run("document.querySelector('#nothing').hidden")
        browser.wait_for("document.querySelector('#load').innerText === '0 · 0'")
        assert browser.problems() == []
        assert {url.partition("?")[0] for url in browser.requested()} <= {
            f"{served.url}/",
            f"{served.url}/live",
            f"{served.url}/favicon.ico",
        }

    def test_both_schemes_and_small_screens(self, served: Served, browser: Browser) -> None:
        browser.open(served.url)
        browser.wait_for("document.querySelector('#model').innerText === 'tiny'")
        ground = "getComputedStyle(document.body).backgroundColor"
        colours = set()
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.send("Emulation.setEmulatedMedia", features=[feature])
            colours.add(browser.run(ground))
        assert len(colours) == 2
        browser.send(
            "Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True
        )
        assert browser.run("document.documentElement.scrollWidth") == 360

    def test_it_asks_for_the_key(self, serve: Callable[..., Served], browser: Browser) -> None:
        served = serve("--api-key", "secret")
        browser.open(served.url)
        browser.wait_for("!document.querySelector('#ask').hidden")
        for key, words in (("wrong", "That key is not one"), ("secret", "")):
            assert browser.text("#model") == ""
            browser.run("document.querySelector('#key').focus()")
            browser.send("Input.insertText", text=key)
            browser.run("document.querySelector('#ask button').click()")
            browser.wait_for(f"document.querySelector('#notice').innerText.startsWith({words!r})")
        browser.wait_for("document.querySelector('#model').innerText === 'tiny'")
        assert browser.run("document.querySelector('#ask').hidden")

    def test_it_waits_for_a_server_that_is_gone(self, serve: Callable[..., Served], browser: Browser) -> None:
        served = serve()
        browser.open(served.url)
        browser.wait_for("document.querySelector('#model').innerText === 'tiny'")
        served.stop()
        browser.wait_for("document.querySelector('#notice').innerText.includes('does not answer')")

    def test_a_failed_drafter_is_told(self, serve: Callable[..., Served], browser: Browser) -> None:
        served = serve()
        post(served, TEXT, text_body("<|undraft|>abc", max_tokens=9))
        browser.open(served.url)
        browser.wait_for("document.querySelector('#drafter').innerText.includes('no drafts today')")
        assert browser.run("document.querySelector('#drafter').className") == "bad"


class _load:
    """Three clients that never stop."""

    def __init__(self, served: Served) -> None:
        self._url, self._done = served.url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(3)]

    def _run(self) -> None:
        while not self._done.is_set():
            body = {"prompt": "<|slow|>abcd", "max_tokens": 300, "ignore_eos": True}
            httpx.post(self._url + TEXT, json=body, timeout=60)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *failure: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
