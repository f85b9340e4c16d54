"""A real Prometheus on loopback, from Debian's package ``prometheus``, with the library's rules and its own clock."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.errors import DeadlineError, PeerError
from shoal.observe.monitoring import ALERTS, CONFIG, write
from shoal.testing.zookeeper import free_port

START_S = 120.0
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def prometheus_unavailable() -> str:
    """Why no Prometheus can be started here; empty if one can."""
    return "" if shutil.which("prometheus") else "prometheus is not on the PATH: apt-get install prometheus"


def faster(rules: str, factor: float) -> str:
    """Divide the durations in alert rules, to at least three seconds: ``for: 5m`` with 60 becomes ``for: 5s``.

    >>> faster("expr: rate(a[5m]) > 0\\nfor: 1h", 60)
    'expr: rate(a[5s]) > 0\\nfor: 60s'
    """

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _SECONDS[found[3]] / factor
        return f"{found[1]}{max(3, round(seconds))}s"

    return re.sub(r"(\[|for: |offset )(\d+)([smh])\b", shorter, rules)


class Prometheus:
    """A Prometheus server process.

    Args:
        folder: for its files.
        targets: ``host:port`` of the processes that it reads.
        discovered: URLs that list processes.
        faster_by: divides the durations in the rules.
    """

    def __init__(
        self, folder: Path, targets: Sequence[str] = (), discovered: Sequence[str] = (), *, faster_by: float = 1.0
    ) -> None:
        self.folder, self.port = folder, free_port()
        write(folder, targets, discovered)
        config = folder / CONFIG
        config.write_text(config.read_text().replace("15s", "1s"))
        rules = folder / ALERTS
        rules.write_text(faster(rules.read_text(), faster_by))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self.folder / CONFIG}", f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ]  # fmt: skip
        with open(self.folder / "log.txt", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None:
                self._process = None
                raise PeerError(f"Prometheus ended: {(self.folder / 'log.txt').read_text()[-2000:]}")
            try:
                self.query("1")
                return self
            except OSError:
                if time.monotonic() > end:
                    self.close()
                    raise DeadlineError(f"Prometheus in {self.folder} did not answer within {START_S:g} s") from None
                time.sleep(0.1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current samples of an expression, each with ``metric`` and ``value``.

        Raises:
            ValueError: the expression is wrong.
        """
        data = self._ask(f"query?{urllib.parse.urlencode({'query': expression})}")
        if data["resultType"] == "scalar":
            return [{"metric": {}, "value": data["result"]}]
        return data["result"]

    def firing(self) -> dict[str, dict[str, str]]:
        """Return the firing alerts: name -> labels."""
        found = self._ask("alerts")["alerts"]
        return {each["labels"]["alertname"]: each["labels"] for each in found if each["state"] == "firing"}

    def _ask(self, what: str) -> Any:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{what}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise OSError("it is not ready yet") from None
            raise ValueError(error.read().decode(errors="replace")) from None

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def __enter__(self) -> Prometheus:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()
