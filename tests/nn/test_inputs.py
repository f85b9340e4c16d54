"""The kinds of ids that modules accept and refuse. Plain values only."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shoal
from shoal import Ragged
from shoal.errors import ConfigError
from shoal.nn import HashEmbedding, HashEmbeddingBag

LISTS = [[7, 8], [], [9, 7, 7]]
VALUES = torch.tensor([7, 8, 9, 7, 7])
OFFSETS = torch.tensor([0, 2, 2, 5])
ROWS = {7: [1.0, 10.0], 8: [2.0, 20.0], 9: [3.0, 30.0]}


class Jagged:
    """Shaped like a JaggedTensor."""

    def __init__(self, values, lengths, weights=None):
        self._values, self._lengths, self._weights = values, lengths, weights

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])

    def weights_or_none(self):
        return self._weights

    def weights(self):
        assert self._weights is not None
        return self._weights


class Keyed(Jagged):
    """Shaped like a KeyedJaggedTensor."""

    def __init__(self, keys, values, lengths, weights=None):
        super().__init__(values, lengths, weights)
        self._keys = keys

    def keys(self):
        return self._keys


def make_table(dim=2, **options):
    table = shoal.HashTable(dim, optimizer=shoal.Sgd(lr=1.0), initializer="zeros", **options)
    return table.assign(torch.tensor(list(ROWS)), torch.tensor(list(ROWS.values())))


FORMS = {
    "pair": lambda: (VALUES, OFFSETS),
    "int32 pair": lambda: (VALUES.int(), OFFSETS.int()),
    "lists": lambda: LISTS,
    "lists of tensors": lambda: [torch.tensor(row, dtype=torch.int64) for row in LISTS],
    "ragged": lambda: Ragged(VALUES, OFFSETS),
    "nested": lambda: torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS),
    "JaggedTensor": lambda: Jagged(VALUES, OFFSETS.diff()),
    "attributes": lambda: SimpleNamespace(values=VALUES, offsets=OFFSETS),
    "lengths alone": lambda: SimpleNamespace(values=VALUES, lengths=OFFSETS.diff()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combiner", ["sum", "mean", "firstn"])
def test_a_bag_takes_every_form_of_ragged_ids(form, combiner):
    bag = HashEmbeddingBag(make_table(), combiner=combiner, max_length=2 if combiner == "firstn" else None)
    expected = {
        "sum": [[3.0, 30.0], [0.0, 0.0], [5.0, 50.0]],
        "mean": [[1.5, 15.0], [0.0, 0.0], [5 / 3, 50 / 3]],
        "firstn": [[[1.0, 10.0], [2.0, 20.0]], [[0.0, 0.0], [0.0, 0.0]], [[3.0, 30.0], [1.0, 10.0]]],
    }[combiner]
    torch.testing.assert_close(bag(FORMS[form]()).detach(), torch.tensor(expected))


@pytest.mark.parametrize("form", FORMS)
def test_an_embedding_keeps_the_form_of_ragged_ids(form):
    ids = FORMS[form]()
    out = HashEmbedding(make_table())(ids)
    if form == "nested":
        assert out.is_nested
        torch.testing.assert_close(out.offsets(), OFFSETS)
        values = out.values()
    else:
        assert isinstance(out, Ragged)
        assert out.row_splits.tolist() == OFFSETS.tolist()
        values = out.values
    assert values.tolist() == [ROWS[i] for i in VALUES.tolist()]


def test_offsets_may_come_apart_and_without_their_end():
    table = make_table()
    both = HashEmbeddingBag(table)(VALUES, OFFSETS)
    torch_style = HashEmbeddingBag(table, include_last_offset=False)(VALUES, OFFSETS[:-1])
    assert both.tolist() == torch_style.tolist() == HashEmbeddingBag(table)(LISTS).tolist()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 0), (0,), (1, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_dense_ids_keep_their_shape(shape, dtype):
    ids = torch.full(shape, 7, dtype=dtype)
    out = HashEmbedding(make_table())(ids)
    assert out.shape == (*shape, 2)
    assert bool((out == torch.tensor(ROWS[7])).all())


def test_dense_ids_with_two_dimensions_are_bags_of_equal_length():
    bag = HashEmbeddingBag(make_table())
    assert bag(torch.tensor([[7, 8], [9, 9]])).tolist() == [[3.0, 30.0], [6.0, 60.0]]
    assert bag(np.array([[7, 8], [9, 9]])).tolist() == [[3.0, 30.0], [6.0, 60.0]]
    assert bag(torch.empty(3, 0, dtype=torch.int64)).tolist() == [[0.0, 0.0]] * 3
    assert bag(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 2)


@pytest.mark.parametrize("ids", [[], [[]], [[], []]], ids=str)
def test_no_ids_at_all_are_fine(ids):
    table = make_table()
    out = HashEmbeddingBag(table)(ids)
    out.sum().backward()
    assert out.tolist() == [[0.0, 0.0]] * len(ids)
    assert len(table) == 3


def test_non_contiguous_ids_are_read_right():
    grid = torch.tensor([[7, 1], [8, 1], [9, 1]])
    out = HashEmbedding(make_table(), insert_missing=False)(grid[:, 0])
    assert out.tolist() == [ROWS[7], ROWS[8], ROWS[9]]
    out = HashEmbeddingBag(make_table(), insert_missing=False)(grid.t())
    assert out.tolist() == [[6.0, 60.0], [0.0, 0.0]]


def keyed_forms():
    values, lengths = torch.tensor([7, 8, 9, 9, 7]), torch.tensor([2, 0, 1, 2])  # u: [7, 8], []; i: [9], [9, 7]
    return {
        "KeyedJaggedTensor": Keyed(["u", "i"], values, lengths),
        "mapping": {"u": [[7, 8], []], "i": (torch.tensor([9, 9, 7]), torch.tensor([0, 1, 3]))},
        "attributes": SimpleNamespace(keys=["u", "i"], values=values, lengths=lengths),
    }


@pytest.mark.parametrize("form", ["KeyedJaggedTensor", "mapping", "attributes"])
@pytest.mark.parametrize("per_key", [False, True])
def test_ids_by_key_come_out_side_by_side_or_by_key(form, per_key):
    table = {"u": make_table(), "i": make_table()} if per_key else make_table()
    ids = keyed_forms()[form]
    assert HashEmbeddingBag(table)(ids).tolist() == [[3.0, 30.0, 3.0, 30.0], [0.0, 0.0, 4.0, 40.0]]
    by_key = HashEmbeddingBag(table, output="dict")(ids)
    assert list(by_key) == ["u", "i"]
    assert by_key["i"].tolist() == [[3.0, 30.0], [4.0, 40.0]]
    firstn = HashEmbeddingBag(table, combiner="firstn", max_length=1)(ids)
    assert firstn.tolist() == [[[1.0, 10.0, 3.0, 30.0]], [[0.0, 0.0, 3.0, 30.0]]]
    rows = HashEmbedding(table)(ids)
    assert rows["u"].to_list() == [[ROWS[7], ROWS[8]], []]
    assert rows["i"].to_list() == [[ROWS[9]], [ROWS[9], ROWS[7]]]


def test_tables_of_different_width_stand_side_by_side():
    tables = {"u": make_table(), "i": shoal.HashTable(3, initializer="zeros")}
    out = HashEmbeddingBag(tables)({"u": [[7]], "i": [[1]]})
    assert out.tolist() == [[1.0, 10.0, 0.0, 0.0, 0.0]]


def test_columns_follow_the_tables_whatever_the_order_of_the_batch():
    tables = {"u": make_table(), "i": shoal.HashTable(1, initializer="zeros")}
    bag = HashEmbeddingBag(tables)
    one, other = {"u": [[7], [8]], "i": [[1], []]}, {"i": [[1], []], "u": [[7], [8]]}
    assert bag(one).tolist() == bag(other).tolist() == [[1.0, 10.0, 0.0], [2.0, 20.0, 0.0]]
    assert list(HashEmbeddingBag(tables, output="dict")(other)) == ["i", "u"]


def test_a_batch_that_lacks_a_key_is_refused_side_by_side_and_taken_by_key():
    tables = {"u": make_table(), "i": make_table(), "c": make_table()}
    with pytest.raises(ConfigError, match=r"has no \['i', 'c'\]"):
        HashEmbeddingBag(tables)({"u": [[7]]})
    with pytest.raises(ConfigError, match="the batch has no"):
        HashEmbeddingBag(tables)({})
    with pytest.raises(ConfigError, match="no feature 'x'"):
        HashEmbeddingBag(tables, output="dict")({"u": [[7]], "x": [[7]]})
    assert HashEmbeddingBag(tables, output="dict")({"i": [[9]]})["i"].tolist() == [ROWS[9]]
    assert HashEmbeddingBag(tables, output="dict")({}) == {}


def test_keys_that_are_numbers_find_their_tables():
    bag = HashEmbeddingBag({1: make_table(), 2: make_table()})
    assert bag({1: [[7]], 2: [[8]]}).tolist() == [[*ROWS[7], *ROWS[8]]]
    assert HashEmbedding({1: make_table()})({1: torch.tensor([9])})[1].tolist() == [ROWS[9]]


def test_weights_of_a_key_without_ids_are_refused():
    with pytest.raises(ConfigError, match="'uu'"):
        HashEmbeddingBag(make_table())({"u": [[7]]}, per_sample_weights={"uu": [[2.0]]})


def test_keyed_ids_with_empty_batches_and_weights():
    bag = HashEmbeddingBag(make_table())
    empty = Keyed(["u", "i"], VALUES[:0], torch.zeros(0, dtype=torch.int64))
    assert bag(empty).shape == (0, 4)
    weighted = Keyed(["u", "i"], torch.tensor([7, 8]), torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))
    assert bag(weighted).tolist() == [[2.0, 20.0, 6.0, 60.0]]
    assert bag({"u": [[7]], "i": [[8]]}, per_sample_weights={"u": [[2.0]], "i": [[3.0]]}).tolist() == [
        [2.0, 20.0, 6.0, 60.0]
    ]


def test_padding_counts_for_nothing_and_gets_no_row():
    table = shoal.HashTable(1, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")
    table.assign(torch.tensor([5]), torch.tensor([[4.0]]))
    bag = HashEmbeddingBag(table, combiner="mean", padding_idx=-1)
    out = bag(torch.tensor([[5, 5, -1], [-1, -1, -1]]))
    assert out.tolist() == [[4.0], [0.0]]
    out.sum().backward()
    assert table.lookup(torch.tensor([5, -1])).tolist() == [[3.0], [0.0]]
    assert len(table) == 1
    embedding = HashEmbedding(table, padding_idx=-1)
    out = embedding(torch.tensor([-1, 5]))
    assert out.tolist() == [[0.0], [3.0]]
    out.sum().backward()
    assert table.lookup(torch.tensor([5, -1])).tolist() == [[2.0], [0.0]]
    assert len(table) == 1


def test_padding_with_weights_gives_them_a_gradient_of_zero():
    bag = HashEmbeddingBag(make_table(), padding_idx=0)
    weights = torch.tensor([[1.0, 5.0], [5.0, 2.0]], requires_grad=True)
    out = bag(torch.tensor([[7, 0], [0, 8]]), per_sample_weights=weights)
    assert out.tolist() == [[1.0, 10.0], [4.0, 40.0]]
    out.sum().backward()
    assert weights.grad.tolist() == [[11.0, 0.0], [0.0, 22.0]]


BAD = {
    "floats": (lambda bag: bag(torch.tensor([[1.0]])), "int64"),
    "booleans": (lambda bag: bag(torch.tensor([[True]])), "int64"),
    "flat ids without offsets": (lambda bag: bag(torch.tensor([1, 2])), "offsets"),
    "three dimensions": (lambda bag: bag(torch.ones(1, 2, 3, dtype=torch.int64)), r"\[B, L\]"),
    "offsets that fall": (lambda bag: bag(VALUES, torch.tensor([0, 3, 2, 5])), "never fall"),
    "offsets that start late": (lambda bag: bag(VALUES, torch.tensor([1, 5])), "start at 0"),
    "offsets that end early": (lambda bag: bag(VALUES, torch.tensor([0, 4])), "number of ids, 5"),
    "offsets beyond the end": (lambda bag: bag(VALUES, torch.tensor([0, 99])), "number of ids, 5"),
    "no offsets": (lambda bag: bag(VALUES, torch.empty(0, dtype=torch.int64)), "offsets"),
    "offsets of floats": (lambda bag: bag(VALUES, torch.tensor([0.0, 5.0])), "offsets"),
    "weights that are too few": (lambda bag: bag((VALUES, OFFSETS), per_sample_weights=torch.ones(4)), "weights"),
    "weights that are integers": (
        lambda bag: bag((VALUES, OFFSETS), per_sample_weights=torch.ones(5, dtype=torch.int64)),
        "weights",
    ),
    "text": (lambda bag: bag("abc"), "str"),
    "doubly ragged": (lambda bag: bag(Ragged(Ragged(VALUES, OFFSETS), [0, 3])), "doubly"),
    "keys of unequal batches": (lambda bag: bag({"u": [[1]], "i": [[1], [2]]}), "same number of bags"),
    "bags that keys cannot share": (lambda bag: bag(Keyed(["u", "i"], VALUES, OFFSETS.diff())), "same number of bags"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_ids_are_refused_and_leave_the_table_alone(case):
    call, message = BAD[case]
    table = make_table()
    with pytest.raises(ConfigError, match=message):
        call(HashEmbeddingBag(table))
    assert len(table) == 3


def test_bad_offsets_of_an_embedding_are_refused_before_rows_are_made():
    table = make_table()
    with pytest.raises(ConfigError, match="row_splits"):
        HashEmbedding(table)((torch.tensor([1, 2]), torch.tensor([0, 1])))
    assert len(table) == 3


def test_a_table_per_key_needs_ids_by_key():
    bag = HashEmbeddingBag({"u": make_table()})
    with pytest.raises(ConfigError, match="by key"):
        bag([[7]])
    with pytest.raises(ConfigError, match="no feature 'i'"):
        bag({"i": [[7]]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"combiner": "median"}, "'median'"),
        ({"combiner": "firstn"}, "max_length"),
        ({"combiner": "firstn", "max_length": 0}, "at least 1, got 0"),
        ({"combiner": "sum", "max_length": 3}, "firstn"),
        ({"output": "list"}, "'list'"),
    ],
)
def test_wrong_options_of_a_bag_fail_where_they_are_given(options, message):
    with pytest.raises(ConfigError, match=message):
        HashEmbeddingBag(make_table(), **options)


def test_what_is_no_table_is_refused():
    with pytest.raises(ConfigError, match="has no name, dim_size"):
        HashEmbedding(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="at least one"):
        HashEmbedding({})
