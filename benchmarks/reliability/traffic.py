"""The input of a complete system: impressions and clicks in streams, and a client that asks for predictions."""

from __future__ import annotations

import json
import threading
import time

from shoal.data.live.opening import open_writer
from shoal.serving import Client

RATE, PAGE, WINDOW_S = 400, 20, 2.0


class Events(threading.Thread):
    """Writes impressions and clicks: a click for every third impression, some of them too late."""

    def __init__(self, shown: str, acts: str) -> None:
        super().__init__(daemon=True)
        self._shown, self._acts = shown, acts
        self._done = threading.Event()
        self.base, self.count = time.time() - 60, 0
        self.error: BaseException | None = None

    def impression(self, number: int) -> bytes:
        at = self.base + number / RATE
        return json.dumps(
            {"id": f"r{number}", "time": at, "user": f"u{number % 997}", "item": f"i{number % 131}"}
        ).encode()

    def click(self, number: int) -> tuple[float, bytes] | None:
        """The click of every third impression; that of every ninth is too late."""
        if number % 3:
            return None
        at = self.base + number / RATE + (WINDOW_S * 1.5 if number % 9 == 0 else WINDOW_S / 2)
        return at, json.dumps({"id": f"r{number}", "time": at, "kind": "click"}).encode()

    def label(self, number: int) -> int:
        return int(number % 3 == 0 and number % 9 != 0)

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error

    def _write(self) -> None:
        shown, acts = open_writer(self._shown), open_writer(self._acts)
        begun, clicks, waiting = time.monotonic(), 0, []
        while not self._done.is_set():
            first, self.count = self.count, self.count + PAGE
            shown.append([self.impression(number) for number in range(first, self.count)], at=first)
            waiting += [one for one in map(self.click, range(first, self.count)) if one is not None]
            now = self.base + self.count / RATE
            due = sorted(one for one in waiting if one[0] <= now)
            waiting = [one for one in waiting if one[0] > now]
            acts.append([message for _, message in due], at=clicks)
            clicks += len(due)
            time.sleep(max(0.0, begun + self.count / RATE - time.monotonic()))
        last = sorted(waiting)
        acts.append([message for _, message in last], at=clicks)
        end = self.base + self.count / RATE + 10 * WINDOW_S  # so that all windows end
        marks = [
            json.dumps({"id": "end", "time": end + n, "user": "u", "item": "i", "kind": "x"}).encode() for n in (0, 9)
        ]
        shown.append(marks[:1], at=self.count)
        acts.append(marks, at=clicks + len(last))
        shown.append(marks[1:], at=self.count + 1)
        shown.close()
        acts.close()

    def end(self) -> None:
        self._done.set()
        self.join(120)
        if self.error is not None:
            raise self.error


class Asking(threading.Thread):
    """A client that keeps asking for predictions, through the registry."""

    def __init__(self, registry: str) -> None:
        super().__init__(daemon=True)
        self._client = Client(registry, model="system")
        self._done = threading.Event()
        self.answers = 0
        self.failures: list[str] = []

    def run(self) -> None:
        rows = {"user": [f"u{n}" for n in range(16)], "item": [f"i{n}" for n in range(16)]}
        while not self._done.wait(0.01):
            try:
                self._client.predict(rows, deadline=20.0)
                self.answers += 1
            except Exception as error:
                self.failures.append(repr(error))

    def stop(self) -> None:
        self._done.set()
        self.join(60)
        self._client.close()
