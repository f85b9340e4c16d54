"""`sharding_sparse_fids`: offsets of every version, dict and wire input, errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.fid import make_v1, make_v2
from shoal.ops import FeatureConfig, FeatureConfigs, Ragged, sharding_sparse_fids
from shoal.proto import example_pb2 as pb
from shoal.proto.instance_pb2 import Instance


def config(**features):
    return FeatureConfigs({name: FeatureConfig(table, 0, dims) for name, (table, dims) in features.items()}, {})


WORKED = config(user=("u", [1, 2]), price=("p", [1, 2, 3]), shop=("p", [1, 2, 3]))
IDS = {"user": [[10], [11], [10]], "price": [[4, 7], [7], []], "shop": [[4], [], [8, 4, 8]]}


def pairs(offset):
    return [(x >> 32, x & 0xFFFFFFFF) for x in offset.tolist()]


def same(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, dict):
            assert list(x) == list(y)
            x, y = list(x.values()), list(y.values())
            assert all(torch.equal(i, j) for i, j in zip(x, y, strict=True))
        else:
            assert torch.equal(x, y)


def test_worked_example():
    got = sharding_sparse_fids(IDS, 2, WORKED, True, "example")
    assert {k: v.tolist() for k, v in got.shards.items()} == {"p:0": [4, 4, 8], "p:1": [7], "u:0": [10], "u:1": [11]}
    assert got.shards_row_split["p:0"].tolist() == [0, 1, 3]
    assert got.shards_row_split["p:1"].tolist() == [0, 1, 1]
    assert got.shards_row_split_size["p:1"].tolist() == [3]
    assert got.feature_offset.tolist() == [0, 2, 3, 3, 4, 4, 7, 8, 9, 10]
    assert got.nfl_offset.tolist() == [0, 3, 6, 10]
    assert got.emb_size.tolist() == [18, 6, 3, 3]
    assert pairs(got.fid_offset) == [(0, 0), (1, 0), (1, 0), (0, 6), (0, 12), (0, 6), (0, 12), (2, 0), (3, 0), (2, 0)]
    assert [t.tolist() for t in (got.batch_size, got.nfl_size, got.feature_size, got.fid_size)] == [
        [3],
        [4],
        [10],
        [10],
    ]
    assert got._fields == (
        "shards", "fid_offset", "feature_offset", "nfl_offset", "batch_size", "nfl_size", "feature_size", "fid_size",
        "emb_size", "shards_row_split", "shards_row_split_size",
    )  # fmt: skip


def test_one_table_for_all_features():
    native = config(user=("n", [1, 2]), price=("n", [1, 2, 3]), shop=("n", [1, 2, 3]))
    got = sharding_sparse_fids(IDS, 2, native, lambda: True, "example")
    assert [v.tolist() for v in got.shards.values()] == [[4, 4, 8, 10], [7, 11]]
    assert [v.tolist() for v in got.shards_row_split.values()] == [[0, 1, 3, 4], [0, 1, 1, 2]]
    assert got.emb_size.tolist() == [21, 9]
    assert pairs(got.fid_offset)[-3:] == [(0, 18), (1, 6), (0, 18)]


LAYOUT = config(a=("t0", [1, 2]), b=("t0", [1, 2]), c=("t1", [2]))
LAYOUT_IDS = {"a": [[4, 7], [4]], "b": torch.tensor([9, 6]), "c": [[11], [12, 13, 15]]}


@pytest.mark.parametrize(
    ("version", "want"),
    [
        (1, [(0, 0), (1, 0), (0, 0), (1, 1), (0, 1), (3, 0), (2, 0), (3, 1), (3, 2)]),
        (2, [(0, 0), (2, 0), (0, 0), (3, 0), (1, 0), (5, 0), (4, 0), (5, 1), (5, 2)]),
        (3, [(0, 0), (1, 0), (0, 0), (1, 3), (0, 3), (3, 0), (2, 0), (3, 2), (3, 4)]),
        (5, [(0, 0), (1, 0), (0, 0), (1, 3), (0, 3), (3, 0), (2, 0), (3, 2), (3, 4)]),
    ],
)
def test_offsets_of_each_version(version, want):
    got = sharding_sparse_fids(LAYOUT_IDS, 2, LAYOUT, True, "example_batch", version=version)
    assert pairs(got.fid_offset) == want
    assert [v.tolist() for v in got.shards.values()] == [[4, 6], [7, 9], [12], [11, 13, 15]]
    assert got.nfl_offset.tolist() == [0, 2147483650, 3, 6]
    assert got.feature_offset.tolist() == [0, 2, 3, 5, 6, 9]


def test_without_unique_every_occurrence_is_listed():
    got = sharding_sparse_fids(IDS, 2, WORKED, False, "example")
    assert got.shards["p:0"].tolist() == [4, 4, 8, 4, 8]
    assert got.shards["u:0"].tolist() == [10, 10]


def test_names_without_a_configuration_may_hold_anything_but_tell_the_batch_size_where_nothing_else_does():
    want = sharding_sparse_fids(IDS, 2, WORKED, True, "example")
    more = {"label": torch.tensor([1.0, 0.0, 1.0]), "weights": [[0.5]] * 4, **IDS, "text": ["a", "b"]}
    same(sharding_sparse_fids(more, 2, WORKED, True, "example"), want)
    only = sharding_sparse_fids({"label": [[1], [2], []]}, 2, WORKED, True, "example")
    assert only.batch_size.tolist() == [3]
    assert only.fid_offset.numel() == 0
    shared = sharding_sparse_fids({"user": torch.tensor([5]), "x": [[1], []]}, 1, WORKED, True, "example_batch")
    assert shared.batch_size.tolist() == [2]


def test_absent_features_are_shared_in_a_column_major_batch_only():
    only = {"user": IDS["user"]}
    rows = sharding_sparse_fids(only, 0, WORKED, True, "example")
    assert rows.nfl_offset.tolist() == [0, 3, 6, 10]
    columns = sharding_sparse_fids(only, 0, WORKED, True, "examplebatch")
    assert columns.nfl_offset.tolist() == [2**31, 2**31 + 1, 2, 6]
    assert columns.feature_offset.tolist() == [0, 0, 0, 1, 2, 3]
    assert list(columns.shards) == ["p:0", "u:0"]


def fid_list(ids, v1=False):
    ids = [i % 2**64 for i in ids]
    return pb.Feature(fid_v1_list=pb.FidList(value=ids)) if v1 else pb.Feature(fid_v2_list=pb.FidList(value=ids))


def examples(ids, batch):
    named = [[pb.NamedFeature(name=n, feature=fid_list(r[b])) for n, r in ids.items()] for b in range(batch)]
    return [pb.Example(named_feature=n) for n in named]


def test_serialized_examples_are_read_like_the_dict():
    want = sharding_sparse_fids(IDS, 2, WORKED, True, "example")
    messages = examples(IDS | {"ignored": [[-5]] * 3}, 3)
    same(sharding_sparse_fids(messages, 2, WORKED, True, "example"), want)
    same(sharding_sparse_fids([m.SerializeToString() for m in messages], 2, WORKED, True, "example"), want)


def test_a_serialized_batch_is_read_like_the_dict():
    shared = pb.FeatureListType.SHARED
    lists = [
        pb.NamedFeatureList(name="a", feature=[fid_list(r) for r in LAYOUT_IDS["a"]]),
        pb.NamedFeatureList(name="b", feature=[fid_list(LAYOUT_IDS["b"].tolist())], type=shared),
        pb.NamedFeatureList(name="c", feature=[fid_list(r) for r in LAYOUT_IDS["c"]], id=4),
        pb.NamedFeatureList(name="unknown", feature=[fid_list([1]), fid_list([2])]),
    ]
    message = pb.ExampleBatch(named_feature_list=lists, batch_size=2)
    want = sharding_sparse_fids(LAYOUT_IDS, 2, LAYOUT, True, "example_batch")
    same(sharding_sparse_fids(message, 2, LAYOUT, True, "example_batch"), want)
    same(sharding_sparse_fids(message.SerializeToString(), 2, LAYOUT, True, "examplebatch"), want)
    message.named_feature_list[3].feature.append(fid_list([3]))  # not in the configuration, so it may have any content
    same(sharding_sparse_fids(message, 2, LAYOUT, True, "example_batch"), want)
    message.named_feature_list[3].type = shared
    same(sharding_sparse_fids(message, 2, LAYOUT, True, "example_batch"), want)
    message.ClearField("batch_size")
    message.named_feature_list.insert(0, pb.NamedFeatureList(name="first", feature=[fid_list([1])] * 5))
    same(sharding_sparse_fids(message, 2, LAYOUT, True, "example_batch"), want)
    message.batch_size = 3
    with pytest.raises(ValueError, match="batch of 3"):
        sharding_sparse_fids(message, 2, LAYOUT, True, "example_batch")


def test_version_1_ids_are_converted():
    feature = pb.Example(
        named_feature=[pb.NamedFeature(name="user", feature=fid_list([make_v1(600, 2**50 + 3)], v1=True))]
    )
    got = sharding_sparse_fids([feature], 1, WORKED, True, "example")
    assert got.shards["u:0"].tolist() == [make_v2(600, 3)]


def test_instances_route_version_1_ids_by_slot():
    features = config(slot_5=("t", [1]), fc_slot_600=("t", [1]), named=("t", [1]))
    instance = Instance(fid=[make_v1(5, 7), make_v1(600, 8) % 2**64, make_v1(6, 9)])
    named = instance.feature.add(name="named", fid=[3])
    named.fid_list.add(value=[4, 5])
    named.fid_list.add(value=[6])
    got = sharding_sparse_fids([instance, Instance().SerializeToString()], 1, features, True, "instance")
    assert got.shards["t:0"].tolist() == [make_v2(600, 8), 3, 4, 5, 6, make_v2(5, 7)]
    assert got.nfl_offset.tolist() == [0, 2, 4, 7]


@pytest.mark.parametrize("unpacked", [b"\x09" + (7).to_bytes(8, "little"), b"\x0a\x08" + (7).to_bytes(8, "little")])
def test_ids_are_read_packed_or_not(unpacked):
    feature = b"\x12" + bytes([len(unpacked)]) + unpacked
    named = b"\x0a\x04user\x12" + bytes([len(feature)]) + feature
    got = sharding_sparse_fids([b"\x0a" + bytes([len(named)]) + named], 1, WORKED, True, "example")
    assert got.shards["u:0"].tolist() == [7]


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ({"user": [[-1]]}, "example", "-1"),
        ({"user": [[1]], "shop": [[1], [2]]}, "example", "2 samples"),
        ({"user": torch.tensor([1])}, "example", "1-D tensor"),
        ({"user": torch.tensor([1])}, "example_batch", "batch size"),
        ({"user": [1, 2]}, "example", r"'user' must be a Ragged or a list of id lists, got \[1, 2\]"),
        ({"user": [["a"]]}, "example", "'user' must be a Ragged or a list of id lists"),
        ({"user": None}, "example", "'user' must be a Ragged or a list of id lists, got None"),
        ({"user": [[1]]}, "csv", "input_type"),
        (b"", "example", "list of messages"),
        ([5], "example", "int"),
        ([b"\x0a\x05ab"], "example", "cut off"),
        ([b"\x0a\x80"], "example", "cut off"),
        ([b"\x0b"], "instance", "wire type"),
        ([b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"], "example", "more than 64 bits"),
        (b"\x0a\xff\x01", "example_batch", "cut off"),
    ],
    ids=str,
)
def test_bad_batches_are_refused(batch, kind, message):
    with pytest.raises(ValueError, match=message):
        sharding_sparse_fids(batch, 2, WORKED, True, kind)


def test_a_list_of_too_many_floats_is_refused():
    with pytest.raises(ValueError, match=r"2\^31"):
        sharding_sparse_fids({"a": [[1, 2]]}, 1, config(a=("t", [2**30])), True, "example")
    with pytest.raises(ValueError, match="ps_num"):
        sharding_sparse_fids({}, -1, WORKED, True, "example")


def test_an_empty_batch():
    for batch in ({}, []):
        got = sharding_sparse_fids(batch, 2, WORKED, True, "example")
        assert got.batch_size.tolist() == [0]
        assert got.nfl_offset.tolist() == [0, 0, 0, 1]
        assert got.fid_offset.numel() == 0


@given(st.binary(max_size=60))
def test_garbage_never_crashes(data):
    for batch, kind in (([data], "example"), ([data], "instance"), (data, "example_batch")):
        try:
            got = sharding_sparse_fids(batch, 3, WORKED, True, kind)
        except ValueError:
            continue
        assert got.fid_offset.numel() == got.fid_size.item()


@given(st.data())
def test_every_id_is_found_where_its_offset_says(data):
    batch, shards = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 6), max_size=5)
    ids = {n: data.draw(st.lists(row, min_size=batch, max_size=batch)) for n in ("user", "price", "shop")}
    unique = data.draw(st.booleans())
    got = sharding_sparse_fids(
        {n: Ragged.from_lists(r) for n, r in ids.items()}, shards, WORKED, unique, "example", version=1
    )
    lists = list(got.shards.values())
    flat = [i for n in sorted(ids) for r in ids[n] for i in r]
    assert [lists[a][b].item() for a, b in pairs(got.fid_offset)] == flat
    for name, ids_of in got.shards.items():
        assert all(i % shards == int(name.rpartition(":")[2]) for i in ids_of.tolist())
    if not unique:
        assert sum(t.numel() for t in lists) == len(flat)


def test_large_batches_are_the_same_for_any_thread_count(same_for_any_thread_count):
    torch.manual_seed(0)
    ids = {
        n: Ragged.from_row_lengths(torch.randint(0, 40_000, (60_000,)), [6] * 10_000) for n in ("user", "price", "shop")
    }
    got = same_for_any_thread_count(lambda: sharding_sparse_fids(ids, 3, WORKED, True, "example"))
    assert got.fid_size.item() == 180_000
