"""Opens readers and writers by address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.data.live.address import Address, parse_address
from shoal.data.live.protocol import Reader, Writer
from shoal.errors import ConfigError


def open_reader(
    address: str | Address,
    positions: Mapping[str, Any] | None = None,
    *,
    rank: int = 0,
    world: int = 1,
    framing: str = "lines",
    columns: Sequence[str] = (),
) -> Reader:
    """Open a reader of an address at ``positions``, or where the address says to begin.

    Args:
        rank: this process among the ``world`` processes that share the work; each reads its own partitions. A Redis
            stream is one partition, which processes share through a ``group``.
        framing: the kind of files in a growing directory: ``lines``, ``records`` (TFRecord frames) or ``parquet``,
            whose rows are read as JSON objects, or faster as `shoal.data.live.rows.Rows`.
        columns: the columns of Parquet files to read.
    """
    one = parse_address(address) if isinstance(address, str) else address
    made: Reader
    if one.scheme in ("redis", "rediss"):
        from shoal.data.live.redis_stream import RedisReader

        made = RedisReader(one, rank=rank, world=world)
    elif one.scheme == "kafka":
        from shoal.data.live.kafka_topic import KafkaReader

        made = KafkaReader(one, rank=rank, world=world)
    elif one.scheme == "dir":
        from shoal.data.live.growing import GrowingReader

        made = GrowingReader(one, rank=rank, world=world, framing=framing, columns=columns)
    elif one.scheme == "join":
        from shoal.data.joining.reader import join

        if world > 1:
            raise ConfigError(f"{one}: a join must have one reader, got {world} ranks; run `shoal join` for several")
        made = join(one.name)
    else:
        from shoal.data.live.standard_input import StdinReader

        if world > 1:
            raise ConfigError(f"standard input must have one reader, got {world} ranks")
        made = StdinReader()
    try:
        made.open(positions)
    except BaseException:
        made.close()
        raise
    return made


def open_writer(address: str | Address) -> Writer:
    """Open a writer that appends to an address."""
    one = parse_address(address) if isinstance(address, str) else address
    if one.scheme in ("redis", "rediss"):
        from shoal.data.live.redis_stream import RedisWriter

        return RedisWriter(one)
    if one.scheme == "kafka":
        from shoal.data.live.kafka_topic import KafkaWriter

        return KafkaWriter(one)
    if one.scheme == "dir":
        from shoal.data.live.growing import GrowingWriter

        return GrowingWriter(one)
    raise ConfigError(f"{one} cannot be written to")
