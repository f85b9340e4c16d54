"""`map_id_to_embedding`, `gather_embeddings_by_input` and their gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.ops import (
    gather_embeddings_by_ids_gradient_back_prop,
    gather_embeddings_by_input,
    map_id_to_embedding,
    map_id_to_embedding_gradient_back_prop,
    split_by_indices,
)
from shoal.ops.lookup import reference

IDS = st.one_of(st.integers(-5, 5), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("multi", [True, False])
def test_worked_example_of_map_id(multi):
    embeddings = [torch.tensor([[1.0, 2], [3, 4]], requires_grad=True), torch.tensor([[5.0, 6]], requires_grad=True)]
    out = map_id_to_embedding([[5, 9], [4]], embeddings, [[9, 4], [9, 5]], multi)
    assert out.tolist() == [[[3, 4], [5, 6]], [[3, 4], [1, 2]]]
    upstream = torch.tensor([[[1.0, 0], [2, 0]], [[3, 0], [4, 0]]])
    out.backward(upstream)
    assert [e.grad.tolist() for e in embeddings] == [[[4, 0], [4, 0]], [[2, 0]]]
    explicit = map_id_to_embedding_gradient_back_prop([[5, 9], [4]], [[9, 4], [9, 5]], upstream)
    assert [e.tolist() for e in explicit] == [[[4, 0], [4, 0]], [[2, 0]]]


def test_the_first_of_equal_ids_counts():
    embeddings = [torch.tensor([[1.0], [2]], requires_grad=True), torch.tensor([[3.0]], requires_grad=True)]
    out = map_id_to_embedding([[7, 7], [7]], embeddings, [7, 7])
    assert out.tolist() == [[1], [1]]
    out.sum().backward()
    assert [e.grad.tolist() for e in embeddings] == [[[2], [0]], [[0]]]


def test_empty_input_and_empty_lists():
    out = map_id_to_embedding([[1]], [[[1.0, 2]]], torch.zeros(2, 0, dtype=torch.int64))
    assert out.shape == (2, 0, 2)
    assert map_id_to_embedding([torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, 3)], []).shape == (0, 3)
    with pytest.raises(ValueError, match="id 4"):
        map_id_to_embedding([torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, 3)], [4])


@pytest.mark.parametrize("absent", [3, -9, 2**62])
def test_an_absent_id_is_named(absent):
    with pytest.raises(ValueError, match=str(absent)):
        map_id_to_embedding([[1, 2]], [[[1.0], [2]]], [1, absent])
    with pytest.raises(ValueError, match=str(absent)):
        gather_embeddings_by_input([1, 2], [[1.0], [2]], [1, absent], True)
    with pytest.raises(ValueError, match=str(absent)):
        map_id_to_embedding_gradient_back_prop([[1, 2, 2**40]], [1, absent], [[1.0], [2]])


@pytest.mark.parametrize(
    ("ids", "embeddings", "message"),
    [
        ([[1], [2]], [[[1.0]]], "number"),
        ([], [], "at least one"),
        ([[1, 2]], [[[1.0]]], "row per id"),
        ([[1], [2]], [[[1.0]], [[1.0, 2]]], "one width"),
        ([[1], [2]], [torch.ones(1, 1), torch.ones(1, 1).double()], "dtype"),
        ([[1]], [torch.ones(1, 1).half()], "float16"),
        ([[[1]]], [[[1.0]]], "1-D"),
    ],
)
def test_bad_arguments_are_refused(ids, embeddings, message):
    with pytest.raises(ValueError, match=message):
        map_id_to_embedding(ids, embeddings, [1])


def test_bad_gradients_are_refused():
    with pytest.raises(ValueError, match=r"input\.shape"):
        map_id_to_embedding_gradient_back_prop([[1]], [1, 1], [[1.0]])
    with pytest.raises(ValueError, match="got 3"):
        gather_embeddings_by_ids_gradient_back_prop([1, 2, 3], [[1.0]], [3])
    with pytest.raises(ValueError, match="got -1"):
        gather_embeddings_by_ids_gradient_back_prop([1, 2, 3], [[1.0]], [-1])
    with pytest.raises(ValueError, match="one row"):
        gather_embeddings_by_ids_gradient_back_prop([1, 2, 3], [[1.0]], [0, 1])


def test_worked_example_of_gather():
    embeddings = torch.tensor([[3, 3.5], [1, 1.5], [2, 2.5]], requires_grad=True)
    out, mapping = gather_embeddings_by_input([30, 10, 20], embeddings, [10, 10, 30])
    assert out.tolist() == [[1, 1.5], [1, 1.5], [3, 3.5]]
    assert mapping.tolist() == [1, 1, 0]
    assert not mapping.requires_grad
    upstream = torch.tensor([[1.0, 1], [2, 2], [4, 4]])
    out.backward(upstream)
    assert embeddings.grad.tolist() == [[4, 4], [3, 3], [0, 0]]
    assert (
        gather_embeddings_by_ids_gradient_back_prop([30, 10, 20], upstream, mapping).tolist()
        == embeddings.grad.tolist()
    )


def test_gather_refuses_another_number_of_rows():
    with pytest.raises(ValueError, match="row per id"):
        gather_embeddings_by_input([1, 2], [[1.0]], [1])


@given(st.data())
def test_lookups_match_the_reference(data):
    lists = data.draw(st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=4))
    every = [i for ids in lists for i in ids]
    wanted = data.draw(st.lists(st.sampled_from(every), max_size=20)) if every else []
    ids = [torch.tensor(i, dtype=torch.int64) for i in lists]
    embeddings = [torch.randn(len(i), 3, dtype=torch.float64, requires_grad=True) for i in lists]
    input = torch.tensor(wanted, dtype=torch.int64)
    out = map_id_to_embedding(ids, embeddings, input)
    want, _ = reference.map_id_to_embedding(ids, embeddings, input, True)
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.square().sum(), embeddings)
    for grad, plain in zip(grads, torch.autograd.grad(want.square().sum(), embeddings), strict=True):
        torch.testing.assert_close(grad, plain)


@pytest.mark.parametrize("shards", [1, 3, 64])
def test_looking_up_what_was_split_is_the_identity(shards):
    ids = torch.randperm(50) * 3 - 40
    table = torch.randn(50, 4)
    parts = split_by_indices(ids.remainder(shards), ids, shards)
    rows = split_by_indices(ids.remainder(shards), table, shards)
    assert torch.equal(map_id_to_embedding(parts, rows, ids), table)


def test_gradcheck():
    embeddings = [
        torch.randn(2, 2, dtype=torch.float64, requires_grad=True),
        torch.randn(1, 2, dtype=torch.float64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(lambda *e: map_id_to_embedding([[5, 9], [4]], list(e), [9, 4, 9]), embeddings)
    assert torch.autograd.gradcheck(lambda e: gather_embeddings_by_input([5, 9], e, [9, 9])[0], embeddings[0])


@pytest.mark.parametrize("spread", [1, 2**40], ids=["dense", "sparse"])
def test_large_lookups_are_the_same_for_any_thread_count(spread, same_for_any_thread_count):
    torch.manual_seed(0)
    ids = torch.randperm(200_000) * spread
    ids[100_000:100_500] = ids[:500]  # repeated: the first occurrence counts
    lists, table = list(ids.split([70_000, 0, 130_000])), torch.randn(200_000, 3)
    input = ids[torch.randint(0, 200_000, (50_000, 3))][:, ::2]

    def run():
        rows = [t.clone().requires_grad_() for t in table.split([70_000, 0, 130_000])]
        out = map_id_to_embedding(lists, rows, input)
        return out.detach(), torch.autograd.grad(out.sum(), rows)

    out, grads = same_for_any_thread_count(run)
    assert torch.equal(out, map_id_to_embedding(lists, table.split([70_000, 0, 130_000]), input, False))
    place = reference.id_places(lists, input)
    assert torch.equal(out, table[place])
    assert torch.cat(grads)[100_000:100_500].abs().sum() == 0
