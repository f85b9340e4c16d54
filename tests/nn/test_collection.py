"""`EmbeddingBagCollection`: several tables in one call give bit-identical results to single modules."""

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import ConfigError
from shoal.nn import Combiner, EmbeddingBagCollection, FirstN, HashEmbedding, HashEmbeddingBag, SparseOptimizer
from shoal.table.pooling import pool_reference
from shoal.table.protocol import FIRSTN, MAX
from tests.nn.test_inputs import Keyed

FEATURES = {"user": "user", "clicked": "item", "shown": "item", "word": "word"}
COMBINERS = {"user": "sum", "clicked": "mean", "shown": "sqrtn", "word": "mean"}


def make_tables(**options):
    return {
        "user": shoal.HashTable(4, optimizer=shoal.Adagrad(lr=0.1), seed=1, **options),
        "item": shoal.HashTable(4, optimizer=shoal.Sgd(lr=0.2), seed=2, **options),
        "word": shoal.HashTable(3, optimizer=shoal.Adam(lr=0.3), seed=3, **options),
    }


def make_batch(seed, bags=5, keys=tuple(FEATURES)):
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for key in keys:
        lengths = torch.randint(0, 4, (bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        batch[key] = torch.randint(-9, 9, (int(offsets[-1]),), generator=generator), offsets
    return batch


def keyed(batch, weights=None):
    return Keyed(
        list(batch),
        torch.cat([values for values, _ in batch.values()]),
        torch.cat([offsets.diff() for _, offsets in batch.values()]),
        None if weights is None else torch.cat(list(weights.values())),
    )


def same(tables, others):
    ids = torch.arange(-9, 9)
    for name, table in tables.items():
        assert torch.equal(table.lookup(ids), others[name].lookup(ids))
        assert len(table) == len(others[name])


def singles(tables, combiners=COMBINERS, **options):
    """What a collection is judged by: a module per feature, side by side."""
    return nn.ModuleDict(
        {key: HashEmbeddingBag(tables[FEATURES[key]], combiner=combiners[key], **options) for key in FEATURES}
    )


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("form", ["mapping", "other order", "keyed"])
@pytest.mark.parametrize("held", [False, True])
def test_a_collection_is_its_single_modules_bit_for_bit(form, held, padding):
    ours, theirs = make_tables(), make_tables()
    collection = EmbeddingBagCollection(ours, FEATURES, combiner=COMBINERS, padding_idx=padding)
    judges = singles(theirs, padding_idx=padding)
    optimizers = [SparseOptimizer(collection), SparseOptimizer(judges)] if held else []
    for seed in range(4):
        batch = make_batch(seed)
        given = {"mapping": batch, "other order": dict(reversed(batch.items())), "keyed": keyed(batch)}[form]
        out = collection(given)
        want = torch.cat([judges[key](part) for key, part in batch.items()], 1)
        assert torch.equal(out, want)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        out.backward(grad)
        want.backward(grad)
        for optimizer in optimizers:
            optimizer.step()
        same(ours, theirs)


def test_a_dict_has_the_batchs_keys_and_may_have_some_of_the_features():
    tables = make_tables()
    whole = EmbeddingBagCollection(tables, FEATURES, combiner=COMBINERS)
    parts = EmbeddingBagCollection(tables, FEATURES, combiner=COMBINERS, output="dict")
    batch = make_batch(0)
    by_key = parts(dict(reversed(batch.items())))
    assert list(by_key) == list(reversed(FEATURES))
    assert torch.equal(torch.cat([by_key[key] for key in FEATURES], 1), whole(batch))
    some = parts({"word": batch["word"], "user": batch["user"]})
    assert torch.equal(some["word"], by_key["word"])
    (some["user"].sum() + 2 * some["word"].sum()).backward()
    assert len(tables["item"]) == 0
    assert len(tables["user"]) == len(batch["user"][0].unique())
    assert parts({}) == {}


class Double(Combiner):
    """Twice the sum."""

    def __init__(self):
        super().__init__(0)

    def combine(self, key, embedding, name=None):
        return 2 * torch.stack([part.sum(0) for part in embedding.split(key.row_lengths().tolist())])


def test_features_with_any_combiner_stand_side_by_side_and_train_as_single_modules():
    combiners = {"user": "sum", "clicked": "max", "shown": FirstN(2), "word": Double()}
    ours, theirs = make_tables(), make_tables()
    collection = EmbeddingBagCollection(ours, FEATURES, combiner=combiners)
    judges = singles(theirs, combiners)
    for seed in range(3):
        batch = make_batch(seed)
        out = collection(batch)
        want = torch.cat([judges[key](part).flatten(1) for key, part in batch.items()], 1)
        assert out.shape == (5, 4 + 4 + 2 * 4 + 3)
        assert torch.equal(out, want)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        out.backward(grad)
        want.backward(grad)
        for name, table in ours.items():
            ids = torch.arange(-9, 9)
            torch.testing.assert_close(table.lookup(ids), theirs[name].lookup(ids))


@pytest.mark.parametrize("form", ["mapping", "keyed"])
def test_weights_of_a_collection_get_their_gradients(form):
    ours, theirs = make_tables(), make_tables()
    collection = EmbeddingBagCollection(ours, FEATURES, combiner=COMBINERS)
    judges = singles(theirs)
    batch = make_batch(1)
    given = {key: torch.rand(values.shape) for key, (values, _) in batch.items()}
    plain = collection(batch, per_sample_weights=given).detach()
    mine = {key: weight.clone().requires_grad_() for key, weight in given.items()}
    twin = {key: weight.clone().requires_grad_() for key, weight in given.items()}
    out = collection(batch, per_sample_weights=mine) if form == "mapping" else collection(keyed(batch, mine))
    want = torch.cat([judges[key](part, per_sample_weights=twin[key]) for key, part in batch.items()], 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(out, plain)
    grad = torch.randn(out.shape)
    out.backward(grad)
    want.backward(grad)
    for key in FEATURES:
        torch.testing.assert_close(mine[key].grad, twin[key].grad)
    for name, table in ours.items():
        torch.testing.assert_close(table.lookup(torch.arange(-9, 9)), theirs[name].lookup(torch.arange(-9, 9)))


def test_a_mapping_of_tables_is_the_short_spelling():
    tables = make_tables()
    batch = {name: [[1, 2], [3]] for name in tables}
    short, long = HashEmbeddingBag(tables, combiner="mean"), EmbeddingBagCollection(tables, combiner="mean")
    assert isinstance(short, EmbeddingBagCollection)
    assert torch.equal(short(batch), long(batch))
    assert short.state_dict().keys() == long.state_dict().keys()


def test_one_table_in_two_groups_makes_one_step_per_id():
    """The modules have different sets of tables, so that no call of a group has all gradients of the shared one."""
    options = {"optimizer": shoal.Adagrad(lr=1.0, initial_accumulator=0.0), "initializer": "zeros"}
    for held in (False, True):
        shared, other = shoal.HashTable(2, **options), shoal.HashTable(2, **options)
        alone, both = HashEmbeddingBag(shared), EmbeddingBagCollection({"a": other, "b": shared})
        optimizer = SparseOptimizer([alone, both]) if held else None
        (alone([[1]]).sum() + both({"a": [[1]], "b": [[1]]}).sum()).backward()
        if optimizer:
            optimizer.step()
        one = torch.tensor([1])
        assert shared.lookup(one).tolist() == [[-1.0, -1.0]]  # two steps would be longer
        assert other.lookup(one).tolist() == [[-1.0, -1.0]]


def test_tables_of_one_group_may_be_held_and_not():
    options = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros"}
    held, free = shoal.HashTable(2, **options), shoal.HashTable(2, **options)
    both = EmbeddingBagCollection({"held": held, "free": free})
    optimizer = SparseOptimizer(held)
    both({"held": [[1, 1]], "free": [[1]]}).sum().backward()
    one = torch.tensor([1])
    assert (held.lookup(one).tolist(), free.lookup(one).tolist()) == ([[0.0, 0.0]], [[-1.0, -1.0]])
    optimizer.step()
    assert held.lookup(one).tolist() == [[-2.0, -2.0]]


def test_two_optimizers_step_their_own_tables_of_one_group():
    options = {"optimizer": shoal.Sgd(lr=1.0), "initializer": "zeros"}
    tables = {name: shoal.HashTable(2, **options) for name in "ab"}
    both = EmbeddingBagCollection(tables)
    first, second = SparseOptimizer(tables["a"]), SparseOptimizer(tables["b"], lr=0.5)
    both({"a": [[1]], "b": [[1]]}).sum().backward()
    one = torch.tensor([1])
    first.step()
    assert [table.lookup(one)[0, 0].item() for table in tables.values()] == [-1.0, 0.0]
    second.step()
    assert [table.lookup(one)[0, 0].item() for table in tables.values()] == [-1.0, -0.5]
    both({"a": [[1]], "b": [[1]]}).sum().backward()
    first.zero_grad()
    assert first.gradients() == {}
    assert len(second.gradients()) == 1


def test_tables_with_clocks_of_their_own_are_stamped_each():
    tables = {name: shoal.HashTable(2) for name in "ab"}
    HashEmbeddingBag(tables["a"]).clock = lambda: 1000
    HashEmbeddingBag(tables["b"]).clock = lambda: 2000
    EmbeddingBagCollection(tables)({"a": [[1]], "b": [[1]]}).sum().backward()
    assert [table.max_update_time for table in tables.values()] == [1000, 2000]


def test_ids_by_key_of_an_embedding_are_read_together():
    tables, others = make_tables(), make_tables()
    embedding = HashEmbedding(tables)
    ids = {"word": torch.tensor([[1, 2], [3, 1]]), "user": (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))}
    out = embedding(ids)
    assert list(out) == ["word", "user"]
    (out["word"].sum() + out["user"].values.sum()).backward()
    for key, given in ids.items():
        rows = HashEmbedding(others[key])(given)
        values, wanted = (one.values if key == "user" else one for one in (out[key], rows))
        assert torch.equal(values, wanted)
        wanted.sum().backward()
    same(tables, others)


class Elsewhere:
    """A table with only what the modules need."""

    name, dim_size = "elsewhere", 2

    def __init__(self):
        self.rows, self.calls = {}, []

    def lookup(self, ids):
        return torch.tensor([self.rows.get(i, [0.0, 0.0]) for i in ids.tolist()]).reshape(-1, 2)

    def apply_gradients(self, ids, grads, global_step=0):
        self.calls.append(global_step)
        for i, grad in zip(ids.tolist(), grads, strict=True):
            self.rows[i] = (torch.tensor(self.rows.get(i, [0.0, 0.0])) - grad).tolist()


def test_a_table_of_the_users_own_stands_beside_others():
    own = Elsewhere()
    tables = {"own": own, "ours": shoal.HashTable(2, optimizer=shoal.Sgd(lr=1.0), initializer="zeros")}
    bags = EmbeddingBagCollection(tables, combiner={"own": "mean", "ours": "sum"})
    for step in range(2):
        bags({"own": [[1, 2]], "ours": [[1, 2]]}).sum().backward()
        assert own.calls == list(range(step + 1))
    assert own.rows == {1: [-1.0, -1.0], 2: [-1.0, -1.0]}
    assert tables["ours"].lookup(torch.tensor([1, 2])).tolist() == [[-2.0, -2.0]] * 2
    assert not any("own" in name for name in bags.state_dict())


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("combiner", ["max", FirstN(2)], ids=["max", "firstn"])
def test_largest_and_first_rows_train_as_in_plain_torch_without_a_row_per_id(
    combiner, padding, weighted, held, monkeypatch
):
    def refuse(*_, **__):
        raise AssertionError("rows of all ids were asked for")

    monkeypatch.setattr("shoal.table.local.LocalGroup.rows", refuse)
    tables = {name: shoal.HashTable(5, optimizer=shoal.Sgd(lr=0.5), seed=7) for name in ("a", "b")}
    bags = EmbeddingBagCollection(tables, combiner=combiner, padding_idx=padding)
    optimizer = SparseOptimizer(bags) if held else None
    ids = torch.arange(-9, 9)
    want = {name: table.lookup(ids, insert_missing=True) for name, table in tables.items()}
    for seed in range(3):
        batch = make_batch(seed, bags=30, keys=("a", "b"))
        weights = {key: torch.randint(-1, 3, part[0].shape).float() for key, part in batch.items()}
        out = bags(batch, weights if weighted else None)
        rows = {name: row.clone().requires_grad_() for name, row in want.items()}
        plain = []
        for key, (values, offsets) in batch.items():
            keep = torch.ones_like(values, dtype=torch.bool) if padding is None else values != padding
            kept = torch.cat([torch.zeros(1, dtype=torch.int64), keep.cumsum(0)])[offsets]
            kind, length = (MAX, 0) if combiner == "max" else (FIRSTN, 2)
            given = weights[key][keep] if weighted else None
            plain.append(pool_reference(rows[key][values[keep] + 9], kept, given, kind, length))
        plain = torch.cat(plain, -1)
        assert torch.equal(out, plain)
        grad = torch.randn(out.shape)
        out.backward(grad)
        plain.backward(grad)
        if optimizer:
            optimizer.step()
        for name, table in tables.items():
            want[name] = table.lookup(ids)
            torch.testing.assert_close(want[name], (rows[name] - 0.5 * rows[name].grad).detach())


def test_sequences_of_different_lengths_are_flattened():
    tables = make_tables()
    combiners = {"user": FirstN(1), "clicked": FirstN(2), "shown": FirstN(3), "word": FirstN(1)}
    batch = make_batch(0)
    out = EmbeddingBagCollection(tables, FEATURES, combiner=combiners)(batch)
    judges = singles(tables, combiners)
    assert torch.equal(out, torch.cat([judges[key](part).flatten(1) for key, part in batch.items()], 1))
    assert out.shape == (5, 4 + 8 + 12 + 3)


EMPTY = torch.empty(0, dtype=torch.int64)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max", "firstn"])
def test_empty_batches_empty_bags_and_padding_alone_give_zeros_and_change_nothing(combiner):
    tables = make_tables()
    length = 2 if combiner == "firstn" else None
    bags = EmbeddingBagCollection(tables, FEATURES, combiner=combiner, max_length=length, padding_idx=3)
    width = (15,) if length is None else (2, 15)
    for ids, n in (
        ({key: (EMPTY, torch.zeros(1, dtype=torch.int64)) for key in FEATURES}, 0),
        ({key: [[], []] for key in FEATURES}, 2),
        (dict.fromkeys(FEATURES, torch.empty(2, 0, dtype=torch.int64)), 2),
        ({key: [[3, 3], [3]] for key in FEATURES}, 2),
        (Keyed(list(FEATURES), EMPTY, torch.zeros(0, dtype=torch.int64)), 0),
        (Keyed(list(FEATURES), EMPTY, torch.zeros(8, dtype=torch.int64)), 2),
    ):
        out = bags(ids)
        assert out.shape == (n, *width)
        assert not out.any()
        out.sum().backward()
        assert not any(len(table) for table in tables.values())


def test_a_huge_bag_beside_small_ones():
    ours, theirs = make_tables(), make_tables()
    values = torch.arange(20_000) % 7
    batch = {key: (values, torch.tensor([0, 19_990, 19_990, 20_000])) for key in FEATURES}
    out = EmbeddingBagCollection(ours, FEATURES, combiner=COMBINERS)(batch)
    judges = singles(theirs)
    want = torch.cat([judges[key](part) for key, part in batch.items()], 1)
    assert torch.equal(out, want)
    out.sum().backward()
    want.sum().backward()
    for name, table in ours.items():
        torch.testing.assert_close(table.lookup(torch.arange(7)), theirs[name].lookup(torch.arange(7)))


BAD = {
    "a feature that is missing": (lambda b: {k: v for k, v in b.items() if k != "word"}, r"has no \['word'\]"),
    "a feature that nobody knows": (lambda b: b | {"wrod": b["word"]}, "no feature 'wrod'"),
    "ids without keys": (lambda b: b["word"], "by key"),
    "offsets that fall": (lambda b: b | {"shown": (b["shown"][0], b["shown"][1].flip(0))}, "'shown'.*start at 0"),
    "offsets that end early": (
        lambda b: b | {"clicked": (torch.arange(5), torch.tensor([0, 1, 1, 1, 1, 4]))},
        "'clicked'.*number of ids, 5",
    ),
    "bags that are too few": (lambda b: b | {"user": [[1]]}, "same number of bags"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_batches_are_refused_and_change_nothing(case):
    change, message = BAD[case]
    tables = make_tables()
    bags = EmbeddingBagCollection(tables, FEATURES)
    with pytest.raises(ConfigError, match=message):
        bags(change(make_batch(0)))
    assert not any(len(table) for table in tables.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": {"a": "user", "b": "nobody"}}, "nobody"),
        ({"features": {}}, "at least one"),
        ({"combiner": {"user": "sum"}}, "entry for each"),
        ({"combiner": dict.fromkeys(("user", "item", "word"), "median")}, "'median'"),
        ({"output": "list"}, "'list'"),
        ({"max_length": 3}, "firstn"),
    ],
)
def test_wrong_options_fail_where_they_are_given(options, message):
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(make_tables(), **options)


def test_offsets_without_their_ends():
    tables = make_tables()
    batch = make_batch(0)
    cut = {key: (values, offsets[:-1]) for key, (values, offsets) in batch.items()}
    ends = EmbeddingBagCollection(tables, FEATURES)(batch)
    assert torch.equal(EmbeddingBagCollection(tables, FEATURES, include_last_offset=False)(cut), ends)


def test_a_copy_trains_tables_of_its_own_and_state_comes_back():
    import copy

    tables = make_tables()
    bags = EmbeddingBagCollection(tables, FEATURES, combiner=COMBINERS)
    bags(make_batch(0)).sum().backward()
    twin = copy.deepcopy(bags)
    fresh = EmbeddingBagCollection(make_tables(), FEATURES, combiner=COMBINERS)
    fresh.load_state_dict(bags.state_dict())
    for other in (twin, fresh):
        assert torch.equal(other(make_batch(0)), bags(make_batch(0)))
        other(make_batch(1)).sum().backward()
    bags(make_batch(1)).sum().backward()
    same(tables, twin.tables)
    same(tables, fresh.tables)


def test_plans_of_ever_new_sets_of_features_are_forgotten(monkeypatch):
    from shoal.nn.read import tables as kept
    from shoal.table import local

    monkeypatch.setattr(kept, "PLANS", 4)
    monkeypatch.setattr(local, "_KEPT", 4)
    tables = {name: shoal.HashTable(2, name=f"forgotten-{name}") for name in "abcdef"}
    bags = HashEmbeddingBag(tables, output="dict")
    ids = (torch.tensor([1]), torch.tensor([0, 1]))
    for first in "abcdef":
        for second in "abcdef":
            if first < second:
                out = bags({first: ids, second: ids})
                torch.testing.assert_close(out[first], tables[first].lookup(ids[0], insert_missing=True))
    assert len(bags._tables._plans) <= 4
    assert all(len(group._wirings) <= 4 for group in bags.groups())
