"""Servers and trainers on a local Ray: placed, killed, restarted."""

from datetime import timedelta

import pytest
import torch

from shoal.errors import ConfigError, DeadlineError
from shoal.sharded import PsClient, ps_table
from tests.ray_cluster import start_ray
from tests.sharded.helpers import LONG, broken_trainer, trainer

ray = pytest.importorskip("ray")

SETTINGS = {"optimizer": "sgd", "lr": 1.0, "initializer": "zeros"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_local_ray_places_servers_and_trainers_and_brings_back_the_dead(tmp_path, monkeypatch):
    from shoal.sharded.placement.ray import RayServers

    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's default of 15 workers starve on a busy machine
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match=r"ray\.init"):
        RayServers(1)
    start_ray()
    try:
        with RayServers(2, durability="log", directory=str(tmp_path / "rows"), start_within=LONG) as servers:
            assert servers.run(trainer, 2, num_cpus=0.5) == [0, 1]
            with PsClient(servers.addresses, deadline=LONG) as client:
                table = ps_table(client, 2, name="t", **SETTINGS)
                assert table.lookup(torch.arange(10)).tolist() == [[-10.0, -10.0]] * 10
                servers.kill(1)
                table.apply_gradients(torch.arange(10), torch.ones(10, 2), 9)  # waits until it is back
                assert table.lookup(torch.arange(10)).tolist() == [[-11.0, -11.0]] * 10
            assert [s["state"] for s in servers.status()] == ["serving", "serving"]
            with pytest.raises(Exception, match="no such worker"):
                servers.run(broken_trainer, 1, num_cpus=0.5)
        with pytest.raises(DeadlineError, match="room for 1 actors"):
            RayServers(1, resources={"num_cpus": 64}, start_within=timedelta(seconds=1))
    finally:
        ray.shutdown()
