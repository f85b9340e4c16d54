"""`shoal ps`: one shard of a parameter server, its keys, and its checkpoints for another number of shards."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from shoal.cli.shared.arguments import Verbs, parse, run_verb
from shoal.cli.shared.stopping import stop_event
from shoal.errors import UsageError

EXAMPLES = """examples:

  shoal ps --shard 0 --of 2 --config tables.toml --port 7100 --durability log --dir /data/ps

  shoal ps keygen --out keys --name server

  shoal ps reshard --source /data/ps --target /data/ps3 --of 3

  shoal ps status 127.0.0.1:7100 127.0.0.1:7101"""


@dataclass
class Serve:
    """Serves one shard until SIGTERM or SIGINT, which finish what was accepted first."""

    shard: int = 0
    """Which shard this is."""
    of: int = 1
    """How many there are."""
    config: Path | None = None
    """tables.toml; workers may make tables, too."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine it needs --keys, or --insecure."""
    port: int = 0
    """0 takes a free one."""
    http_host: str = "127.0.0.1"
    http_port: int = 0
    """For /healthz and /metrics."""
    durability: Literal["none", "checkpoint", "log"] = "none"
    """What survives a crash: nothing, the last checkpoint, or everything that was acknowledged."""
    dir: Path | None = None
    """Where checkpoints and logs are kept; each shard has a folder of its own in it."""
    checkpoint_every: str = "10m"
    """Time between checkpoints, such as 30s, 10m or 2h; 0 for none but the last."""
    evict_every: str = "0"
    """Time between removals of expired rows; 0 for never."""
    keys: Path | None = None
    """The server's .key_secret file: CURVE identity and encryption."""
    clients: Path | None = None
    """Folder with the public keys of those who may connect; without it all who have the server's public key may."""
    insecure: bool = False
    """Listen beyond this machine without keys."""
    max_ids: int = 1 << 24
    """Ids in one request at most."""
    threads: int = 2
    """Threads for large lookups."""
    publish: str | None = None
    """Send rows as they are learnt to the replicas in this registry: dir:///path, a folder, or zk://host:port."""
    publish_model: str | None = None
    """The name that the replicas serve the model by."""
    publish_every: str = "1s"
    """Time between two rounds of pushes."""
    json: bool = False
    """Print where the server listens as one line of JSON."""


@dataclass
class Keygen:
    """Makes a pair of CURVE keys.

    Example: shoal ps keygen --out keys --name server
    """

    out: Path
    """Folder for NAME.key (public) and NAME.key_secret."""
    name: str = "server"
    json: bool = False
    """Print where they are as one line of JSON."""


@dataclass
class Reshard:
    """Rewrites the newest checkpoints of all shards for another number of shards.

    Example: shoal ps reshard --source /data/ps --target /data/ps3 --of 3
    """

    source: Path
    """The --dir of the old servers."""
    target: Path
    """The --dir of the new ones; it must be empty."""
    of: int
    """How many shards there will be."""
    json: bool = False


@dataclass
class Status:
    """Asks servers what they hold, as JSON.

    Example: shoal ps status 127.0.0.1:7100 127.0.0.1:7101
    """

    addresses: tuple[str, ...]
    """Where they listen, in the order of their shards."""
    keys: Path | None = None
    """Your .key_secret file, where the servers use CURVE."""
    server: Path | None = None
    """The servers' public .key file."""
    timeout: float = 5.0
    """Seconds to wait for their answers."""
    json: bool = False
    """Has no effect: the answer is JSON in any case."""


def duration(text: str) -> timedelta | None:
    """``30s``, ``10m``, ``2h``; None for 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"a time must be a number with s, m, h or d, such as 10m, got {text!r}")
    unit = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    seconds = float(match[1]) * unit
    return timedelta(seconds=seconds) if seconds else None


def main(argv: list[str]) -> int:
    verbs: Verbs = {
        "keygen": (Keygen, keygen, ()),
        "reshard": (Reshard, reshard, ()),
        "status": (Status, status, ("addresses",)),
    }
    if argv[:1] and argv[0] in verbs:
        return run_verb("ps", "", verbs, argv)
    options = parse(Serve, argv, "ps", f"{Serve.__doc__}\n\n{EXAMPLES}")
    return options if isinstance(options, int) else serve(options)


def serve(options: Serve) -> int:
    from shoal.serving.sync.shard_publish import ShardPublishing
    from shoal.sharded.ps.client.tables import create_request, load_tables
    from shoal.sharded.ps.limits import Limits
    from shoal.sharded.ps.security import ServerKeys
    from shoal.sharded.ps.server.engine import Engine
    from shoal.sharded.ps.server.server import ParameterServer
    from shoal.sharded.ps.server.shard import Shard

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    folder = None if options.dir is None else options.dir / f"shard-{options.shard:05d}"
    tables = load_tables(options.config) if options.config is not None else {}
    checkpoint_every, evict_every = duration(options.checkpoint_every), duration(options.evict_every)
    if options.clients is not None and options.keys is None:
        raise UsageError("--clients says whose keys may connect, so it needs the server's own: give --keys")
    if (options.publish is None) != (options.publish_model is None):
        raise UsageError("--publish REGISTRY and --publish-model NAME must be given together")
    engine = Engine(Shard(options.shard, options.of), options.durability, folder)
    publishing = ShardPublishing(engine, _publish_settings(options))
    periodic = checkpoint_every if folder is not None and options.durability != "none" else None
    server = ParameterServer(
        engine,
        host=options.host,
        port=options.port,
        http_host=options.http_host,
        http_port=options.http_port,
        keys=None if options.keys is None else ServerKeys(secret=options.keys, clients=options.clients),
        insecure=options.insecure,
        limits=Limits(max_ids=options.max_ids),
        read_threads=options.threads,
        checkpoint_every=periodic,
        evict_every=evict_every,
        tables=[create_request(config, spec) for config, spec in tables.values()],
        publish=publishing.ask,
    )
    publishing.server = server
    with stop_event() as stop:
        server.start()
        if publishing.settings is not None:
            publishing.start()
        place = {"shard": options.shard, "of": options.of, "address": server.address, "http": server.http_address}
        if options.json:
            print(json.dumps(place), flush=True)
        else:
            print(
                f"shard {options.shard} of {options.of} on {server.address}, status on http://{server.http_address}",
                flush=True,
            )
        while not stop.wait(0.2):
            if server.wait(0):
                print(f"shoal ps: shard {options.shard} failed: {server.fatal}", file=sys.stderr)
                publishing.close()
                server.stop(drain=timedelta(0))
                return 1
        publishing.close()
        server.stop(checkpoint=folder is not None and options.durability != "none")
    return 0


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
    from shoal.sharded.ps.security import ClientKeys

    if not options.addresses:
        raise UsageError("give the addresses of the servers, in the order of their shards, such as 127.0.0.1:7100")
    if (options.keys is None) != (options.server is None):
        raise UsageError("--keys (your own secret key) and --server (the servers' public key) must be given together")
    keys = None
    if options.keys is not None and options.server is not None:
        keys = ClientKeys(secret=options.keys, server=options.server)
    if options.timeout <= 0:
        raise UsageError(f"--timeout must be > 0, got {options.timeout:g}")
    with PsClient(options.addresses, deadline=timedelta(seconds=options.timeout), keys=keys) as client:
        print(json.dumps(client.info(), indent=2))
    return 0
