"""A joiner whose streams stop, break or are trimmed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

JOIN = """
impressions = {{ from = "{impressions}", key = "request" }}
actions = {{ from = "{actions}", key = "request", kind = "kind" }}
labels.click.kinds = ["click"]
window = "5s"
state = "join-state"
out = "dir:samples"
"""


def event(number: int, **more: Any) -> str:
    return json.dumps({"request": f"r{number}", "time": time.time(), **more})


def join(stage: Any, impressions: str, actions: str) -> dict[str, Any]:
    (stage.folder / "join.toml").write_text(JOIN.format(impressions=impressions, actions=actions))
    return stage.ready(stage.shoal("join", "join.toml", "--metrics-port", 0, "--every", 1, "--json"))


def joined_folders(stage: Any) -> Callable[..., None]:
    for name in ("impressions", "actions", "samples"):
        (stage.folder / name).mkdir()
    files = iter(range(1 << 30))

    def add(lines: list[str], side: str) -> None:
        path = stage.folder / side / f"{next(files):09d}.json"
        path.with_suffix(".part").write_text("\n".join(lines) + "\n")
        path.with_suffix(".part").rename(path)

    return add


def stopped_streams(stage: Any) -> None:
    add = joined_folders(stage)
    add([event(n, user="u") for n in range(100)], "impressions")
    add([event(n, kind="click") for n in range(50)], "actions")
    ready = join(stage, "dir:impressions", "dir:actions")
    stage.watch(ready["metrics"])
    numbers = iter(range(1000, 1 << 30))
    # one stream continues, the other has stopped, so windows cannot close
    stage.fires("ShoalJoinerBehind", meanwhile=lambda: add([event(next(numbers), user="u")], "impressions"))

    def both() -> None:
        number = next(numbers)
        add([event(number, user="u")], "impressions")
        add([event(number, kind="click")], "actions")

    stage.ends("ShoalJoinerBehind", meanwhile=both)


def broken_events(stage: Any) -> None:
    add = joined_folders(stage)
    ready = join(stage, "dir:impressions", "dir:actions")
    stage.watch(ready["metrics"])
    numbers = iter(range(1 << 30))

    def more(*broken: str) -> None:
        lines = [event(next(numbers), user="u") for _ in range(50)]
        add([*lines, *broken], "impressions")
        add([event(next(numbers), kind="click")], "actions")

    stage.fires("ShoalJoinerBrokenEvents", meanwhile=lambda: more("not JSON", "{", '{"request": 7}'))
    stage.ends("ShoalJoinerBrokenEvents", meanwhile=more)
