"""`shoal.serving.publish` of tables in GPU memory, or cached there, and of a net on the same device."""

import time

import pytest
import torch

import shoal
from shoal.serving import Client, Feature, ModelExporter, ModelServer, publish
from shoal.table.cuda.cache import CachedHashTable
from tests.serving.server.test_server import config_of

DIM = 2


class Score(torch.nn.Module):
    """The sum of a row, plus a bias."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, user):
        return {"score": user.sum(-1) + self.bias}


def make(kind):
    options = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros", "expire_after": "1d", "name": "user"}
    if kind == "cached":
        return CachedHashTable(shoal.HashTable(DIM, **options), cache_rows=16, device="cuda")
    return shoal.HashTable(DIM, device="cuda" if kind == "gpu" else "cpu", **options)


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    tool = ModelExporter(folder, model_name="m", net=Score(), features={"user": Feature(slot="user")})
    tool.export([[make("cpu")]], global_step=0)
    server = ModelServer("127.0.0.1:0", config=config_of(m=(folder / "exported_models",)))
    yield server.start()
    server.stop(0)


def scores(server, *ids):
    with Client(server.address, model="m") as client:
        return client.predict({"user": torch.tensor(ids)[:, None]})["score"].tolist()


@pytest.mark.parametrize("kind", ["gpu", "cached"])
def test_rows_weights_and_what_leaves_reach_a_replica(kind, device, replica, tmp_path):
    table, net = make(kind), Score().to(device)
    bag = shoal.nn.HashEmbeddingBag(table)

    def train(*ids):
        pooled = bag(torch.tensor(ids, device=device), torch.arange(len(ids) + 1, device=device))
        (-pooled.sum()).backward()  # adds 1 to each weight

    with publish({"user": table}, net=net, targets=[replica.address], model="m", every=None) as publication:
        train(1, 2, 3)
        table.assign(torch.tensor([4], device=device), torch.full((1, DIM), 7.0, device=device))
        with torch.no_grad():
            net.bias.fill_(0.5)
        publication.flush()
        assert scores(replica, 1, 2, 3, 4, 5) == [2.5, 2.5, 2.5, 14.5, 0.5]
        table.save(str(tmp_path / "saved"))
        table.erase(torch.tensor([2], device=device))
        train(3, *range(10, 22))  # in a cache, some rows displace others
        publication.flush()
        assert scores(replica, 1, 2, 3, 4, 10, 21) == [2.5, 0.5, 4.5, 14.5, 2.5, 2.5]
        table.restore(str(tmp_path / "saved"))
        publication.flush()
        assert scores(replica, 1, 2, 3, 4, 10, 21) == [2.5, 2.5, 2.5, 14.5, 0.5, 0.5]
        table.evict(int(time.time()) + 3 * 86400)
        publication.flush()
        assert scores(replica, 1, 2, 3, 4) == [0.5] * 4
        (status,) = publication.status()
        assert [target.error for target in status.targets] == [""]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpu", "cached"])
def test_rounds_by_the_clock_while_a_model_trains(kind, device, replica):
    table, net = make(kind), Score().to(device)
    bag, optimizer = shoal.nn.HashEmbeddingBag(table), torch.optim.SGD(net.parameters(), lr=1.0)
    with publish({"user": table}, net=net, targets=[replica.address], model="m", every="20ms") as publication:
        begin = time.monotonic()
        while publication.status()[0].rounds < 10:
            ids = torch.randint(0, 12, (8,), device=device)
            score = net(bag(ids, torch.arange(9, device=device)))["score"]
            optimizer.zero_grad()
            (-score.mean()).backward()
            optimizer.step()
            assert time.monotonic() - begin < 120
        publication.flush()
        every = torch.arange(12)
        expected = (table.find(every)[0].sum(-1) + net.bias.detach().cpu()).tolist()
        assert scores(replica, *every.tolist()) == pytest.approx(expected, rel=1e-6)
