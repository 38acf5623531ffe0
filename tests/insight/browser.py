"""Drive a Chromium or Chrome that is found on the machine, through its pipe: nothing is installed for it."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""The browser, or None."""
_PATIENCE = 120
"""How many seconds a busy machine may take for an answer."""


class Browser:
    """A headless browser with one page."""

    def __init__(self, given: int, taken: int):
        self._given, self._taken, self._number, self._rest = given, taken, 0, b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol; events that come before its answer are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._given, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._taken], [], [], _PATIENCE)[0], f"the browser said nothing for {_PATIENCE} s"
            read = os.read(self._taken, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file or an address in a window of some size, and wait until it is loaded."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key)
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        data = self("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it."""
    assert FOUND is not None, "there is no Chromium or Chrome on PATH"
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read_there, write_there)]
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",  # containers have little of it
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'
        started = subprocess.Popen(
            ["bash", "-c", command, FOUND, *options, f"--user-data-dir={folder}"],
            pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (read_there, write_there, *high):
            os.close(fd)
        try:
            yield Browser(write_here, read_here)
        finally:
            started.terminate()
            started.wait(20)
            os.close(write_here)
            os.close(read_here)
