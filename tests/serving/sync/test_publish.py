"""`publish` with real replicas: local tables, tables over two ranks, parameter servers in separate processes."""

import time

import pytest
import torch

import shoal
from shoal.errors import ConfigError, DeadlineError
from shoal.serving import Feature, ModelExporter, ModelServer, publish
from shoal.serving.cluster.records import Container, ContainerServiceInfo, SavedModel
from shoal.serving.cluster.zk_backend import ZKBackend
from shoal.sharded import AllToAllHashTable, PsClient, ps_table
from shoal.sharded.placement.local import LocalServers
from shoal.stamps import Stamp, new_run
from shoal.testing import run_ranks
from tests.serving.helpers import eventually, flush_fails, free_port
from tests.serving.server.test_server import Client, config_of

DIM = 2
IDS = list(range(40))


class Score(torch.nn.Module):
    """The sum of a row, plus a bias."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, user):
        return {"score": user.sum(-1) + self.bias}


def make(**options):
    return shoal.HashTable(DIM, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", name="user", **options)


def step(table, *ids, by=1.0):
    """Every weight of the ids grows by so much."""
    table.apply_gradients(torch.tensor(ids), torch.full((len(ids), DIM), -by))


@pytest.fixture
def replica(tmp_path):
    """A server of model m, exported before anything was learnt."""
    tool = ModelExporter(tmp_path / "m", model_name="m", net=Score(), features={"user": Feature(slot="user")})
    tool.export([[make()]], global_step=0)
    server = ModelServer("127.0.0.1:0", config=config_of(m=(tmp_path / "m" / "exported_models",))).start()
    yield server
    server.stop(0)


def scores(server, ids=IDS):
    return Client(server).predict("m", "", {"user": torch.tensor(ids)[:, None]})["score"].tolist()


def expected(rows, bias=0.0):
    """Of ids that have rows, and of others."""
    return [DIM * rows.get(one, 0.0) + bias for one in IDS]


def test_rows_weights_and_what_leaves_reach_a_replica(replica):
    table, net = make(expire_after="1d"), Score()
    with publish({"user": table}, net=net, targets=[replica.address], model="m", every=None) as publication:
        step(table, 1, 2, 3)
        table.assign(torch.tensor([4]), torch.full((1, DIM), 7.0))
        with torch.no_grad():
            net.bias.fill_(0.5)
        publication.flush()
        assert scores(replica) == expected({1: 1, 2: 1, 3: 1, 4: 7}, 0.5)
        table.erase(torch.tensor([2]))
        step(table, 3)
        publication.flush()
        assert scores(replica) == expected({1: 1, 3: 2, 4: 7}, 0.5)
        table.evict(int(time.time()) + 3 * 86400)
        publication.flush()
        assert scores(replica) == expected({}, 0.5)
        (status,) = publication.status()
        assert status.source == "trainer"
        assert [target.error for target in status.targets] == [""]


def test_a_thread_makes_the_rounds(replica):
    table = make()
    with publish(table, targets=[replica.address], model="m", every="20ms"):
        step(table, 5)
        eventually(lambda: scores(replica) == expected({5: 1}))
        step(table, 5, 6)
        eventually(lambda: scores(replica) == expected({5: 2, 6: 1}))


class Torn(torch.nn.Module):
    """0 where rows and both weights are of one step."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(1))
        self.two = torch.nn.Parameter(torch.zeros(1))

    def forward(self, user):
        return {"score": (self.one - self.two) * 1000 + (user.sum(-1) - DIM * self.one)}


class Slow(torch.optim.Optimizer):
    """Adds 1 to each weight, with a pause between them in which others may look."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(1.0)
                time.sleep(0.002)


@pytest.mark.parametrize("pause_s", [0.0, 0.03], ids=["", "steps longer than a period"])
@pytest.mark.parametrize("together", [True, False], ids=["one optimizer", "two optimizers"])
def test_rounds_by_the_clock_have_rows_and_weights_of_one_step(tmp_path, together, pause_s):
    table, net = make(), Torn()
    tool = ModelExporter(tmp_path / "m", model_name="m", net=net, features={"user": Feature(slot="user")})
    tool.export([[make()]], global_step=0)
    optimizers = [Slow(net.parameters())] if together else [Slow([net.one]), Slow([net.two])]
    server = ModelServer("127.0.0.1:0", config=config_of(m=(tmp_path / "m" / "exported_models",))).start()
    try:
        with publish({"user": table}, net=net, targets=[server.address], model="m", every="20ms") as publication:
            seen, steps = [], 0
            while publication.status()[0].rounds < 25 or steps < 50:
                step(table, 1)
                time.sleep(pause_s)
                for optimizer in optimizers:
                    optimizer.step()
                steps += 1
                if steps == 1:  # until an optimizer has stepped, a round may come within a step
                    publication.flush()
                seen += scores(server, [1])
                assert steps < 3000
            assert set(seen) == {0.0}
            publication.flush()
            assert scores(server, [1]) == [0.0]
            assert float(net.one.detach()) == steps
            Slow([torch.zeros(1)]).step()  # another optimizer
    finally:
        server.stop(0)


def test_an_optimizer_that_raises_does_not_end_the_rounds(replica):
    net = Score()

    class Broken(Slow):
        def step(self):
            raise RuntimeError("no memory")

    with publish({"user": make()}, net=net, targets=[replica.address], model="m", every="20ms") as publication:
        Slow([net.bias]).step()
        with pytest.raises(RuntimeError, match="no memory"):
            Broken([net.bias]).step()
        with torch.no_grad():
            net.bias.fill_(3.0)
        publication.flush()
        assert scores(replica) == expected({}, 3.0)


def test_a_table_that_is_cleared_or_restored_is_followed(replica, tmp_path):
    table = make()
    step(table, 1, 2)
    table.save(str(tmp_path / "saved"))
    with publish([table], targets=[replica.address], model="m", every=None) as publication:
        publication.flush()
        assert scores(replica) == expected({1: 1, 2: 1})
        step(table, 2, 3)
        publication.flush()
        table.restore(str(tmp_path / "saved"))
        publication.flush()
        assert scores(replica) == expected({1: 1, 2: 1})
        table.clear()
        publication.flush()
        assert scores(replica) == expected({})


def test_a_trainer_that_was_killed_and_goes_on_from_an_earlier_checkpoint(replica, tmp_path):
    table, run = make(), new_run()
    first = publish(table, targets=[replica.address], model="m", every=None, run=run)
    step(table, 1, 2)
    first.flush()
    table.save(str(tmp_path / "saved"))
    at_checkpoint = first.status()[0].stamp
    step(table, 2, 3)
    step(table, 3)
    first.flush()
    assert scores(replica) == expected({1: 1, 2: 2, 3: 2})
    step(table, 4)
    first.close()  # killed: 4 was never sent

    table = make()
    table.restore(str(tmp_path / "saved"))
    base = Stamp(run, at_checkpoint.step)
    with publish(table, targets=[replica.address], model="m", every=None, run=new_run(run), base=base) as second:
        second.flush()
        assert scores(replica) == expected({1: 1, 2: 1})
        step(table, 5, 2)
        second.flush()
        assert scores(replica) == expected({1: 1, 2: 2, 5: 1})


def test_a_replica_that_is_away_is_named(tmp_path):
    table, nobody = make(), f"127.0.0.1:{free_port()}"
    with publish(table, targets=[nobody], model="m", every=None) as publication:
        step(table, 1)
        flush_fails(publication, nobody)
        with pytest.raises(DeadlineError):
            publication.flush(0.1)


def test_no_replica_lacks_anything(tmp_path):
    with publish(make(), registry=f"dir:{tmp_path}", model="m", every=None) as publication:
        publication.flush(30)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"targets": ["a:1"], "registry": "dir:x", "model": "m"}, "exactly one of registry and targets"),
        ({"model": "m"}, "exactly one of registry and targets"),
        ({"targets": ["a:1"]}, "model must be the name"),
        ({"targets": "a:1", "model": "m"}, "targets must be addresses"),
        ({"targets": ["a:1"], "model": "m", "every": "soon"}, "above 0"),
    ],
)
def test_what_cannot_be_published_is_refused(given, why):
    with pytest.raises(ConfigError, match=why):
        publish(make(), **given)


# --- ranks ----------------------------------------------------------------------------------------------------------


def _learn_on_ranks(rank, world, address):
    table = AllToAllHashTable(DIM, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", name="user")
    net = Score()
    with torch.no_grad():
        net.bias.fill_(0.25 + rank)  # rank 0's counts
    with publish({"user": table}, net=net, targets=[address], model="m", every=None) as publication:
        ids = torch.tensor([rank, 2, 3])
        table.apply_gradients(ids, torch.full((3, DIM), -1.0))
        publication.flush()
        torch.distributed.barrier()
        return publication.status()[0].source


@pytest.mark.timeout(300)
def test_each_rank_sends_its_own_rows(replica):
    assert run_ranks(2, _learn_on_ranks, replica.address, timeout_s=200) == ["trainer_0", "trainer_1"]
    assert scores(replica) == expected({0: 1, 1: 1, 2: 2, 3: 2}, 0.25)


# --- parameter servers ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.timeout(600)
def test_each_server_sends_its_own_rows_and_one_that_was_killed_goes_on(replica, tmp_path):
    flags = ["--durability", "log", "--dir", str(tmp_path / "ps"), "--threads", "1"]
    with LocalServers(2, flags, env={"OMP_NUM_THREADS": "1"}) as servers, PsClient(servers.addresses) as client:
        table = ps_table(client, DIM, name="user", optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
        net = Score()
        with publish({"user": table}, net=net, targets=[replica.address], model="m", every="50ms") as publication:
            step(table, 1, 2, 3)
            with torch.no_grad():
                net.bias.fill_(0.5)
            publication.flush()
            assert scores(replica) == expected({1: 1, 2: 1, 3: 1}, 0.5)
            assert [one.source for one in publication.status()] == ["trainer", "ps_0", "ps_1"]
            client.checkpoint()
            step(table, 2, 4, 5)
            table.erase(torch.tensor([1]))
            publication.flush()
            assert scores(replica) == expected({2: 2, 3: 1, 4: 1, 5: 1}, 0.5)
            servers.kill(0)
            servers.revive(0)
            step(table, 6, 7)
            publication.flush()
            assert scores(replica) == expected({2: 2, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}, 0.5)


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.timeout(600)
def test_servers_that_were_told_by_their_flags_need_no_worker_to_publish(replica, tmp_path):
    registry = f"dir:{tmp_path / 'registry'}"
    backend = ZKBackend("shoal", registry)
    backend.start()
    container = Container("shoal", replica.address)
    backend.report_service_info(container, ContainerServiceInfo(grpc=replica.address))
    backend.sync_available_saved_models(container, {SavedModel("m", "entry")})
    flags = [
        "--durability", "log", "--dir", str(tmp_path / "ps"), "--publish", registry, "--publish-model", "m",
        "--publish-every", "0.05s",
    ]  # fmt: skip
    with LocalServers(2, flags, env={"OMP_NUM_THREADS": "1"}) as servers, PsClient(servers.addresses) as client:
        table = ps_table(client, DIM, name="user", optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
        step(table, 1, 2, 3)
        eventually(lambda: scores(replica) == expected({1: 1, 2: 1, 3: 1}))
        servers.kill(1)
        servers.revive(1)
        table.erase(torch.tensor([3]))
        step(table, 2, 5)
        eventually(lambda: scores(replica) == expected({1: 1, 2: 2, 5: 1}))
        with pytest.raises(ConfigError, match="for model 'm'"):
            publish(table, registry=registry, model="another")
    backend.stop()
