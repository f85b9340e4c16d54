"""`shoal ps --shard ...`: serve one shard, alone or in a group, until it is stopped."""

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

from shoal.cli.shared.security_options import Certificates
from shoal.cli.shared.stopping import stop_event
from shoal.errors import PeerError, UsageError


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


def duration(text: str) -> timedelta | None:
    """Parse ``30s``, ``10m`` or ``2h``; None for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"a time must be a number with s, m, h or d, such as 10m, got {text!r}")
    unit = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    seconds = float(match[1]) * unit
    return timedelta(seconds=seconds) if seconds else None


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


def _publish_settings(options: Serve) -> dict[str, Any] | None:
    if options.publish is None:
        return None
    every = duration(options.publish_every)
    if every is None:
        raise UsageError(f"--publish-every must be a time above 0, got {options.publish_every!r}")
    return {"registry": options.publish, "model": options.publish_model, "every_s": every.total_seconds()}
