"""Readers of live streams, of configurations of joins, systems and tables, and of messages in a group of servers."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.data import Schema
from shoal.data.formats import make_format
from shoal.data.joining.config import load_join
from shoal.data.live.address import parse_address
from shoal.data.live.frames import Frames
from shoal.data.live.messages import decoder
from shoal.errors import ConfigError, DataError
from shoal.sharded import load_tables
from shoal.sharded.ps.archive.store import Segment
from shoal.sharded.ps.replica.board import ShardState
from shoal.sharded.ps.replica.terms import Terms
from shoal.sharded.ps.replica.transfer import listed_files
from shoal.testing.fuzz import Target
from shoal.train.loop.toml import load_config
from shoal.up.config import load_online

JOIN = b"""
[impressions]
from = "redis://127.0.0.1/shown"
key = "id"
lateness = "1s"
[actions]
from = "redis://127.0.0.1/acts"
key = "id"
kind = "kind"
[labels.click]
kinds = ["click", "buy"]
[join]
window = "30m"
memory = "1GiB"
state = "join-state"
out = "redis://127.0.0.1/samples"
"""
UP = b"""
[registry]
url = "dir:registry"
[servers]
count = 2
[replicas]
count = 2
[data]
train = ["redis://127.0.0.1/samples"]
format = "json"
label = "click"
sparse = ["user"]
[serve]
dir = "exports"
[out]
dir = "run"
"""
TABLES = b"""
[tables.user]
dim = 8
optimizer = "adagrad"
[tables.item]
dim = 16
optimizer = { kind = "adagrad", lr = 0.05 }
initializer = "uniform"
expire_after = "30d"
max_bytes = "8GiB"
evict = "lru"
"""
OPTIONS = b"""
[data]
train = ["part-*.parquet"]
format = "parquet"
label = "click"
sparse = ["user", "item"]
dense = ["price"]
options = { lists = true }
[table]
dim = 8
[out]
dir = "run"
"""
TEXT = b'{ columns = ["click", "price", "user", "item"], delimiter = ";", quote = "", separator = "|" }'
TEXT_OPTIONS = OPTIONS.replace(b"parquet", b"csv").replace(b"{ lists = true }", TEXT)


ADDRESSES = (
    b"redis://u:p@localhost/2/clicks?from=2026-11-01&away_s=0.5", b"kafka://a:1,b:2/topic?from=end",
    b"dir:logs?pattern=*.csv", b"join:join.toml",
)  # fmt: skip


def newer_targets(folder: Path, schema: Schema, records: bytes) -> list[Target]:
    """``records``: a file of TFRecord frames."""
    lines = b'{"click": 1, "price": 2.5, "user": "u1", "item": ["a", 7], "time": 3}\n{"user": null, "click": true}\n'
    return [
        _messages(schema, lines),
        Target("live_frames", [records], _frames),
        Target("live_address", ADDRESSES, _address, (ConfigError, UnicodeDecodeError)),
        Target("toml_join", [JOIN], _file(folder / "join.toml", load_join)),
        Target("toml_up", [UP], _file(folder / "up.toml", load_online)),
        Target("toml_tables", [TABLES], _file(folder / "tables.toml", load_tables)),
        Target("data_options", [OPTIONS, TEXT_OPTIONS], _file(folder / "options.toml", _formats)),
        _group(),
    ]  # fmt: skip


def _file(path: Path, load: Callable[[Path], Any]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        load(path)

    return read


def _formats(path: Path) -> None:
    load_config(path).data.make_format()


def _messages(schema: Schema, lines: bytes) -> Target:
    decode = decoder(make_format("json", schema), "json")

    def read(data: bytes) -> None:
        decode(data.split(b"\n"))

    return Target("data_json", [lines], read)


def _frames(data: bytes) -> None:
    """In two blocks, as a file that grows gives them."""
    frames, middle = Frames(), len(data) // 2
    for block in (data[:middle], data[middle:]):
        frames.add(block)
        while frames:
            frames.take(2)
    frames.finish()
    while frames:
        frames.take(2)


def _address(data: bytes) -> None:
    str(parse_address(data.decode()))


def _terms(data: bytes) -> None:
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    Terms.of(given)


def _group() -> Target:
    """What a registry, a follower, a leader and an archive hold, one after the other."""
    parts = [
        ShardState(term=3, leader="a", in_sync=("a", "b")).encode(),
        json.dumps([[1, 1], [3, 17]]).encode(),
        json.dumps({"checkpoint-0000000000000007": {"manifest.json": 12, "t-0": 99}}).encode(),
        Segment(1, 2, 3, 1700000000000).name.encode(),
    ]

    def read(data: bytes) -> None:
        kind, rest = data[0] % 4 if data else 0, data[1:]
        if kind == 0:
            ShardState.decode(rest)
        elif kind == 1:
            _terms(rest)
        elif kind == 2:
            listed_files(rest, "a leader")
        else:
            Segment.of(rest.decode("utf-8", "replace"))

    return Target("ps_group", [struct.pack("B", kind) + part for kind, part in enumerate(parts)], read, (DataError,))
