"""`shoal serve`: serve exported models."""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.observe_options import ObserveOptions
from shoal.cli.shared.security_options import ServeSecurity
from shoal.cli.shared.stopping import stop_event
from shoal.errors import ConfigError, DeadlineError, UsageError

DESCRIPTION = """Serve exported models over TF-Serving's gRPC and REST interfaces, taking pushed rows while serving.

Example, with the status page at http://127.0.0.1:8501/:
  shoal serve out/model
  curl -d '{"instances": [{"user": [7]}]}' http://127.0.0.1:8501/v1/models/NAME:predict"""


RELOAD_SECS = 60.0
_AT_LEAST = {"wait_s": 0, "poll_seconds": 0, "max_message_mib": 1, "workers": 1, "threads": 0, "drain_seconds": 0}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal serve`."""

    model_dir: Path | None = None
    """A model directory, or its exported_models folder."""
    name: str | None = None
    """The model's name; by default the one that the export recorded."""
    sub_graph: tuple[str, ...] = ()
    """Serve only these sub-graphs of a distributed export (entry, ps_0, ...)."""
    config: Path | None = None
    """A ModelServerConfig in text format, instead of a directory; it is reloaded every minute."""
    model_root: Path | None = None
    """Folder that all models must be in, including those of network reloads; by default MODEL_DIR."""
    host: str = "127.0.0.1"
    """Address to listen on. Off loopback it needs TLS, and tokens or a client CA."""
    port: int = 8500
    """gRPC port; 0 picks a free one."""
    rest_port: int | None = None
    """HTTP port of REST, /metrics and the status page; 0 picks a free one, -1 turns it off. By default 8501 if the
    gRPC port is 8500, else a free one, and on 127.0.0.1 regardless of --host."""
    rest_host: str | None = None
    """Address that REST listens on; by default --host if --rest-port is given."""
    wait_s: float = 0.0
    """Seconds to wait for the first export in MODEL_DIR, which does not have to exist yet."""
    poll_seconds: float = 1.0
    """Seconds between checks for new versions; 0 = load once."""
    registry: str | None = None
    """Where to register: host:port,... of ZooKeeper, or dir:/path for a directory of files."""
    bzid: str = "shoal"
    """Business id in the registry."""
    advertise: str | None = None
    """host:port at which others reach the gRPC port; by default the address it listens on."""
    agent_port: int | None = None
    """Port of the local agent, which has the addresses of the other sub-graphs."""
    device: str = "cpu"
    """Device of rows and nets: cpu, cuda, cuda:1."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products in bfloat16, which is faster on GPUs and on CPUs that support it."""
    compiled: bool = False
    """Run nets that AOTInductor compiled at export (`shoal export --compiled`) if the core does not support their
    operations. They are machine code inside the export: use it only with model directories that you trust."""
    max_batch_rows: int = 0
    """Maximum rows of a micro-batch; 1 turns it off, 0 = 1024, or 8192 with --device cuda."""
    max_message_mib: int = 32
    """Maximum size of a request."""
    workers: int = 96
    """Threads for work outside the event loop: pushes, calls to other servers, long batches."""
    max_waiting: int = 1024
    """Maximum waiting requests per model; further ones are refused with RESOURCE_EXHAUSTED (429 over REST)."""
    model_limit: tuple[str, ...] = ()
    """NAME=N: as --max-waiting, for one model."""
    front: Literal["auto", "native", "python"] = "auto"
    """gRPC server: the native front end, or Python's gRPC library; auto = native if it was built."""
    threads: int = 0
    """Threads of one native or torch operation; 0 = all CPUs."""
    drain_seconds: float = 10.0
    """Seconds after SIGTERM for running requests to finish."""
    json: bool = False
    """Print one JSON line with the addresses when ready."""
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    security: ServeSecurity = field(default_factory=ServeSecurity)


def main(argv: list[str]) -> int:
    return serve(parse(Options, argv, "serve", DESCRIPTION, positional="model_dir"))


def serve(options: Options) -> int:
    """Run the server until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with options.observe.opened("shoal-serve") as observed:
        return _serve(options, observed)


def _serve(options: Options, observed: dict[str, Any]) -> int:
    import torch

    from shoal import set_num_threads
    from shoal.serving.net_utils import concat_ip_and_port
    from shoal.serving.server.models import root_of
    from shoal.serving.server.process import tune_server_process
    from shoal.serving.server.server import ModelServer

    if (options.model_dir is None) == (options.config is None):
        raise UsageError("exactly one of MODEL_DIR and --config must be given")
    for name, least in _AT_LEAST.items():
        if not getattr(options, name) >= least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    tune_server_process()
    if options.threads:
        torch.set_num_threads(options.threads)
        set_num_threads(options.threads)
    root = options.model_dir.resolve() if options.model_dir is not None else None
    if root is not None and options.wait_s and not _wait(root, options.wait_s):
        return 0
    if root is not None and not root.is_dir():
        raise ConfigError(f"MODEL_DIR must be the folder that exports were written to; {root} is not a directory")
    config, names, bindings = models_of(options)
    server = ModelServer(
        concat_ip_and_port(options.host, options.port),
        _rest_address(options),
        config,
        options.poll_seconds,
        security=options.security.build(),
        model_root=options.model_root or (root_of(root) if root else None),
        max_message_bytes=options.max_message_mib * 1024 * 1024,
        max_batch_rows=options.max_batch_rows,
        device=options.device,
        precision=options.precision,
        compiled=options.compiled,
        workers=options.workers,
        front=options.front,
        max_waiting=options.max_waiting,
        model_limits=limits_of(options.model_limit),
        **observed,
    )
    for alias, name in names.items():
        server.alias(alias, name)
    _route(options, server, config)
    with stop_event() as stop:
        server.start()
        registration = _Registration(options, server, bindings) if options.registry else None
        names = sorted(model.name for model in server.models())
        ready = {"grpc": server.address, "rest": server.rest_address, "models": names}
        print(json.dumps(ready) if options.json else _text(ready), flush=True)
        while not stop.wait(RELOAD_SECS if options.config is not None else None):
            _reload(options, server)
        if registration is not None:
            registration.stop()
        server.stop(options.drain_seconds)
    return 0


REST_PORT = 8501
"""TF-Serving's REST port, next to 8500 for gRPC."""


def _rest_address(options: Options) -> str | None:
    """Return the address of REST, None if it is off. The default port gives way to a free one if it is taken."""
    from shoal.serving.net_utils import concat_ip_and_port, is_open

    if options.rest_port is not None:
        host = options.rest_host or options.host
        return concat_ip_and_port(host, options.rest_port) if options.rest_port >= 0 else None
    host = options.rest_host or "127.0.0.1"
    usual = REST_PORT if options.port == REST_PORT - 1 else 0
    if usual and is_open(concat_ip_and_port(host, usual), 0.2):
        logging.getLogger(__name__).warning("port %d is in use: the status page gets another one", usual)
        usual = 0
    return concat_ip_and_port(host, usual)


def _wait(root: Path, seconds: float) -> bool:
    """Wait for a first export. Returns False if SIGTERM or SIGINT came first."""
    from shoal.serving.cluster.rollout import newest_version

    end = time.monotonic() + seconds
    preparing: threading.Thread | None = None
    with stop_event() as stop:
        while True:
            base = _export_base(root)
            if base.is_dir() and (newest_version(base) is not None or any(map(newest_version, base.iterdir()))):
                if preparing is not None:
                    preparing.join()
                return True
            if time.monotonic() >= end:
                raise DeadlineError(f"{root} has no export after {seconds:g} s; does the trainer write there?")
            if preparing is None:
                preparing = threading.Thread(target=_prepare, daemon=True)
                preparing.start()
                logging.getLogger(__name__).info("waiting for the first export in %s, up to %g s", root, seconds)
            if stop.wait(0.1):
                return False


def _prepare() -> None:
    """Import the export's dependencies at low priority while the trainer writes it."""
    from shoal.serving.export.program_file import prepare_to_load

    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # on Linux, only of this thread
    prepare_to_load()


def limits_of(given: tuple[str, ...]) -> dict[str, int]:
    """Parse ``NAME=N`` flags."""
    limits = {}
    for each in given:
        name, _, number = each.rpartition("=")
        if not name or not number.isdecimal():
            raise UsageError(f"--model-limit must be NAME=N, such as ctr=200, got {each!r}")
        limits[name] = int(number)
    return limits


def _reload(options: Options, server: Any) -> None:
    """Reload the configuration; if it is invalid, log the error and keep serving the current models."""
    assert options.config is not None
    try:
        config = read_config(options.config)
        server.reload(config)
        if options.agent_port is None:
            _route(options, server, config)
    except Exception as error:
        logging.getLogger(__name__).error("%s is not applied: %s", options.config, error)


def _text(ready: dict) -> str:
    rest = f", status page http://{ready['rest']}/" if ready["rest"] else ""
    return f"serving {', '.join(ready['models']) or 'nothing yet'} on {ready['grpc']}{rest}"


def read_config(path: Path) -> Any:
    from google.protobuf import text_format

    from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig

    try:
        return text_format.Parse(path.read_text(), ModelServerConfig())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a ModelServerConfig: {error}") from None


def _export_base(model_dir: Path) -> Path:
    """Return the folder of a model directory that exports are in: ``exported_models``, or else itself."""
    folder = model_dir / "exported_models"
    return folder if folder.is_dir() else model_dir


def models_of(options: Options) -> tuple[Any, dict[str, str], list[tuple[str, str, str]]]:
    """Return (server config, alias -> model, bindings); a binding is (model, sub-graph, served name)."""
    from shoal.proto.serving.tf_serving_pb2 import ModelServerConfig
    from shoal.serving.cluster.agent_utils import gen_model_config
    from shoal.serving.cluster.rollout import newest_version
    from shoal.serving.export.manifest import Manifest

    config, aliases, bindings = ModelServerConfig(), {}, []
    if options.config is not None:
        return read_config(options.config), {}, []
    assert options.model_dir is not None
    base = _export_base(options.model_dir)
    version = newest_version(base)
    if version is not None:  # a standalone export
        if unknown := set(options.sub_graph) - {"ps_0"}:
            raise ConfigError(f"{base} is one model without sub-graphs {sorted(unknown)}; leave --sub-graph out")
        name = options.name or Manifest.read(base / str(version)).model_name
        config.model_config_list.config.append(gen_model_config(name, str(base)))
        aliases[f"{name}:ps_0"] = aliases["ps_0"] = name
        return config, aliases, [(name, "ps_0", name)]
    subs = sorted(each.name for each in base.iterdir() if each.is_dir() and newest_version(each) is not None)
    if options.sub_graph:
        if missing := sorted(set(options.sub_graph) - set(subs)):
            raise ConfigError(f"{base} has no exports of {missing}; it has {subs or 'none'}")
        subs = [sub for sub in subs if sub in options.sub_graph]
    if not subs:
        raise ConfigError(f"{base} holds no exports; write one with shoal.serving.ModelExporter")
    for sub in subs:
        newest = newest_version(base / sub)
        model = options.name or Manifest.read(base / sub / str(newest)).model_name
        served = sub if options.agent_port is not None else f"{model}:{sub}"
        config.model_config_list.config.append(gen_model_config(served, str(base / sub)))
        bindings.append((model, sub, served))
        if sub == "entry":
            aliases[model] = served
    return config, aliases, bindings


def _route(options: Options, server: Any, config: Any) -> None:
    """Set where an entry finds its embedding shards: the agent's table, or this process."""
    from shoal.serving.client.addresses import AgentHeartbeat, set_address_table

    if options.agent_port is not None:
        set_address_table(AgentHeartbeat(f"localhost:{options.agent_port}"))
        return
    own = {"0.0.0.0": f"127.0.0.1:{server.port}", "::": f"[::1]:{server.port}"}.get(options.host, server.address)
    set_address_table({each.name: [own] for each in config.model_config_list.config})


class _Registration:
    """This server's registration: its address and the models it serves."""

    def __init__(self, options: Options, server: Any, bindings: list[tuple[str, str, str]]) -> None:
        from shoal.serving.cluster.records import Container
        from shoal.serving.cluster.zk_backend import ZKBackend
        from shoal.serving.net_utils import get_local_server_addr

        self._server, self._bindings = server, bindings
        own = get_local_server_addr(server.port) if options.host in ("0.0.0.0", "::") else server.address
        self._address = options.advertise or own
        self._rest = server.rest_address
        self._container = Container("shoal", self._address)
        self._backend = ZKBackend(options.bzid, options.registry)
        self._backend.start()
        self._stop = threading.Event()
        self._report()
        self._thread = threading.Thread(target=self._loop, name="shoal-register", daemon=True)
        self._thread.start()

    def _report(self) -> None:
        from shoal.serving.cluster.records import ContainerServiceInfo, SavedModel

        self._backend.report_service_info(self._container, ContainerServiceInfo(grpc=self._address, http=self._rest))
        ready = {SavedModel(model, sub) for model, sub, name in self._bindings if self._server.model(name).current()}
        self._backend.sync_available_saved_models(self._container, ready)

    def _loop(self) -> None:
        while not self._stop.wait(2.0):
            try:
                self._report()
            except Exception:
                logging.getLogger(__name__).exception("registering failed")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._backend.stop()
