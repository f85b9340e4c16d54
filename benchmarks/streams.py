"""The parts `read` and `kills` of `benchmarks.online`, which describes them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Report, interleaved
from shoal.data import Schema, make_format
from shoal.data.live import LiveStream, open_writer, parse_address
from shoal.testing.brokers import MockKafka, RedisServer

BATCH = 4096
SCHEMA = Schema(label="click", dense=("age", "price"), sparse=("user", "item", "place", "device"), time="at")


def records(first: int, last: int) -> list[bytes]:
    """Clicks as JSON, of some 120 bytes."""
    return [
        json.dumps(
            {
                "click": i % 7 == 0, "age": i % 80, "price": i % 1000 / 10, "user": f"u{i * 7919 % 100_003}",
                "item": f"i{i * 104_729 % 20_011}", "place": f"p{i % 50}", "device": f"d{i % 5}",
                "at": 1_790_000_000 + i,
            },
            separators=(",", ":"),
        ).encode()
        for i in range(first, last)
    ]  # fmt: skip


def read(report: Report, flags: Any) -> None:
    """Reading into batches, against the bare clients."""
    with tempfile.TemporaryDirectory(dir=flags.dir) as folder, RedisServer(folder) as server:
        address = server.address("clicks")
        count = flags.records // BATCH * BATCH  # full batches: one that is not waits for more
        fill(address, None, count)
        compare(report, "Redis stream", count, lambda: bare_redis(server.port, count), address, flags)
    with MockKafka() as broker:
        address = broker.address("clicks")
        fill(address, "0", 60_000)
        low, high = kept(address)
        count = (high - low) // BATCH * BATCH
        ours = f"{address}?partitions=0"
        compare(report, "mock Kafka partition", count, lambda: bare_kafka(broker.bootstrap, low, count), ours, flags)


def fill(address: str, partition: str | None, count: int) -> None:
    writer = open_writer(address)
    for begin in range(0, count, 20_000):
        writer.append(records(begin, min(count, begin + 20_000)), partition=partition)
    writer.close()


def kept(address: str) -> tuple[int, int]:
    """The first and the last offset that the mock broker still has."""
    import confluent_kafka

    one = parse_address(address)
    host, port = one.hosts[0]
    consumer = confluent_kafka.Consumer({"bootstrap.servers": f"{host}:{port}", "group.id": "kept"})
    marks = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(one.name, 0), timeout=10)
    consumer.close()
    return marks


def compare(report: Report, what: str, count: int, bare: Callable[[], None], address: str, flags: Any) -> None:
    def ours() -> None:
        stream = LiveStream([address], make_format("json", SCHEMA), SCHEMA, format_name="json", batch_size=BATCH)
        rows = 0
        for batch in stream:
            rows += len(batch)
            if rows >= count:
                break
        stream.close()

    theirs_s, ours_s = (min(series) for series in interleaved([bare, ours], flags.repeats))
    report.add(
        f"{what}: records/s into batches, and of the bare client",
        f"{count / ours_s:,.0f}",
        f"{count / theirs_s:,.0f}",
        theirs_s / ours_s,
        0.5,
    )


def bare_redis(port: int, count: int) -> None:
    import redis

    client = redis.Redis(port=port)
    last, seen = "0-0", 0
    while seen < count:
        ((_, entries),) = client.xread({"clicks": last}, count=BATCH)
        last = entries[-1][0]
        seen += len([fields[b"data"] for _, fields in entries])
    client.close()


def bare_kafka(bootstrap: str, low: int, count: int) -> None:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bare", "enable.auto.commit": False, "auto.offset.reset": "error"}
    )
    consumer.assign([confluent_kafka.TopicPartition("clicks", 0, low)])
    seen, deadline = 0, time.monotonic() + 60
    while seen < count and time.monotonic() < deadline:
        seen += len([one.value() for one in consumer.consume(min(BATCH, count - seen), 1.0)])
    consumer.close()
