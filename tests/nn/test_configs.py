"""Tables described by TorchRec's fields, without TorchRec."""

import types

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shoal.ragged import Ragged
from shoal.sharded import AllToAllHashTable
from tests.nn.test_inputs import Keyed

T = torch.tensor
ITEM = {"num_embeddings": 100, "embedding_dim": 2, "name": "item", "feature_names": ["seen", "clicked"]}
USER = {"num_embeddings": 100, "embedding_dim": 3, "name": "user", "feature_names": ["user", "seen"], "pooling": "MEAN"}


def bags(**options):
    return EmbeddingBagCollection([ITEM, EmbeddingBagConfig(**USER)], optimizer=shoal.Sgd(lr=1.0), **options)


def batch(*keys, weights=None):
    return Keyed(list(keys), T([1, 2, 3, 4][: len(keys)]), torch.ones(len(keys), dtype=torch.int64), weights)


def test_results_are_named_and_ordered_by_table():
    made = bags()
    assert made.embedding_bag_configs()[0].feature_names == ["seen", "clicked"]
    assert made.embedding_bag_configs()[1].pooling == "MEAN"
    out = made(batch("user", "clicked", "other", "seen"))  # no table reads 'other'
    assert type(out) is torch.Tensor
    made.tables["item"].assign(T([4, 2]), T([[1.0, 2.0], [3.0, 4.0]]))
    made.tables["user"].assign(T([1, 4]), T([[5.0, 5, 5], [6.0, 6, 6]]))
    want = [[1, 2, 3, 4, 5, 5, 5, 6, 6, 6]]
    assert made(batch("user", "clicked", "other", "seen")).tolist() == want
    given = {"seen": T([[4]]), "user": T([[1]]), "clicked": T([[2]])}
    assert made(given).tolist() == want
    by_name = bags(output="dict")(given)
    assert {name: list(one.shape) for name, one in by_name.items()} == {
        "seen@item": [1, 2], "clicked": [1, 2], "user": [1, 3], "seen@user": [1, 3],
    }  # fmt: skip
    made(given).sum().backward()
    assert made.tables["item"].lookup(T([4])).tolist() == [[0.0, 1.0]]


def test_a_batch_without_a_feature_or_weights_is_refused():
    with pytest.raises(ConfigError, match=r"keys of all features; \['clicked'\].*\['user', 'seen'\]"):
        bags()(batch("user", "seen"))
    keys = ("user", "clicked", "seen")
    weighted = batch(*keys, weights=T([1.0, 2.0, 3.0]))
    assert torch.equal(bags()(weighted), bags()(batch(*keys)))  # weights are not used
    plain, heavy = bags(is_weighted=True), bags(is_weighted=True)
    heavy.load_state_dict(plain.state_dict())
    assert heavy.is_weighted()
    with pytest.raises(ConfigError, match="must have weights"):
        heavy(batch(*keys))


def test_mappings_objects_and_dataclasses_are_configurations():
    odd = types.SimpleNamespace(name="odd", embedding_dim=2)  # its feature is its name, pooled by sum
    made = EmbeddingBagCollection([odd])
    assert made({"odd": [[1, 2], []]}).shape == (2, 2)
    for bad, says in [
        ([{"nme": "x"}], "did you mean 'name'"), ([], "an empty list"), ([ITEM, ITEM], "'item' twice"),
        ([{**ITEM, "embedding_dim": 0}], "embedding_dim >= 1"), ([{**ITEM, "pooling": "MAX"}], "SUM or MEAN"),
        ([{**ITEM, "data_type": "INT8"}], "FP32, FP16, BF16"), ([{**ITEM, "feature_names": ["a", "a"]}], "distinct"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            EmbeddingBagCollection(bad)
    with pytest.raises(ConfigError, match="with configurations only"):
        EmbeddingBagCollection({"t": shoal.HashTable(2)}, optimizer="sgd")
    with pytest.raises(ConfigError, match="configurations must name"):
        EmbeddingBagCollection([ITEM], combiner="mean")


def test_tables_that_are_given_are_described():
    made = EmbeddingBagCollection({"a": shoal.HashTable(4), "b": shoal.HashTable(2)}, {"x": "a", "y": "b", "z": "b"},
                                  combiner={"x": "mean", "y": "sum", "z": "max"})  # fmt: skip
    first, second = made.embedding_bag_configs()
    assert (first.name, first.embedding_dim, first.feature_names, first.pooling) == ("a", 4, ["x"], "MEAN")
    assert (second.feature_names, second.pooling) == (["y", "z"], "NONE")


def test_tables_are_made_as_one_likes():
    made = []

    def make(dim, **options):
        made.append(options["name"])
        return AllToAllHashTable(dim, **options)

    model = EmbeddingBagCollection([ITEM], make_table=make, optimizer=shoal.Sgd(lr=1.0))
    assert made == ["item"]
    weight = torch.randn(7, 2)
    model.load_state_dict({"embedding_bags.item.weight": weight})
    assert torch.equal(model.tables["item"].lookup(torch.arange(7)), weight)
    with pytest.raises(RuntimeError, match=r"must be \[n, 2\]"):
        model.load_state_dict({"embedding_bags.item.weight": weight.view(2, 7)})
    weight[6, 1] = float("nan")
    with pytest.raises(RuntimeError, match="table 'item': a value holds NaN or infinity; nothing was written"):
        model.load_state_dict({"embedding_bags.item.weight": weight})
    assert model.tables["item"].table.size() == 7


def test_sequences_by_table():
    made = EmbeddingCollection([{k: v for k, v in USER.items() if k != "pooling"}, EmbeddingConfig(**ITEM)])
    assert made.embedding_names_by_table() == [["user", "seen@user"], ["seen@item", "clicked"]]
    out = made({"seen": [[1, 2], [3]], "user": T([[1], [2]]), "clicked": [[], [4]]})
    assert isinstance(out["seen@item"], Ragged)
    assert {name: list((one.values if isinstance(one, Ragged) else one).shape) for name, one in out.items()} == {
        "user": [2, 1, 3], "seen@user": [3, 3], "seen@item": [3, 2], "clicked": [1, 2],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="must have the same dim"):
        made.embedding_dim()
    given = EmbeddingCollection({"t": shoal.HashTable(4)}, {"x": "t", "y": "t"})
    assert given.embedding_dim() == 4
    assert [one.feature_names for one in given.embedding_configs()] == [["x", "y"]]
    assert list(given({"y": T([[5]])})) == ["y"]  # some of the features suffice
    with pytest.raises(ConfigError, match="no feature 'z'"):
        given({"z": T([[5]])})
