"""The ops under the modules: `opcheck`, and graphs that compile without a break."""

import pytest
import torch
from torch import nn

import shoal
from shoal.nn import EmbeddingBagCollection, FirstN, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.nn.keeper import keeper_of
from shoal.nn.read.ops import _read_op
from shoal.nn.read.plan import Feature, make_plan
from shoal.table.protocol import MAX, SUM

IDS, OFFSETS = torch.tensor([1, 2, 1, 3]), torch.tensor([0, 2, 2, 4])


def make_table(**options):
    options.setdefault("initializer", "uniform")
    return shoal.HashTable(4, optimizer=shoal.Sgd(lr=0.1), seed=1, **options)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_opcheck():
    tables = [make_table(), shoal.HashTable(3, optimizer=shoal.Sgd(lr=0.1))]  # two groups
    for table in tables:
        keeper_of(table).hold()
    for kind in (SUM, MAX, -1):
        plan = make_plan(tables, [Feature(0, kind), Feature(1, kind)])
        pooled, weights = ([], []) if kind < 0 else ([OFFSETS, OFFSETS], [torch.rand(4), torch.rand(4)])
        ids = [IDS, IDS]
        torch.library.opcheck(_read_op, (ids, pooled, weights, plan.anchor, plan.tape, plan.handle, [4, 4], 3, True))


class Model(nn.Module):
    """Uses one table twice on the same ids, so that a compiler would like to merge the two."""

    def __init__(self, table, **options):
        super().__init__()
        self.rows = HashEmbedding(table)
        self.bag = HashEmbeddingBag(table, **options)
        self.top = nn.Linear(4, 1)

    def forward(self, ids, offsets):
        pooled = self.bag(ids, offsets) + self.bag(ids, offsets)
        return self.top(torch.relu(pooled)).sum() + self.rows(ids).pow(2).sum()


# Traces, differentiates and partitions (which merges equal nodes) like inductor, but compiles no C++.
BACKEND = "aot_eager_decomp_partition"


@pytest.mark.parametrize(
    ("held", "backend"),
    [
        (False, BACKEND),
        (True, BACKEND),
        pytest.param(True, "inductor", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_compiled_model_trains_as_the_eager_one(held, backend):
    torch.manual_seed(0)
    tables = [make_table(), make_table()]
    models = [Model(table, combiner="mean") for table in tables]
    models[1].top.load_state_dict(models[0].top.state_dict())
    optimizers = [SparseOptimizer(model) for model in models] if held else []
    runs = [models[0], torch.compile(models[1], fullgraph=True, backend=backend)]
    for n in (4, 4, 6, 9):  # the second size compiles with dynamic shapes
        ids, offsets = torch.arange(n) % 5, torch.tensor([0, 2, 2, n])
        losses = [run(ids, offsets) for run in runs]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(*[table.lookup(torch.arange(9)) for table in tables])
    assert len(tables[1]) == 5


def test_a_compiled_model_has_no_graph_breaks_in_other_forms():
    table = make_table()
    bag = HashEmbeddingBag(table, combiner="firstn", max_length=3, padding_idx=0)
    embedding = HashEmbedding(table, padding_idx=0)
    ids = torch.tensor([[1, 0, 2], [0, 0, 3]])
    weights = torch.rand(2, 3, requires_grad=True)
    compiled = torch.compile(lambda i, w: (bag(i, None, w), embedding(i)), fullgraph=True, backend=BACKEND)
    for out, expected in zip(compiled(ids, weights.detach()), (bag(ids, None, weights), embedding(ids)), strict=True):
        torch.testing.assert_close(out, expected)
    nested = torch.nested.nested_tensor_from_jagged(IDS, OFFSETS)
    compiled = torch.compile(HashEmbeddingBag(table), fullgraph=True, backend=BACKEND)
    torch.testing.assert_close(compiled(nested), HashEmbeddingBag(table)(nested))


def test_weights_get_their_gradient_through_a_compiled_graph():
    grads = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend=BACKEND)):
        table = make_table()
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        wrap(HashEmbeddingBag(table))(IDS, OFFSETS, weights).pow(2).sum().backward()
        grads.append((weights.grad, table.lookup(IDS)))
    torch.testing.assert_close(*grads)


def test_evaluation_compiles_apart_and_creates_nothing():
    table = make_table()
    bag = HashEmbeddingBag(table).eval()
    compiled = torch.compile(bag, fullgraph=True, backend=BACKEND)
    with torch.no_grad():
        assert not compiled(IDS, OFFSETS).any()
    assert len(table) == 0
    bag.train()
    out = compiled(IDS, OFFSETS)
    assert out.any()
    assert len(table) == 0
    out.sum().backward()
    assert len(table) == 3


def collect(combiner, **options):
    tables = {"u": make_table(), "i": make_table(), "w": shoal.HashTable(3, seed=2, optimizer=shoal.Adagrad(lr=0.1))}
    features = {"a": "u", "b": "i", "c": "w", "d": "i"}
    return tables, EmbeddingBagCollection(tables, features, combiner=combiner, **options)


MIXED = {"a": "mean", "b": "max", "c": FirstN(2), "d": "sum"}


@pytest.mark.parametrize("output", ["concat", "dict"])
@pytest.mark.parametrize("combiner", ["sum", MIXED, "max"], ids=["sum", "mixed", "max"])
def test_a_compiled_collection_trains_as_the_eager_one(combiner, output):
    (tables, eager), (others, module) = collect(combiner, output=output), collect(combiner, output=output)
    compiled = torch.compile(module, fullgraph=True, backend=BACKEND)
    for n in (4, 4, 6, 9):
        ids, offsets = torch.arange(n) % 5, torch.tensor([0, 2, 2, n])
        batch = {"a": (ids, offsets), "b": ids[:3].view(3, 1), "c": (ids + 1, offsets), "d": (ids.flip(0), offsets)}
        outs = [run(batch) for run in (eager, compiled)]
        for out in outs:
            parts = [part.flatten(1) for part in out.values()] if output == "dict" else [out]
            torch.cat(parts, 1).square().sum().backward()
        torch.testing.assert_close(*outs)
        for name, table in tables.items():
            torch.testing.assert_close(table.lookup(torch.arange(9)), others[name].lookup(torch.arange(9)))


def test_a_compiled_collection_takes_some_of_its_features():
    _, module = collect("mean", output="dict")
    compiled = torch.compile(module, fullgraph=True, backend=BACKEND)
    for batch in ({"c": (IDS, OFFSETS), "a": (IDS, OFFSETS)}, {"b": (IDS, OFFSETS)}):
        outs = [run(batch) for run in (compiled, module)]
        assert list(outs[0]) == list(batch)
        torch.testing.assert_close(*outs)


def test_ids_by_key_compile_over_one_table():
    table = make_table()
    bag = HashEmbeddingBag(table)
    compiled = torch.compile(bag, fullgraph=True, backend=BACKEND)
    batch = {"a": (IDS, OFFSETS), "b": (IDS + 1, OFFSETS)}
    torch.testing.assert_close(compiled(batch), bag(batch))


def test_reads_around_an_update_are_not_merged():
    table = make_table()
    bag = HashEmbeddingBag(table)

    @torch.compile(fullgraph=True, backend=BACKEND)
    def read(ids, offsets):
        return bag(ids, offsets)

    first = read(IDS, OFFSETS)
    first.sum().backward()
    second = read(IDS, OFFSETS)
    torch.testing.assert_close(second, bag(IDS, OFFSETS))
    assert not torch.equal(first, second)
