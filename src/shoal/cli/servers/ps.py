"""`shoal ps`: serves a shard, and manages keys, checkpoints, leaders and archives of parameter servers."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shoal.cli.servers.serving import Serve, serve
from shoal.cli.shared.arguments import Verbs, names_verb, parse, run_verb
from shoal.errors import UsageError

EXAMPLES = """examples:
  shoal ps --shard 0 --of 2 --config tables.toml --port 7100 --durability log --dir /data/ps
  shoal ps status 127.0.0.1:7100 127.0.0.1:7101
  shoal ps keygen --out keys --name server
  shoal ps reshard --source /data/ps --target /data/ps3 --of 3
  shoal ps handover 127.0.0.1:7100
  shoal ps restore --archive s3://bucket/ctr --dir /data/ps --shard 0

A shard on two hosts that survives the loss of either:
  shoal ps --durability log --dir /data/ps --registry zk://zk1:2181 --group ctr --ack follower --port 7100"""


@dataclass
class Handover:
    """Hand a shard over from its leader to a follower, without a pause that a trainer notices.

    Example: shoal ps handover 127.0.0.1:7100
    """

    address: str
    """HOST:PORT of the leader."""
    keys: Path | None = None
    """Your .key_secret file, if the servers use CURVE."""
    server: Path | None = None
    """The servers' public .key file."""
    timeout: float = 15.0
    """Seconds to wait."""
    json: bool = False
    """Print JSON."""


@dataclass
class Restore:
    """Restore a shard from an archive to an empty directory, in its state at the last upload.

    Then start `shoal ps` with the same --dir.

    Example: shoal ps restore --archive s3://bucket/ctr --dir /data/ps --shard 0
    """

    archive: str
    """The --archive of the server."""
    dir: Path
    """The --dir of the new server."""
    shard: int = 0
    """Number of the shard."""
    until: str | None = None
    """Ignore everything stored after this time, such as 2026-11-17T10:00 (UTC by default)."""
    list: bool = False
    """Only list the checkpoints and writes in the archive."""
    json: bool = False
    """Print JSON."""


@dataclass
class Keygen:
    """Generate a pair of CURVE keys.

    Example: shoal ps keygen --out keys --name server
    """

    out: Path
    """Folder for NAME.key (public) and NAME.key_secret."""
    name: str = "server"
    """Name of the key files."""
    json: bool = False
    """Print the paths of the keys as one line of JSON."""


@dataclass
class Reshard:
    """Rewrite the newest checkpoints of all shards for another number of shards.

    Example: shoal ps reshard --source /data/ps --target /data/ps3 --of 3
    """

    source: Path
    """The --dir of the old servers."""
    target: Path
    """The --dir of the new ones; it must be empty."""
    of: int
    """New number of shards."""
    json: bool = False
    """Print JSON."""


@dataclass
class Status:
    """Print the tables and state of servers as JSON.

    Example: shoal ps status 127.0.0.1:7100 127.0.0.1:7101
    """

    addresses: tuple[str, ...]
    """HOST:PORT of each server, in shard order."""
    keys: Path | None = None
    """Your .key_secret file, if the servers use CURVE."""
    server: Path | None = None
    """The servers' public .key file."""
    timeout: float = 5.0
    """Seconds to wait for answers."""
    json: bool = False
    """Has no effect: the output is always JSON."""


def main(argv: list[str]) -> int:
    verbs: Verbs = {
        "handover": (Handover, handover, ("address",)),
        "keygen": (Keygen, keygen, ()),
        "reshard": (Reshard, reshard, ()),
        "restore": (Restore, restore, ()),
        "status": (Status, status, ("addresses",)),
    }
    if names_verb(argv, verbs):
        return run_verb("ps", "", verbs, argv)
    argv = ["--allow-insecure" if word == "--insecure" else word for word in argv]  # its old name
    return serve(parse(Serve, argv, "ps", f"{Serve.__doc__}\n\n{EXAMPLES}"))


def restore(options: Restore) -> int:
    from datetime import UTC, datetime

    from shoal.sharded.ps.archive.restoring import restore as restore_from
    from shoal.sharded.ps.archive.store import Archive

    archive, until = Archive(options.archive, options.shard), None
    if options.until is not None:
        try:
            until = datetime.fromisoformat(options.until)
        except ValueError:
            raise UsageError(f"--until must be a time such as 2026-11-17T10:00, got {options.until!r}") from None
        until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    if options.list:
        checkpoints, segments = archive.checkpoints(), archive.segments()
        last = max((one.last for one in segments), default=0)
        found = {"checkpoints": {one.number: one.stored.isoformat() for one in checkpoints}, "last": last}
        text = "\n".join(f"checkpoint {number}, stored {stored}" for number, stored in found["checkpoints"].items())
        print(json.dumps(found) if options.json else f"{text}\nwrites up to {last}".strip())
        return 0
    folder = options.dir / f"shard-{options.shard:05d}"
    note = (lambda text: None) if options.json else (lambda text: print(text, file=sys.stderr, flush=True))
    done = restore_from(archive, folder, until=until, note=note)
    restored = {"checkpoint": done.checkpoint, "last": done.last, "kept": done.kept, "dir": str(folder)}
    kept = f", with {', '.join(done.kept)} kept" if done.kept else ""
    text = f"{folder} holds shard {options.shard} up to write {done.last} (checkpoint {done.checkpoint}){kept}"
    print(json.dumps(restored) if options.json else text)
    return 0


def handover(options: Handover) -> int:
    from shoal.sharded.ps.protocol import Op
    from shoal.sharded.ps.replica.peer import Peer
    from shoal.sharded.ps.security import zmq_module

    context = zmq_module().Context()
    peer = Peer(context, options.address, _client_keys(options))
    try:
        to = bytes(peer.ask(Op.HANDOVER, {}, options.timeout).payload[0]).decode()
    finally:
        peer.close()
        context.term()
    print(json.dumps({"leader": to}) if options.json else f"{to} leads now")
    return 0


def _client_keys(options: Handover | Status) -> Any:
    from shoal.sharded.ps.security import ClientKeys

    if (options.keys is None) != (options.server is None):
        raise UsageError("--keys (your own secret key) and --server (the servers' public key) must be given together")
    if options.keys is None or options.server is None:
        return None
    return ClientKeys(secret=options.keys, server=options.server)


def keygen(options: Keygen) -> int:
    from shoal.sharded.ps.security import generate

    public, secret = generate(options.out, options.name)
    if options.json:
        print(json.dumps({"public": str(public), "secret": str(secret)}))
    else:
        print(f"public key: {public}\nsecret key: {secret} (keep it on its machine)")
    return 0


def reshard(options: Reshard) -> int:
    from shoal.sharded.ps.reshard import reshard_servers

    if not options.source.is_dir():
        raise UsageError(f"--source {options.source}: there is no such directory")
    rows = reshard_servers(options.source, options.target, options.of)
    print(json.dumps(rows) if options.json else "\n".join(f"{name}: {n} rows" for name, n in sorted(rows.items())))
    return 0


def status(options: Status) -> int:
    from shoal.sharded.ps.client.client import PsClient

    if not options.addresses:
        raise UsageError("give the addresses of the servers, in the order of their shards, such as 127.0.0.1:7100")
    keys = _client_keys(options)
    if options.timeout <= 0:
        raise UsageError(f"--timeout must be > 0, got {options.timeout:g}")
    with PsClient(options.addresses, deadline=timedelta(seconds=options.timeout), keys=keys) as client:
        print(json.dumps(client.info(), indent=2))
    return 0
