"""A group on a real device: no waiting, captured steps, growth meanwhile, streams."""

import warnings

import pytest
import torch
from gpu_tables import assert_same_rows
from group_batches import FEATURES, MIXED, make_batch, one_by_one, train

import shoal
from shoal.table.protocol import Step, groups_of


def _big(count, **options):
    tables = [shoal.HashTable(4, seed=3, device="cuda", **options).reserve(200_000) for _ in range(count)]
    return tables, groups_of(tables)[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize("features", [FEATURES, MIXED], ids=["sums", "mixed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_step_does_not_wait_for_the_device(optimizer, features):
    _, group = _big(2, optimizer=optimizer)
    batches = [make_batch("cuda", 3000, 500, high=1 << 40, seed=seed, features=features) for seed in range(8)]
    for batch in batches[:2]:
        train(group, *batch, features=features)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for batch in batches:
            found = group.find(*batch[:2], features, missing="zeros")
            group.rows(found, features, missing="initial")
            train(group, *batch, features=features)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def _captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("features", [FEATURES, MIXED], ids=["sums", "mixed"])
@pytest.mark.parametrize("optimizer", [shoal.Sgd, shoal.Adagrad], ids=["sgd", "adagrad"])
def test_a_captured_step_replays_with_new_ids_rates_and_times(optimizer, features, tmp_path):
    rate = shoal.table.PolynomialDecay(0.5, 10, 0.1)
    gpu, group = _big(2, optimizer=optimizer(lr=rate))
    cpu = [shoal.HashTable(4, seed=3, optimizer=optimizer(lr=rate)) for _ in range(2)]
    static = make_batch("cuda", 300, 40, high=1000, seed=0, features=features)
    first = []
    graph, (_, marks) = _captured(lambda: first.append(train(group, *static, features=features)) or first[-1])
    for _, own in first[:2]:
        one_by_one(cpu, *static, 0, features, own)
    for step in range(6):
        batch = make_batch("cuda", 300, 40, high=1000 * (step + 1), seed=step, features=features)
        for to, of in zip(static, batch, strict=True):
            to.copy_(of)
        if step == 2:
            for at, tables in (("cuda", gpu), ("cpu", cpu)):
                for table in tables:
                    table.erase(torch.arange(200, device=at))
                    table.assign(torch.arange(5000, 5200, device=at), torch.ones(200, 4, device=at))
        if step == 3:
            gpu[0].reserve(3_000_000)  # grows in place
            gpu[1].save(str(tmp_path / "one"))
            gpu[1].restore(str(tmp_path / "one"))  # its rows move
            gpu[1].reserve(200_000)
        now = 1000 + step
        group.set_step(Step(step, time_s=now))
        graph.replay()
        one_by_one(cpu, *batch, step, features, marks)
        for number, table in enumerate(gpu):
            ids = batch[0].view(3, -1)[number : 2 * number + 1].flatten().unique()
            ids = ids[ids != features.padding] if features.padding is not None else ids
            rows = table._storage.find(ids, table._number, "rows")
            assert set(table._storage.arena.row_times(rows).tolist()) == {now}
            torch.testing.assert_close(table.lookup(ids).cpu(), cpu[number].lookup(ids.cpu()), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_step_reads_its_step_and_scale_from_tensors():
    rate = shoal.table.PolynomialDecay(0.5, 10, 0.1)
    gpu, group = _big(2, optimizer=shoal.Sgd(lr=rate))
    static = make_batch("cuda", 300, 40, high=1000, seed=0)
    number, time = torch.tensor([[0], [1]], device="cuda").unbind()
    scale = torch.ones(2, device="cuda")
    graph, _ = _captured(lambda: train(group, *static, Step(number, time, scale)))
    number.fill_(7)
    time.fill_(1234)
    scale.copy_(torch.tensor([1.0, 0.5]))
    ids = static[0].view(3, -1)
    before = [table.lookup(ids[k]) for k, table in enumerate(gpu)]
    graph.replay()
    cpu = [shoal.HashTable(4, seed=3, optimizer=shoal.Sgd(lr=rate(7) * k)) for k in (1.0, 0.5)]
    for k, table in enumerate(cpu):
        table.assign(ids[k].cpu(), before[k].cpu())
    rows = gpu[0]._storage.entries(0)[1]
    assert set(gpu[0]._storage.arena.row_times(rows).tolist()) == {1234}
    one_by_one([cpu[0], shoal.HashTable(4, optimizer="sgd")], *static)
    torch.testing.assert_close(gpu[0].lookup(ids[0]).cpu(), cpu[0].lookup(ids[0].cpu()), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_many_steps_with_new_ids_grow_the_tables():
    tables = [shoal.HashTable(4, seed=3, device="cuda") for _ in range(2)]
    ((group, _),) = groups_of(tables)
    for step in range(300):
        batch = make_batch("cuda", 700, 50, low=step * 500, high=step * 500 + 1000, seed=step)
        train(group, *batch)
    assert tables[0].size() > 100_000
    assert tables[1].size() > 140_000


@pytest.mark.gpu
def test_a_group_follows_streams():
    tables, group = _big(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    batch = make_batch("cuda", 3000, 500)
    side = torch.cuda.Stream()
    for turn in range(6):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream() if turn % 2 else side)
            train(group, *batch)
    torch.cuda.synchronize()
    cpu = [shoal.HashTable(4, seed=3, optimizer=shoal.Sgd(lr=1.0), initializer="zeros") for _ in range(2)]
    for _ in range(6):
        one_by_one(cpu, *batch)
    for plain, table in zip(cpu, tables, strict=True):
        assert_same_rows(plain, table, 1e-3)
