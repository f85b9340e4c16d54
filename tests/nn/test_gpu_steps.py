"""Complete steps on a GPU: they do not wait for the device, and can be captured as CUDA graphs and compiled."""

import time
import warnings
from contextlib import contextmanager

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.nn import EmbeddingBagCollection, FirstN, HashEmbedding, HashEmbeddingBag
from tests.nn.test_inputs import Keyed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

KEYS = ("a", "b", "c")
MIXED = {"a": "max", "b": FirstN(2), "c": "mean"}
WIDTHS = {"sum": 12, "mean": 12, "mixed": 16}
COMBINERS = {"sum": "sum", "mean": "mean", "mixed": MIXED}


def make_tables(device="cuda", **options):
    options.setdefault("optimizer", shoal.Adagrad(lr=0.1))
    return {key: shoal.HashTable(4, seed=number, device=device, **options) for number, key in enumerate(KEYS)}


def make_batch(seed, bags=6, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * bags,), generator=generator)
    values = torch.randint(-50, 50, (int(lengths.sum()),), generator=generator)
    return Keyed(list(KEYS), values.to(device), lengths.to(device))


@contextmanager
def no_waiting():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a warning that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_results_and_gradients_stay_on_the_tables_device_without_being_told():
    table = shoal.HashTable(4, device="cuda", initializer="zeros", optimizer=shoal.Sgd(lr=1.0))
    out = HashEmbeddingBag(table)(torch.tensor([[1, 2]], device="cuda"))
    assert out.is_cuda
    out.sum().backward()
    assert table.lookup(torch.tensor([1], device="cuda")).tolist() == [[-1.0] * 4]
    rows = HashEmbedding(table)([[1, 2], [3]])  # lists are moved there
    assert rows.values.is_cuda
    assert not HashEmbeddingBag(table).cpu()(torch.tensor([[1, 2]])).is_cuda


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max", FirstN(2), MIXED], ids=str)
def test_a_collection_trains_as_on_the_cpu(combiner, padding, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("rows of all ids were asked for")

    monkeypatch.setattr("shoal.table.cuda.groups.fused.FusedGroup.rows", refuse)
    ours, theirs = make_tables(), make_tables("cpu")
    gpu, cpu = (EmbeddingBagCollection(tables, combiner=combiner, padding_idx=padding) for tables in (ours, theirs))
    for seed in range(4):
        bags = 300 if seed == 3 else 6
        outs = [module(make_batch(seed, bags, device=device)) for module, device in ((gpu, "cuda"), (cpu, "cpu"))]
        torch.testing.assert_close(outs[0].cpu(), outs[1])
        for out in outs:
            out.square().sum().backward()
    ids = torch.arange(-50, 50)
    for key in KEYS:
        torch.testing.assert_close(ours[key].lookup(ids.cuda()).cpu(), theirs[key].lookup(ids))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max", "firstn"])
def test_a_step_never_waits_for_the_device(combiner):
    tables = make_tables()
    length = 2 if combiner == "firstn" else None
    collection = EmbeddingBagCollection(tables, combiner=combiner, max_length=length, padding_idx=3)
    embedding = HashEmbedding(tables)
    rows = {key: torch.arange(8, device="cuda") for key in KEYS}
    weights = torch.rand(200).cuda().requires_grad_()
    batches = [make_batch(seed) for seed in range(6)]
    for table in tables.values():
        table.reserve(10_000)

    def step(batch):
        collection(batch).square().sum().backward()
        weighted = Keyed(batch.keys(), batch.values(), batch.lengths(), weights[: batch.values().shape[0]])
        collection(weighted).square().sum().backward()
        torch.cat(list(embedding(rows).values())).square().sum().backward()

    for batch in batches[:3]:
        step(batch)
    torch.cuda.synchronize()
    with no_waiting():
        for batch in batches[3:]:
            step(batch)


def test_a_huge_bag_beside_small_ones():
    ours, theirs = make_tables(), make_tables("cpu")
    gpu, cpu = (EmbeddingBagCollection(tables, combiner=MIXED) for tables in (ours, theirs))
    lengths = torch.tensor([20_000, 0, 3] * 3)
    values = torch.arange(60_009) % 977
    outs = [gpu(Keyed(list(KEYS), values.cuda(), lengths.cuda())), cpu(Keyed(list(KEYS), values, lengths))]
    torch.testing.assert_close(outs[0].cpu(), outs[1], rtol=1e-4, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    ids = torch.arange(977)
    for key in KEYS:
        torch.testing.assert_close(ours[key].lookup(ids.cuda()).cpu(), theirs[key].lookup(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sum", "mixed"])
def test_a_captured_step_follows_ids_steps_and_times(kind):
    rate = shoal.table.PolynomialDecay(1.0, 8, 0.0)
    # Of nearly equal rows, another may be the largest after different rounding.
    initializer = "zeros" if kind == "sum" else "uniform"
    options = {"optimizer": shoal.Sgd(lr=rate), "initializer": initializer, "expire_after": "30d"}
    tables, plain = make_tables(**options), make_tables("cpu", **options)
    ours, theirs = (EmbeddingBagCollection(own, combiner=COMBINERS[kind]) for own in (tables, plain))
    for table in tables.values():
        table.reserve(1000)
    batch = make_batch(0)
    values, grad = batch.values(), torch.ones(6, WIDTHS[kind], device="cuda")
    ids = Keyed(list(KEYS), values, batch.lengths())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            ours(ids).backward(grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours(ids).backward(grad)
    seen = [values.cpu(), values.cpu()]
    for number in range(3):
        values.copy_((torch.arange(values.shape[0]) + 7 * number) % 50)
        seen.append(values.cpu())
        ours.clock = lambda number=number: 1_700_000_000 + number
        ours.refresh_clock()
        graph.replay()
    torch.cuda.synchronize()
    ours(ids).backward(grad)  # continue without the graph
    seen.append(values.cpu())
    for own in seen:
        theirs(Keyed(list(KEYS), own, batch.lengths().cpu())).backward(grad.cpu())
    every = torch.arange(-50, 50)
    for key in KEYS:
        torch.testing.assert_close(tables[key].lookup(every.cuda()).cpu(), plain[key].lookup(every))
    assert [keeper.global_step for keeper in ours.keepers()] == [6, 6, 6]
    assert int(ours.state_dict()["tables.a.global_step"]) == 6
    assert tables["a"].max_update_time >= 1_700_000_000


def test_bad_offsets_on_the_device_are_told_of_by_a_later_call():
    table = shoal.HashTable(4, device="cuda")
    bag = HashEmbeddingBag(table).eval()
    ids = torch.arange(5, device="cuda")
    bag(ids, torch.tensor([0, 2, 5], device="cuda"))
    bag(ids, torch.tensor([0, 3, 2, 5], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(ConfigError, match="those of an earlier batch"):
        bag(ids, torch.tensor([0, 2, 5], device="cuda"))
    bag(ids, torch.tensor([0, 2, 5], device="cuda"))


def test_offsets_that_are_those_of_another_feature_are_told_of_once():
    tables = {key: shoal.HashTable(4, device="cuda") for key in ("a", "b")}
    collection = EmbeddingBagCollection(tables).eval()
    three, two = (torch.tensor(offsets, device="cuda") for offsets in ([0, 1, 3], [0, 1, 2]))
    good = {"a": (torch.arange(3, device="cuda"), three), "b": (torch.arange(2, device="cuda"), two)}
    collection(good)
    collection({"a": (good["a"][0], two), "b": (good["b"][0], three)})  # concatenated, they rise from 0 to 5
    torch.cuda.synchronize()
    with pytest.raises(ConfigError, match="those of an earlier batch"):
        collection(good)
    for _ in range(3):
        collection(good)
        torch.cuda.synchronize()


@pytest.mark.parametrize("features", [2, 70])
def test_offsets_alone_say_which_feature_an_id_is_of(features):
    keys = [f"f{number}" for number in range(features)]
    options = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros"}
    ours, theirs = ({key: shoal.HashTable(4, device=on, **options) for key in keys} for on in ("cuda", "cpu"))
    gpu, cpu = EmbeddingBagCollection(ours), EmbeddingBagCollection(theirs)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        lengths = torch.randint(0, 4, (features * 5,), generator=generator)
        values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
        outs = [
            gpu(Keyed(keys, values.cuda(), lengths.cuda())),
            cpu(Keyed(keys, values, lengths)),
        ]
        torch.testing.assert_close(outs[0].cpu(), outs[1])
        for out in outs:
            (out + 1).square().sum().backward()
    ids = torch.arange(9)
    for key in keys:
        torch.testing.assert_close(ours[key].lookup(ids.cuda()).cpu(), theirs[key].lookup(ids))


def test_tables_of_both_devices_stand_side_by_side():
    options = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros"}
    tables = {"gpu": shoal.HashTable(4, device="cuda", **options), "cpu": shoal.HashTable(4, **options)}
    collection = EmbeddingBagCollection(tables)
    for _ in range(2):
        out = collection({"gpu": [[1, 1], [2]], "cpu": [[1], [2]]})
        assert out.is_cuda
        out.sum().backward()
    assert tables["gpu"].lookup(torch.tensor([1, 2], device="cuda"))[:, 0].tolist() == [-4.0, -2.0]
    assert tables["cpu"].lookup(torch.tensor([1, 2]))[:, 0].tolist() == [-2.0, -2.0]


@pytest.mark.parametrize("kind", ["mean", "mixed"])
def test_a_compiled_collection_trains_as_the_eager_one(kind):
    torch.compiler.reset()
    first, second = make_tables(), make_tables()
    eager, module = (EmbeddingBagCollection(tables, combiner=COMBINERS[kind]) for tables in (first, second))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        ids = torch.randint(0, 30, (6, 3), generator=torch.Generator().manual_seed(seed)).cuda()
        outs = [run(dict.fromkeys(KEYS, ids)) for run in (eager, compiled)]
        torch.testing.assert_close(*outs)
        for out in outs:
            out.square().sum().backward()
    every = torch.arange(30, device="cuda")
    for key in KEYS:
        torch.testing.assert_close(first[key].lookup(every), second[key].lookup(every))
    torch.compiler.reset()


def test_steps_stamp_the_current_time():
    tables = make_tables(expire_after="30d")
    before = int(time.time())
    EmbeddingBagCollection(tables)(make_batch(0)).sum().backward()
    assert all(before <= table.max_update_time <= time.time() for table in tables.values())
