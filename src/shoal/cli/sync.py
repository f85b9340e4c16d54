"""`shoal sync`: push freshly trained rows to every serving replica."""

import contextlib
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.metrics_port import Counted, serve_metrics
from shoal.cli.shared.security_options import CallSecurity
from shoal.cli.shared.stopping import stop_event
from shoal.errors import PeerError, UsageError
from shoal.observe.recent import RecentErrors
from shoal.observe.security import ServerSecurity, split_address

DESCRIPTION = """Push freshly trained rows from a trainer or parameter server to all serving replicas.

The trainer offers rows with shoal.serving.SyncSource; replicas come from a registry or from --target.

examples:
  shoal sync --source 127.0.0.1:9000 --model movie_ctr --registry dir:/var/lib/shoal --interval 1
  shoal sync --source 127.0.0.1:9000 --model movie_ctr --target 127.0.0.1:8500 --once"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal sync`."""

    source: str
    """host:port of the trainer's SyncSource."""
    source_name: str = "trainer"
    """The source's name."""
    model: str
    """The model whose replicas are followed."""
    target: tuple[str, ...] = ()
    """Addresses of replicas, instead of a registry; can be repeated."""
    registry: str | None = None
    """host:port,... of ZooKeeper, or dir:/path."""
    bzid: str = "shoal"
    """Business id in the registry."""
    base_name: str | None = None
    """Use the replica registry of a one-model cluster under this name, instead of the unified cluster's bindings."""
    ps_index: int = 0
    """Number of the shard that the trainer trains."""
    interval: float = 1.0
    """Seconds between rounds."""
    once: bool = False
    """Run one round and exit: 0 if every replica accepted everything, else 1."""
    catch_up: bool = False
    """Push everything touched since the start to replicas that join later."""
    full_precision: bool = False
    """Send floats even to replicas that ask for their storage codec."""
    metrics_port: int | None = None
    """Port of the status page and /metrics, on 127.0.0.1; 0 picks a free one."""
    json: bool = False
    """Print one JSON line per round."""
    security: CallSecurity = field(default_factory=CallSecurity)


def main(argv: list[str]) -> int:
    return sync(parse(Options, argv, "sync", DESCRIPTION))


class _Fixed:
    """A backend with fixed targets."""

    def __init__(self, model: str, targets: tuple[str, ...]) -> None:
        self._model, self._targets = model, list(targets)

    def get_sync_targets(self, sub_graph: str) -> tuple[str, list[str]]:
        return f"{self._model}:{sub_graph}", self._targets

    def stop(self) -> None:
        return None


def _backend(options: Options) -> Any:
    from shoal.serving.sync.monolith.online import OnlineTrainingConfig, create_sync_backend

    if options.target:
        return _Fixed(options.model, options.target)
    config = OnlineTrainingConfig(
        bzid=options.bzid,
        base_name=options.base_name or options.model,
        model_name=options.model,
        zk_server=options.registry,
        unified_serving=options.base_name is None,
        num_ps=options.ps_index + 1,
    )
    backend = create_sync_backend(config)
    backend.start()
    backend.subscribe_model(options.model)
    return backend


def sync(options: Options) -> int:
    """Run rounds until SIGTERM or SIGINT, or a single one with ``once``."""
    from shoal.serving.status import StatusError
    from shoal.serving.sync.monolith.handle import SyncClientHandle
    from shoal.serving.sync.monolith.manager import SyncClientManager
    from shoal.serving.sync.monolith.online import SyncLoop
    from shoal.serving.sync.monolith.push_client import PushClient
    from shoal.serving.sync.monolith.source import follow_source

    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if bool(options.target) == (options.registry is not None):
        raise UsageError("exactly one of --registry and --target must be given")
    if not options.interval > 0:
        raise UsageError(f"--interval must be > 0, got {options.interval:g}")
    split_address(options.source)
    security = options.security.build()
    handle = SyncClientHandle(f"shoal-sync-{options.ps_index}")
    handle.manager = SyncClientManager(lambda target: PushClient(target, security, not options.full_precision))
    handle.catch_up(options.catch_up)
    with contextlib.ExitStack() as open_things:
        open_things.callback(handle.manager.close)
        try:
            follower = follow_source(options.source, handle, options.source_name, security)
        except StatusError as error:
            raise PeerError(
                f"--source {options.source}: cannot follow a SyncSource there ({error}); check the address and that "
                "the trainer is running"
            ) from error
        open_things.callback(follower.close)  # reports to the trainer what was delivered
        backend = _backend(options)
        open_things.callback(backend.stop)
        loop = SyncLoop(backend, options.ps_index, handle, options.interval, follower.pull)
        totals = {"replicas": 0, "rows": 0, "waiting_rows": 0, "rounds": 0, "failed_rounds": 0, "freshness_s": None}
        shown = Counted(
            f"Shoal sync, {options.model}", lambda: totals, counters=("rows", "rounds", "failed_rounds"),
            wrong=("failed_rounds",), units={"freshness_s": "s"},
        )  # fmt: skip
        open_things.callback(serve_metrics(options.metrics_port, shown, ServerSecurity(), as_json=options.json))
        stop = open_things.enter_context(stop_event())
        while True:
            begin = time.monotonic()
            code = _round(options, loop, handle, totals, shown.errors)
            if options.once or stop.wait(max(0.0, options.interval - (time.monotonic() - begin))):
                return code if options.once else 0


def _round(options: Options, loop: Any, handle: Any, totals: dict[str, Any], errors: RecentErrors) -> int:
    from shoal.metrics import emit_counter, emit_store

    begin = time.time()
    try:
        responses = json.loads(loop.run_once()).get("responses", [])
    except Exception as error:
        if options.once:
            raise
        print(f"shoal sync: {error}", file=sys.stderr)
        totals["failed_rounds"] += 1
        errors.note(str(error), where="round")
        emit_counter("parameter_sync_failed_rounds", 1)
        return 1
    rows: dict[str, dict[str, Any]] = {}
    for each in responses:
        row = rows.setdefault(each["target"], {"target": each["target"], "rows": 0, "code": 0, "error": ""})
        row["rows"] += each.get("update_num", 0)
        if each.get("status_code"):
            row["code"], row["error"] = each["status_code"], each["error_message"]
    for target, row in rows.items():
        row["freshness_s"] = (
            round(handle.freshness[target], 4) if not row["code"] and target in handle.freshness else None
        )
    waiting = handle.waiting()
    emit_store("parameter_sync_replicas", len(handle.manager.targets))
    for target in handle.manager.targets:
        emit_store("parameter_sync_waiting_rows", waiting.get(target, 0), f"target={target}")
    emit_counter("parameter_sync_failed_rounds", int(any(row["code"] for row in rows.values())))
    totals["rounds"] += 1
    totals["failed_rounds"] += int(any(row["code"] for row in rows.values()))
    totals["rows"] += sum(row["rows"] for row in rows.values())
    totals["waiting_rows"], totals["replicas"] = sum(waiting.values()), len(handle.manager.targets)
    fresh = [row["freshness_s"] for row in rows.values() if row["freshness_s"] is not None]
    totals["freshness_s"] = max(fresh, default=totals["freshness_s"])
    for row in rows.values():
        if row["code"]:
            errors.note(row["error"], where=row["target"])
    report = {
        "time": begin,
        "seconds": round(time.time() - begin, 4),
        "targets": [{**row, "waiting": waiting.get(row["target"], 0)} for row in rows.values()],
        "replicas": len(handle.manager.targets),
    }
    if options.json:
        print(json.dumps(report), flush=True)
    elif rows or options.once:
        _show(report)
    return int(any(row["code"] for row in rows.values()) or (options.once and not handle.manager.targets))


def _show(report: dict[str, Any]) -> None:
    stamp = time.strftime("%H:%M:%S", time.localtime(report["time"]))
    if not report["targets"]:
        print(f"{stamp}  nothing to push to {report['replicas']} replicas", flush=True)
    for row in report["targets"]:
        if row["code"]:
            state = f"failed: {row['code']} {row['error']} ({row['waiting']} rows kept for it)"
        else:
            state = f"{row['rows']} rows" + (f", fresh within {row['freshness_s']:.3f} s" if row["freshness_s"] else "")
        print(f"{stamp}  {row['target']}  {state}", flush=True)
