"""Parameter servers: disks, refused clients, followers, registry, archive."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.alert_scenes.common import make_larger, small_disk

SLOW_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int fdatasync(int fd) {
  usleep(400000);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}
int fsync(int fd) {
  usleep(400000);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}
"""


def slow_disk(stage: Any) -> dict[str, str]:
    """The environment of a process whose syncs take 0.4 s longer."""
    (stage.folder / "slow.c").write_text(SLOW_SYNC)
    library = stage.folder / "slow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, stage.folder / "slow.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def writing(addresses: str, rows: int = 2000, threads: int = 1) -> Callable[[], None]:
    """Writes rows to a server until it is stopped, ignoring errors."""
    import torch

    from shoal.sharded import PsClient, ps_table

    stop = threading.Event()

    def run(first: int) -> None:
        from datetime import timedelta

        while not stop.is_set():
            try:
                with PsClient([addresses], deadline=timedelta(seconds=3)) as client:
                    table = ps_table(client, 16, name="t")
                    while not stop.is_set():
                        table.assign(torch.arange(first, first + rows), torch.ones(rows, 16))
                        first += rows
            except Exception:
                time.sleep(0.2)

    for number in range(threads):
        threading.Thread(target=run, args=(number << 40,), daemon=True).start()
    return stop.set


def server(stage: Any, *flags: object, **options: Any) -> tuple[Any, dict[str, Any]]:
    process = stage.shoal("ps", "--durability", "log", "--json", *flags, **options)
    return process, stage.ready(process)


def full_disk(stage: Any) -> None:
    disk = small_disk(stage, 30)
    _, ready = server(stage, "--dir", disk, "--checkpoint-every", "15s")
    stage.watch(ready["http"])
    end = writing(ready["address"], threads=4)
    stage.fires("ShoalServerReadOnly")
    stage.fires("ShoalServerDiskLow")
    stage.fires("ShoalServerCheckpointsFail")
    end()
    make_larger(disk, 600)
    for alert in ("ShoalServerReadOnly", "ShoalServerDiskLow", "ShoalServerCheckpointsFail"):
        stage.ends(alert)


def slow_writes(stage: Any) -> None:
    _, ready = server(stage, "--dir", stage.folder / "ps", env=slow_disk(stage))
    stage.watch(ready["http"])
    end = writing(ready["address"], rows=20_000, threads=12)
    stage.fires("ShoalServerDiskSlow")
    stage.fires("ShoalServerQueueGrows")
    end()
    stage.ends("ShoalServerDiskSlow")
    stage.ends("ShoalServerQueueGrows")


def old_checkpoint(stage: Any) -> None:
    flags = ("--dir", stage.folder / "ps", "--checkpoint-every", "1s")
    process, ready = server(stage, *flags)
    end = writing(ready["address"])
    time.sleep(4)
    end()
    process.terminate()
    process.wait(60)
    process, ready = server(stage, *flags[:2], "--checkpoint-every", "0")
    stage.watch(ready["http"])
    stage.fires("ShoalServerCheckpointOld")
    process.terminate()
    process.wait(60)
    server(stage, *flags, "--http-port", ready["http"].rpartition(":")[2])
    stage.ends("ShoalServerCheckpointOld")


def garbage(stage: Any) -> None:
    _, ready = server(stage, "--dir", stage.folder / "ps")
    keys = stage.folder / "keys"
    assert stage.shoal("ps", "keygen", "--out", keys).wait(60) == 0
    _, keyed = server(stage, "--dir", stage.folder / "keyed", "--keys", keys / "server.key_secret")
    stage.watch(ready["http"], keyed["http"])
    for address in (ready["address"], keyed["address"]):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
            time.sleep(1)
    stage.fires("ShoalServerBadMessages")
    stage.ends("ShoalServerBadMessages")


def group(stage: Any, name: str, registry: str) -> tuple[Any, dict[str, Any]]:
    flags = ("--dir", stage.folder / name, "--registry", registry, "--group", "g", "--session-timeout", "2s")
    return server(stage, *flags, "--ack", "local")


def lost_follower(stage: Any) -> None:
    registry = f"dir:{stage.folder}/registry"
    _, leader = group(stage, "a", registry)
    follower, other = group(stage, "b", registry)
    stage.watch(leader["http"], other["http"])
    end = writing(f"{leader['address']}|{other['address']}")
    time.sleep(5)
    follower.kill()
    stage.fires("ShoalShardWithoutFollower")
    group(stage, "b", registry)
    stage.ends("ShoalShardWithoutFollower")
    end()


def lost_registry(stage: Any) -> None:
    from shoal.testing.zookeeper import ZooKeeper

    zookeeper = ZooKeeper(stage.folder / "zk").start()
    stage.cleanups.append(zookeeper.kill)
    registry = f"zk://{zookeeper.hosts}"
    (_, leader), (_, other) = group(stage, "a", registry), group(stage, "b", registry)
    stage.watch(leader["http"], other["http"])
    zookeeper.kill()
    stage.cleanups.clear()
    stage.fires("ShoalRegistryLost")
    stage.fires("ShoalShardWithoutLeader")
    zookeeper.start()
    stage.cleanups.append(zookeeper.kill)
    stage.ends("ShoalRegistryLost")
    stage.ends("ShoalShardWithoutLeader")


def frozen_leader(stage: Any) -> None:
    leader, ready = server(stage, "--dir", stage.folder / "a", "--ack", "local")
    _, other = server(stage, "--dir", stage.folder / "b", "--replica-of", ready["address"].removeprefix("tcp://"))
    stage.watch(other["http"])
    leader.send_signal(signal.SIGSTOP)
    stage.fires("ShoalFollowerBehind")
    leader.send_signal(signal.SIGCONT)
    stage.ends("ShoalFollowerBehind")


def lost_archive(stage: Any) -> None:
    place = stage.folder / "archive"
    _, ready = server(
        stage, "--dir", stage.folder / "ps", "--archive", f"file://{place}", "--archive-every", "0.5s"
    )  # fmt: skip
    stage.watch(ready["http"])
    end = writing(ready["address"], rows=100)
    time.sleep(3)
    shutil.rmtree(place)
    place.write_text("a file where the folder was")
    stage.fires("ShoalArchiveBehind")
    place.unlink()
    stage.ends("ShoalArchiveBehind")
    end()
