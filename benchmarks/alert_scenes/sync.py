"""Pushes that arrive late or not at all."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.alert_scenes.common import clicks, serve, train


def wrong_address(stage: Any) -> None:
    clicks(stage.folder / "log.csv", 2000)
    more = '[serve]\ndir = "exports/m"\nmodel = "m"\nregistry = "dir:registry"\npush_every_s = 0.2\nat_start = true\n'
    trainer = stage.ready(train(stage, more))
    flags = ("--registry", f"dir:{stage.folder}/registry", "--wait-s", 100, "--name", "m")
    serve(stage, stage.folder / "exports/m", *flags, "--advertise", "127.0.0.1:1")
    stage.watch(trainer["metrics"])
    stage.fires("ShoalSyncFails")
    stage.last.terminate()
    stage.last.wait(60)
    serve(stage, stage.folder / "exports/m", *flags)
    stage.ends("ShoalSyncFails")


def slow_rounds(stage: Any) -> None:
    clicks(stage.folder / "log.csv", 2000)
    more = '[serve]\ndir = "exports/m"\nmodel = "m"\nregistry = "dir:registry"\npush_every_s = 4\nat_start = true\n'
    trainer = stage.ready(train(stage, more))
    flags = ("--registry", f"dir:{stage.folder}/registry", "--wait-s", 100, "--name", "m")
    serve(stage, stage.folder / "exports/m", *flags)
    stage.watch(trainer["metrics"])
    stage.fires("ShoalSyncSlow")


def dropped_ids(stage: Any) -> None:
    code = textwrap.dedent("""
        import json, threading
        import prometheus_client, torch
        from shoal.serving import ClientConfig, ParameterSyncClient, parameter_sync_client_from_config
        from shoal.table import test_hash_table
        server, _ = prometheus_client.start_http_server(0, "127.0.0.1")
        handle = parameter_sync_client_from_config()
        client = ParameterSyncClient(handle)
        table = test_hash_table(1, name_suffix="t", sync_client=handle)
        print(json.dumps({"metrics": f"127.0.0.1:{server.server_port}"}), flush=True)
        ids = torch.arange(3_000_000)
        for part in ids.split(500_000):  # never pushed, and more than can be remembered
            table.apply_gradients(part, torch.ones(len(part), 1))
        config = ClientConfig(targets=["127.0.0.1:1"], model_name="m", signature_name="hashtable_assign")
        client.create_sync_op(config.SerializeToString())
        threading.Event().wait()
    """)
    ready = stage.ready(stage.python("-c", code))
    stage.watch(ready["metrics"])
    stage.fires("ShoalSyncDropsIds")
