"""A real Chromium, controlled by its debugging pipe: opens pages at a size, evaluates JavaScript, takes pictures."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

DESKTOP, PHONE = (1200, 900, False), (390, 844, True)


class Browser:
    """One browser with one tab. Every wait has a deadline."""

    def __init__(self, profile: Path) -> None:
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            pytest.skip("no chromium here; `make packages` installs it as root")
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()
        command = [
            found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_there} 4>&{write_there}', "bash", *command],
            pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        self._in, self._out, self._buffer = write_here, read_here, b""
        self._numbers = itertools.count(1)
        self._session = None
        target = next(each for each in self._targets() if each["type"] == "page")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.call("Page.enable")

    def _targets(self):
        end = time.monotonic() + 120
        while True:
            found = self.call("Target.getTargets")["targetInfos"]
            if any(each["type"] == "page" for each in found):
                return found
            assert time.monotonic() < end, "the browser opened no tab"
            time.sleep(0.05)

    def call(self, method, **params):
        """The answer to one command of the protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 120
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._out], [], [], max(0.0, end - time.monotonic()))[0], f"no answer to {method}"
                got = os.read(self._out, 1 << 20)
                assert got, "the browser has ended"
                self._buffer += got
            raw, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(raw)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script, seconds=60):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"{script} did not become true; the page says {self.text()[:2000]!r}"
            time.sleep(0.1)

    def open(self, url, size=DESKTOP):
        """Loads a page and waits until it shows something."""
        width, height, mobile = size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self.call("Page.navigate", url=url)
        self.until("document.body && document.body.dataset.ready === 'yes'")

    def text(self):
        return self.run("document.body.innerText")

    def overflow(self):
        """Pixels by which the page is wider than the window."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def picture(self, path):
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        self._process.kill()
        self._process.wait(60)
        os.close(self._in)
        os.close(self._out)
