"""The parts `read` and `kills` of `benchmarks.online`, which describes them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Report, interleaved
from shoal.data import Schema, make_format
from shoal.data.live import LiveStream, open_reader, open_writer, parse_address
from shoal.sharded import PsClient
from shoal.sharded.placement.local import LocalServers
from shoal.testing.brokers import MockKafka, RedisServer

BATCH = 4096
KILLED_BATCH = 256
RESTART_S = 0.2
BEGIN_S = 1_790_000_000
SCHEMA = Schema(label="click", dense=("age", "price"), sparse=("user", "item", "place", "device"), time="at")


def records(first: int, last: int) -> list[bytes]:
    """Clicks as JSON messages of about 120 bytes."""
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
        count = flags.records // BATCH * BATCH  # only full batches: a partial one would wait for more records
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


# --- kills ------------------------------------------------------------------------------------------------------------


class Supervised:
    """A command that is started again whenever it ends with an error."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self.starts = 0
        self._process = self._start()
        self.done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with open(self._log, "ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def _watch(self) -> None:
        while code := self._process.wait():
            if code == 2:
                raise RuntimeError(f"{' '.join(self._command)}: see {self._log}")
            time.sleep(RESTART_S)
            self._process = self._start()
        self.done.set()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self._process.terminate()
        self.done.wait(60)


def joiner_command(folder: Path, broker: RedisServer) -> list[str]:
    stream = """
        from = "{address}"
        key = "request"
        time = "us"
        time_unit = "us"
        lateness = "1s"
    """
    (folder / "join.toml").write_text(
        f"""
        [impressions]{stream.format(address=broker.address("impressions"))}
        [actions]{stream.format(address=broker.address("actions"))}
        [labels.click]
        [join]
        window = "2s"
        state = "join-state"
        idle = "1h"
        checkpoint_s = 2
        out = "{broker.address("clicks")}"
        """
    )
    return [sys.executable, "-m", "shoal", "join", str(folder / "join.toml")]


def trainer_command(address: str, out: Path, servers: list[str], steps: int) -> list[str]:
    settings = {
        "data.format": "json", "data.label": SCHEMA.label, "data.dense": list(SCHEMA.dense),
        "data.sparse": list(SCHEMA.sparse), "data.time": "at", "model.hidden": [16], "table.dim": 8, "out.every_s": 5.0,
        "train.batch_size": KILLED_BATCH, "train.threads": 1, "train.max_steps": steps, "out.keep": 2,
    }  # fmt: skip
    flags = [text for name, value in settings.items() for text in ("--set", f"{name}={json.dumps(value)}")]
    return [
        sys.executable, "-m", "shoal", "train", "--train", address, "--out", str(out), "--json", "--ps", *servers,
        *flags, "--set", "data.max_wait_s=inf",
    ]  # fmt: skip


def impressions(first: int, last: int) -> list[bytes]:
    """The messages of `records` without the label, a thousand per second of event time."""
    return [
        json.dumps({
            "request": f"r{i}", "us": (BEGIN_S * 1000 + i) * 1000, "age": i % 80, "price": i % 1000 / 10,
            "user": f"u{i * 7919 % 100_003}", "item": f"i{i * 104_729 % 20_011}", "place": f"p{i % 50}",
            "device": f"d{i % 5}", "at": BEGIN_S + i // 1000,
        }).encode()
        for i in range(first, last)
    ]  # fmt: skip


def actions(first: int, last: int) -> list[bytes]:
    """A click for every seventh impression, half a second later."""
    clicked = range(-(-first // 7) * 7, last, 7)
    return [json.dumps({"request": f"r{i}", "us": (BEGIN_S * 1000 + i + 500) * 1000}).encode() for i in clicked]


def produce(broker: RedisServer, total: int, seconds: float) -> None:
    """Writes all impressions and actions within some seconds, each of them once even if the broker is killed."""
    shown, acted = open_writer(broker.address("impressions")), open_writer(broker.address("actions"))
    begun, done, clicks, page = time.monotonic(), 0, 0, KILLED_BATCH // 2
    while done < total:
        last = min(total, done + page)
        shown.append(impressions(done, last), at=done)
        found = actions(done, last)
        acted.append(found, at=clicks)
        clicks, done = clicks + len(found), last
        time.sleep(max(0.0, begun + seconds * done / total - time.monotonic()))
    # Much later events close the windows of all earlier ones.
    shown.append(impressions(total + 100_000, total + 100_001), at=total)
    acted.append([json.dumps({"request": "end", "us": (BEGIN_S * 1000 + total + 100_000) * 1000}).encode()], at=clicks)
    shown.close()
    acted.close()


def joined(broker: RedisServer, total: int) -> bytes:
    """A digest of all samples, in order."""
    reader, digest, seen = open_reader(broker.address("clicks")), hashlib.sha256(), 0
    while seen < total and (chunks := reader.poll(10_000, 1.0)):
        for chunk in chunks:
            seen += len(chunk)
            for record in chunk.records:
                digest.update(record + b"\n")
    reader.close()
    return digest.digest() + seen.to_bytes(8, "big")


def run_system(folder: Path, total: int, seconds: float, kills: int, seed: int) -> dict[str, Any]:
    """Runs the system to the end of the stream; returns rows, weights, and what was killed."""
    folder.mkdir()
    chance = random.Random(seed)
    counts = {"trainer": 0, "joiner": 0, "broker": 0, "server": 0}
    options = ["--durability", "log", "--dir", str(folder / "ps"), "--threads", "1"]
    with RedisServer(folder / "redis") as broker, LocalServers(2, options, env={"OMP_NUM_THREADS": "1"}) as servers:
        address = broker.address("clicks")
        producer = threading.Thread(target=produce, args=(broker, total, seconds if kills else 0.0), daemon=True)
        producer.start()
        steps = total // KILLED_BATCH
        joiner = Supervised(joiner_command(folder, broker), folder / "joiner.txt")
        trainer = Supervised(trainer_command(address, folder / "run", servers.addresses, steps), folder / "log.txt")
        begun = time.monotonic()
        moments = sorted(chance.uniform(0.05, 0.95) * seconds for _ in range(kills))
        whom = [name for _ in range(kills // len(counts) + 1) for name in counts][:kills]
        chance.shuffle(whom)
        for moment, name in zip(moments, whom, strict=True):
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            counts[name] += 1
            if name == "trainer":
                trainer.kill()
            elif name == "joiner":
                joiner.kill()
            elif name == "server":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    servers.kill(chance.randrange(2))  # the supervisor starts it again
            else:
                broker.kill()
                time.sleep(chance.uniform(0, 1))
                broker.start()
        if not trainer.done.wait(seconds + 600):
            raise TimeoutError(f"the trainer did not reach the end of the stream; see {folder / 'log.txt'}")
        producer.join(60)
        joiner.stop()
        samples = joined(broker, total)
        with PsClient(servers.addresses) as client:
            rows = sorted(
                (int(key), tuple(row))
                for page in client.scan("features")
                for key, row in zip(page[0].tolist(), page[1].tolist(), strict=True)
            )
    newest = sorted((folder / "run").glob("ckpt-*"))[-1]
    content = json.loads((newest / "manifest.json").read_text())["content"]
    return {
        "rows": rows, "dense": (newest / "dense.safetensors").read_bytes(), "samples": content["progress"]["samples"],
        "killed": counts, "starts": trainer.starts, "joined": samples,
    }  # fmt: skip


def kills(report: Report, flags: Any) -> None:
    """A run with kills against one without."""
    total = int(flags.seconds * flags.rate) // KILLED_BATCH * KILLED_BATCH
    with tempfile.TemporaryDirectory(dir=flags.dir) as root:
        whole = run_system(Path(root) / "whole", total, flags.seconds, 0, 0)
        killed = run_system(Path(root) / "killed", total, flags.seconds, flags.kills, flags.seed)
    report.add("samples learnt, with kills and without", f"{killed['samples']:,}", f"{whole['samples']:,}")
    report.add("kills of trainer, joiner, broker, servers", "/".join(map(str, killed["killed"].values())))
    same = killed["joined"] == whole["joined"]
    report.add("joined samples are equal, in order", "yes" if same else "no", "", float(same), 1.0)
    differ = sum(one != other for one, other in zip(killed["rows"], whole["rows"], strict=False))
    differ += abs(len(killed["rows"]) - len(whole["rows"]))
    report.add(f"rows that differ, of {len(whole['rows']):,}", f"{differ:,}", "", float(differ), 0.0, at_most=True)
    same = killed["dense"] == whole["dense"] and killed["samples"] == whole["samples"]
    report.add("dense weights and samples are equal", "yes" if same else "no", "", float(same), 1.0)
