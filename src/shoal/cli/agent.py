"""`shoal agent`: the process that registers model servers and gives them each other's addresses."""

import json
import logging
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.cli.shared.arguments import parse
from shoal.cli.shared.observe_options import ObserveOptions
from shoal.cli.shared.security_options import ServeSecurity
from shoal.cli.shared.stopping import stop_event
from shoal.errors import ConfigError

DESCRIPTION = """Run one process of a serving cluster from its agent configuration file.

With --declare, --publish, --unpublish or --show, change or print the registry that the file names, and exit.

examples:
  shoal agent --config agent.conf
  shoal agent --config agent.conf --declare /models/movie_ctr/exported_models --publish 'movie_ctr:*'"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags of `shoal agent`."""

    config: Path
    """The agent's configuration file: 'key value' lines."""
    host: str = "127.0.0.1"
    """Address that a unified container's ports listen on."""
    declare: Path | None = None
    """Declare the sub-graphs exported to this folder, then exit."""
    overwrite: bool = False
    """With --declare: replace existing declarations."""
    publish: str | None = None
    """Add '<model>:<glob>' to the layout, then exit."""
    unpublish: str | None = None
    """Remove '<model>:<glob>' from the layout, then exit."""
    show: bool = False
    """Print the registry's contents as JSON, then exit."""
    json: bool = False
    """Print one JSON line with the addresses when ready."""
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    security: ServeSecurity = field(default_factory=ServeSecurity)


def main(argv: list[str]) -> int:
    return run(parse(Options, argv, "agent", DESCRIPTION))


def run(options: Options) -> int:
    from shoal.serving.cluster.agent_config import AgentConfig
    from shoal.serving.cluster.zk_backend import ZKBackend

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    config = AgentConfig.from_file(options.config)
    if not config.bzid:
        raise ConfigError(f"{options.config}: bzid is missing")
    if options.declare or options.publish or options.unpublish or options.show:
        backend = ZKBackend(config.bzid, config.zk_servers)
        backend.start()
        try:
            return _operate(options, config, backend)
        finally:
            backend.stop()
    with stop_event() as stop:
        if config.agent_version != 3:
            return _one_model(options, config, stop)
        with options.observe.opened("shoal-agent") as observed:
            return _unified(options, config, stop, observed)


def _operate(options: Options, config, backend) -> int:
    from shoal.serving.cluster.rollout import declare_saved_model, map_model_to_layout

    if options.declare:
        print(f"declared {declare_saved_model(backend, options.declare, overwrite=options.overwrite)}")
    for pattern, action in ((options.publish, "pub"), (options.unpublish, "unpub")):
        if pattern:
            if not config.layout_pattern:
                raise ConfigError(f"{options.config}: layout_pattern is missing")
            chosen = map_model_to_layout(backend, pattern, config.layout_pattern, action)
            print(f"{action} {', '.join(map(str, chosen)) or 'nothing'}")
    if options.show:
        print(json.dumps(backend.bzid_info(), indent=2))
    return 0


def _unified(options: Options, config, stop: threading.Event, observed: dict[str, Any]) -> int:
    from shoal.serving.client.addresses import AgentHeartbeat, set_address_table
    from shoal.serving.cluster.agent import UnifiedAgent
    from shoal.serving.cluster.zk_backend import ZKBackend
    from shoal.serving.net_utils import concat_ip_and_port
    from shoal.serving.server.server import ModelServer

    security = options.security.build()
    server = ModelServer(
        concat_ip_and_port(options.host, config.tfs_port_grpc),
        concat_ip_and_port(options.host, config.tfs_port_http),
        poll_wait_seconds=config.file_system_poll_wait_seconds,
        security=security,
        **observed,
    ).start()
    backend = ZKBackend(config.bzid, config.zk_servers)
    agent = UnifiedAgent(
        config, backend, server, agent_address=concat_ip_and_port(options.host, config.agent_port), security=security
    )
    agent.start()
    heartbeat = AgentHeartbeat(concat_ip_and_port(options.host, agent.agent_port))
    set_address_table(heartbeat)
    ready = {
        "grpc": server.port,
        "rest": server.rest_port,
        "agent": agent.agent_port,
        "container": str(agent.container),
    }
    print(
        json.dumps(ready) if options.json else f"container {agent.container} serves on port {server.port}", flush=True
    )
    stop.wait()
    heartbeat.stop()
    agent.stop()
    server.stop(10)
    return 0


def _one_model(options: Options, config, stop: threading.Event) -> int:
    from shoal.serving.cluster.registry import open_registry
    from shoal.serving.cluster.serving_agent import ServingAgent
    from shoal.serving.net_utils import concat_ip_and_port

    if not config.base_name:
        raise ConfigError(f"{options.config}: base_name is missing")
    registry = open_registry(config.zk_servers)
    registry.start()
    try:
        agent = ServingAgent(
            config, registry, agent_address=concat_ip_and_port(options.host, config.agent_port),
            security=options.security.build(),
        )  # fmt: skip
        print(
            json.dumps({"agent": config.agent_port}) if options.json else f"agent on port {config.agent_port}",
            flush=True,
        )
        return agent.run(stop)
    finally:
        registry.stop()
