"""`shoal ps`: run a parameter server for one shard, and manage its keys, checkpoints and archive."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from shoal.cli.shared.arguments import Verbs, parse, run_verb
from shoal.cli.shared.security_options import Certificates
from shoal.cli.shared.stopping import stop_event
from shoal.errors import PeerError, UsageError

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
class Serve:
    """Serve one shard until SIGTERM or SIGINT; requests already accepted are finished first."""

    shard: int = 0
    """Number of this shard, from 0."""
    of: int = 1
    """Number of shards."""
    config: Path | None = None
    """tables.toml; workers can also create tables."""
    host: str = "127.0.0.1"
    """Address to listen on. Off loopback it needs --keys."""
    port: int = 0
    """Port to listen on; 0 picks a free one."""
    http_host: str = "127.0.0.1"
    """Address of the status page, /metrics and /healthz. Off loopback it needs --tls-cert and --tokens."""
    http_port: int = 0
    """Port of the status page; 0 picks a free one."""
    durability: Literal["none", "checkpoint", "log"] = "none"
    """What survives a crash: nothing, the last checkpoint, or everything that was acknowledged."""
    dir: Path | None = None
    """Folder for checkpoints and logs; each shard has its own subfolder."""
    checkpoint_every: str = "10m"
    """Time between checkpoints, such as 30s, 10m or 2h; 0 for only the last one."""
    evict_every: str = "0"
    """Time between removals of expired rows; 0 for never."""
    keys: Path | None = None
    """The server's .key_secret file: CURVE identity and encryption."""
    clients: Path | None = None
    """Folder with the public keys of allowed clients; by default, anyone with the server's public key can connect."""
    allow_insecure: bool = False
    """Listen off loopback without keys, TLS and tokens: anyone on the network can read and change rows. --insecure is
    the same."""
    max_ids: int = 1 << 24
    """Maximum number of ids in one request."""
    threads: int = 2
    """Threads for large lookups."""
    publish: str | None = None
    """Send rows as they are learnt to the replicas in this registry: dir:///path, a folder, or zk://host:port."""
    publish_model: str | None = None
    """The name under which the replicas serve the model."""
    publish_every: str = "1s"
    """Time between two rounds of pushes."""
    registry: str | None = None
    """Replicate this shard on several servers, which find each other here: dir:///path, a folder, or zk://host:port.
    One leads and the others follow its log; when it fails, an up-to-date follower takes over. Needs --durability
    log."""
    group: str = "ps"
    """Name in the registry that all servers of one model share."""
    replica_of: str | None = None
    """Follow the server at this HOST:PORT, which was started with --ack, without a registry. A follower never takes
    over by itself; restart it without this flag to make it lead."""
    ack: Literal["local", "follower"] | None = None
    """When to acknowledge a write: once it is on this server's disk (local), or also on the followers' (follower), so
    that losing a host loses no data. Default: local."""
    advertise: str | None = None
    """HOST:PORT at which the others reach this server; default: where it listens."""
    stale_reads: str = "0"
    """Maximum age of rows, such as 2s, with which a follower answers reads; 0: followers do not answer."""
    session_timeout: str = "4s"
    """How long a server can be silent before another one takes over."""
    force_lead: bool = False
    """Lead even if acknowledged writes are missing here; only for when the other disks are lost."""
    archive: str | None = None
    """Also store checkpoints and the log in an object store: s3://bucket/prefix, gs://…, az://… or file:///path. `shoal
    ps restore` restores the shard on an empty host. Credentials come from the environment. Needs --durability log."""
    archive_every: str = "5s"
    """Time between uploads: the most that is lost if the disk and all followers are lost."""
    archive_keep: str = "0"
    """How long checkpoints and logs stay in the archive, such as 30d; 0 for forever."""
    peer_keys: Path | None = None
    """This server's .key_secret file for connections to the other servers of the group; default: --keys."""
    json: bool = False
    """Print the server's addresses as one line of JSON."""
    http_security: Certificates = field(default_factory=Certificates)


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


def duration(text: str) -> timedelta | None:
    """Parse ``30s``, ``10m`` or ``2h``; None for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"a time must be a number with s, m, h or d, such as 10m, got {text!r}")
    unit = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    seconds = float(match[1]) * unit
    return timedelta(seconds=seconds) if seconds else None


def main(argv: list[str]) -> int:
    verbs: Verbs = {
        "handover": (Handover, handover, ("address",)),
        "keygen": (Keygen, keygen, ()),
        "reshard": (Reshard, reshard, ()),
        "restore": (Restore, restore, ()),
        "status": (Status, status, ("addresses",)),
    }
    if argv[:1] and argv[0] in verbs:
        return run_verb("ps", "", verbs, argv)
    argv = ["--allow-insecure" if word == "--insecure" else word for word in argv]  # its old name
    return serve(parse(Serve, argv, "ps", f"{Serve.__doc__}\n\n{EXAMPLES}"))


def serve(options: Serve) -> int:
    from shoal.sharded.ps.server.engine import FULL, ROOM_EVERY_S

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    if options.clients is not None and options.keys is None:
        raise UsageError("--clients needs --keys: the server must have its own key to check those of clients")
    if (options.publish is None) != (options.publish_model is None):
        raise UsageError("--publish REGISTRY and --publish-model NAME must be given together")
    if options.registry is not None and options.replica_of is not None:
        raise UsageError("--registry finds the leader by itself; give it or --replica-of, not both")
    with stop_event() as stop:
        code, ports = None, None
        while code is None:  # a server that loses the lead, or cannot follow from its state, restarts as a follower
            try:
                code, ports = _serve_once(options, stop, ports)
            except OSError as error:
                if ports is None or error.errno not in FULL:
                    raise
                text = "shard %d must restart as a follower and is waiting for free disk space: %s"
                logging.getLogger("shoal.ps").error(text, options.shard, error)
                code = 0 if stop.wait(ROOM_EVERY_S) else None
    return code


def _serve_once(options: Serve, stop: Any, ports: tuple[int, int] | None) -> tuple[int | None, tuple[int, int] | None]:
    """Serve; return the exit code, or None to serve again, and the ports. ``ports`` is None only on the first call."""
    from shoal.serving.sync.shard_publish import ShardPublishing
    from shoal.sharded.ps.client.remote import create_request
    from shoal.sharded.ps.client.tables import load_tables
    from shoal.sharded.ps.limits import Limits
    from shoal.sharded.ps.security import ServerKeys
    from shoal.sharded.ps.server.engine import Engine
    from shoal.sharded.ps.server.server import ParameterServer, StartAgain
    from shoal.sharded.ps.server.shard import Shard

    folder = None if options.dir is None else options.dir / f"shard-{options.shard:05d}"
    tables = load_tables(options.config) if options.config is not None else {}
    checkpoint_every, evict_every = duration(options.checkpoint_every), duration(options.evict_every)
    engine = Engine(Shard(options.shard, options.of), options.durability, folder)
    publishing = ShardPublishing(engine, _publish_settings(options))
    periodic = checkpoint_every if folder is not None and options.durability != "none" else None
    replication = _replication(options, folder, force_lead=options.force_lead and ports is None)
    server = ParameterServer(
        engine,
        host=options.host,
        port=ports[0] if ports else options.port,
        http_host=options.http_host,
        http_port=ports[1] if ports else options.http_port,
        keys=None if options.keys is None else ServerKeys(secret=options.keys, clients=options.clients),
        insecure=options.allow_insecure,
        http_security=options.http_security.build(),
        limits=Limits(max_ids=options.max_ids),
        read_threads=options.threads,
        checkpoint_every=periodic,
        evict_every=evict_every,
        tables=[create_request(config, spec) for config, spec in tables.values()],
        publish=publishing.ask,
        replication=replication,
        group=options.group if options.registry is not None else "",
        archive=_archive(options, folder),
        archive_every=duration(options.archive_every) or timedelta(seconds=5),
    )
    publishing.server = server
    if publishing.settings is not None and replication is not None:
        replication.promoted = publishing.start
    try:
        server.start()
    except StartAgain:  # the reason is in the log
        publishing.close()
        return None, ports
    if publishing.settings is not None and replication is None:
        publishing.start()
    if ports is None:
        place = {"shard": options.shard, "of": options.of, "address": server.address, "http": server.http_address}
        text = f"shard {options.shard} of {options.of} on {server.address}, status page {server.http_url}"
        print(json.dumps(place) if options.json else text, flush=True)
    ports = int(server.address.rpartition(":")[2]), int(server.http_address.rpartition(":")[2])
    while not stop.wait(0.05):
        if server.wait(0):
            publishing.close()
            server.stop(drain=timedelta(0))
            if replication is None or not replication.rebuild:
                print(f"shoal ps: shard {options.shard} failed: {server.fatal}", file=sys.stderr)
                return 1, ports
            return None, ports
    publishing.close()
    if replication is not None:
        with contextlib.suppress(PeerError):  # no follower can take over: it leads again after its restart
            replication.hand_over(seconds=5.0)
    server.stop(checkpoint=folder is not None and options.durability != "none")
    return 0, ports


def _replication(options: Serve, folder: Path | None, *, force_lead: bool) -> Any:
    """Make this server's replication, if it is in a group."""
    if options.registry is None and options.replica_of is None and options.ack is None:
        return None
    from shoal.serving.cluster.discovery.leaders import RegistryBoard
    from shoal.serving.cluster.registry import open_registry
    from shoal.sharded.ps.replica.board import FollowingBoard, LoneBoard
    from shoal.sharded.ps.replica.replication import Replication, server_name
    from shoal.sharded.ps.replica.terms import Terms
    from shoal.sharded.ps.security import ClientKeys

    if folder is None or options.durability != "log":
        raise UsageError("a server of a group must have --durability log and --dir: followers copy the log")
    name = server_name(folder)
    if options.registry is not None:
        timeout = duration(options.session_timeout)
        if timeout is None:
            raise UsageError(f"--session-timeout must be above 0, got {options.session_timeout!r}")
        seconds = timeout.total_seconds()
        registry = open_registry(options.registry, session_timeout=seconds)
        board: Any = RegistryBoard(registry, options.group, options.shard, seconds)
    elif options.replica_of is not None:
        board = FollowingBoard(options.replica_of)
    else:
        board = LoneBoard(name, Terms.read(folder).newest)
    secret = options.peer_keys or options.keys
    keys = None if secret is None else ClientKeys(secret=secret, server=options.keys or secret)
    return Replication(
        board,
        name=name,
        ack=options.ack or "local",
        address=options.advertise,
        keys=keys,
        stale_reads=duration(options.stale_reads),
        force_lead=force_lead,
    )


def _archive(options: Serve, folder: Path | None) -> Any:
    """Return a factory of the uploads to the archive, if there is one."""
    if options.archive is None:
        return None
    from shoal.sharded.ps.archive.store import Archive
    from shoal.sharded.ps.archive.uploading import Uploading

    if folder is None or options.durability != "log":
        raise UsageError("--archive stores checkpoints and the log, so it needs --durability log and --dir")
    archive, keep = Archive(options.archive, options.shard), duration(options.archive_keep)

    def make(server: Any) -> Uploading:
        engine, group = server.engine, server.replication
        return Uploading(
            archive,
            folder,
            durable=lambda: engine.log.durable_number if engine.log is not None else 0,
            term=lambda: group.term if group is not None else 0,
            leads=lambda: group is None or group.may_answer(),
            keep=keep,
        )

    return make


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


def _publish_settings(options: Serve) -> dict[str, Any] | None:
    if options.publish is None:
        return None
    every = duration(options.publish_every)
    if every is None:
        raise UsageError(f"--publish-every must be a time above 0, got {options.publish_every!r}")
    return {"registry": options.publish, "model": options.publish_model, "every_s": every.total_seconds()}


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
