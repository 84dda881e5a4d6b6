"""A headless Chromium, driven through its own pipe: no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. Messages are JSON, with a NUL behind each (`--remote-debugging-pipe`)."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        # The shell puts the pipe's ends where Chromium expects them: 3 to read from, 4 to write to.
        command = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", command, program, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"),
                *(f"--user-data-dir={profile}", "--window-size=1200,1100", "about:blank"),
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._num_sent = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        pages: list[Any] = []
        while not pages:
            targets = self.send("Target.getTargets")["targetInfos"]
            pages = [target for target in targets if target["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; events that come meanwhile are kept."""
        self._num_sent += 1
        message: dict[str, Any] = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                received = os.read(self._in, 2**16)
                assert received, "the browser has ended"
                self._buffer += received
            text, _, self._buffer = self._buffer.partition(b"\0")
            reply = json.loads(text)
            if reply.get("id") == self._num_sent:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """What people read there."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, script: str, within: float = 15.0) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + within
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.1)
        return value

    def problems(self) -> list[str]:
        """Errors that the page's script or its loading has met, but for replies of status 401."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return [text for text in found if "401" not in text]

    def requested(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
