"""Tensors that the library creates internally are on the CPU, whatever torch's default device is."""

import ast
from pathlib import Path

import pytest
import torch

import shoal
from shoal.sharded.placement.local import LocalServers
from tests.sharded.helpers import config, multi_type, native

SOURCES = Path(shoal.__file__).parent
MAKERS = [
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "eye",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_strided",
]


def silent_about_device(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS):
            continue
        if ast.unparse(node.func.value) == "torch" and not any(k.arg in ("device", None) for k in node.keywords):
            yield f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}"


def test_every_tensor_says_where_it_is():
    """``device=None`` is an answer, too: the default device, where models are made, as all of torch's are."""
    files = [path for path in SOURCES.rglob("*.py") if path.parent.name != "models"]
    assert len(files) > 200
    assert [call for path in files for call in silent_about_device(path)] == []


@pytest.fixture
def elsewhere():
    """What lands on the default device holds no numbers, as it would be out of native code's reach on a GPU."""
    with torch.device("meta"):
        yield


def on_cpu(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="cpu")


def test_ragged_splits_follow_their_values(elsewhere):
    ragged = shoal.Ragged.from_row_lengths(on_cpu(5, 6, 7), [2, 0, 1])
    assert ragged.row_splits.tolist() == [0, 2, 2, 3]
    assert shoal.Ragged(ragged, [0, 1, 3]).row_splits.tolist() == [0, 1, 3]


def test_modules_take_lists_and_tensors(elsewhere):
    from shoal.nn import HashEmbeddingBag, SparseOptimizer

    table = shoal.HashTable(2, optimizer="sgd", lr=0.5, initializer="zeros")
    table.assign([1, 2], torch.ones(2, 2, device="cpu"))
    with torch.device("cpu"):
        bag = HashEmbeddingBag(table)
    assert bag([[1, 2], []]).tolist() == [[2.0, 2.0], [0.0, 0.0]]
    out = bag(on_cpu(1, 2, 2), on_cpu(0, 1, 3))
    assert out.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    optimizer = SparseOptimizer(bag)
    out.backward(torch.ones(2, 2, device="cpu"))
    optimizer.step()
    assert table.lookup(on_cpu(1, 2)).tolist() == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize("table_of", [multi_type, native])
def test_synchronous_tables(elsewhere, table_of):
    from shoal.sharded import DistributedMultiTypeHashTableMpi

    table = DistributedMultiTypeHashTableMpi(1, lambda rank: table_of(rank, {"a": config(1), "b": config(2)}))
    ids = {"a": on_cpu(4, 4, 9), "b": on_cpu()}
    bundle = table.lookup(ids, {}, table.reorder(ids))[1]
    gradients = {"a": on_cpu(1, 2, 3, dtype=torch.float32).view(3, 1), "b": torch.empty(0, 2, device="cpu")}
    table.apply_gradients(gradients, bundle, 1, req_time=7)
    assert table.lookup(ids, {}, table.reorder(ids))[0]["a"].tolist() == [[-3.0], [-3.0], [-3.0]]


def test_parameter_servers(elsewhere, forked_servers):
    from shoal.sharded import PsClient, ps_table

    with LocalServers(2) as servers, PsClient(servers.addresses) as client:
        table = ps_table(client, 2, name="t", optimizer="sgd", lr=1.0, initializer="zeros")
        table.apply_gradients([7, 8, 7], torch.ones(3, 2, device="cpu"))
        assert table.lookup(on_cpu(7, 8, 9)).tolist() == [[-2.0, -2.0], [-1.0, -1.0], [0.0, 0.0]]
        assert table.contains(on_cpu(7, 1)).tolist() == [True, False]


@pytest.mark.parametrize("shuffle_rows", [0, 16])
def test_files_are_read(elsewhere, tmp_path, shuffle_rows):
    from shoal.data import CRITEO, CriteoLike, Stream, make_format, write_criteo

    path = tmp_path / "clicks.tsv"
    write_criteo(path, CriteoLike(rows=64))
    stream = Stream([str(path)], make_format("criteo", CRITEO), CRITEO, batch_size=10, shuffle_rows=shuffle_rows)
    labels = [label for batch in stream for label in batch.samples.label.tolist()]
    assert sorted(labels) == sorted(float(line.split("\t")[0]) for line in path.read_text().splitlines())


def test_updates_are_packed_and_clipped(elsewhere):
    from shoal.gather import clip_factors, pack12, unpack12

    assert unpack12(pack12(on_cpu(1, 4095, 256, 7)), 4).tolist() == [1, 4095, 256, 7]
    assert clip_factors([5.0, 3.0, 10.0])[1].tolist() == [1.0, 1.0, 0.5]
