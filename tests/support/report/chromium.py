"""A real headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port, no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.requirements import need_chromium
from tests.support.waiting import PATIENCE_S

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip


class Chromium:
    """One page. ``said``: console messages, exceptions and log entries; ``asked``: addresses that it requested."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, ""
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, address: str, scheme: str = "light", width: int = 1100) -> None:
        """Load a page, as a screen of this width and colour scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.said.clear()
        self.asked.clear()
        self.call("Page.navigate", url=address)
        self._until("Page.loadEventFired")

    def of(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._to, json.dumps(call).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def _until(self, method: str) -> None:
        while self._next().get("method") != method:
            pass

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            assert time.monotonic() < end, "Chromium does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium ended"
            self._rest += piece
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        if message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(json.dumps(message["params"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.asked.append(message["params"]["request"]["url"])
        return message


@contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser; skips the test where there is none."""
    program = need_chromium()
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def take_pipes() -> None:  # the browser reads 3 and writes 4
        first, second = os.dup(to_read), os.dup(from_write)
        os.dup2(os.dup(first), 3)
        os.dup2(second, 4)

    profile = Path(tempfile.mkdtemp(prefix="resilio-chromium-"))
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"], close_fds=False, preexec_fn=take_pipes,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    try:
        yield Chromium(to_write, from_read)
    finally:
        os.close(to_write)
        os.close(from_read)
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
        process.wait(PATIENCE_S)
        shutil.rmtree(profile, ignore_errors=True)
