"""Pushes that are split into parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serving import PushRequest, RequestSplitter, StatusError, push_request_to_predict, tensor_from_proto
from shoal.serving.sync.split import DeltaBatch, sendable_parts


def request_of(tables, multi=False, **fields):
    request = PushRequest(**fields)
    into = request.delta_multi_hash_tables if multi else request.delta_hash_tables
    for name, (dim, fids) in tables.items():
        into.add(unique_id=name, dim_size=dim, fids=fids, embeddings=[float(f) + c for f in fids for c in range(dim)])
    return request


EXAMPLE = request_of(
    {"item": (2, range(11)), "user": (1, range(4))},
    model_name="mv",
    signature_name="hashtable_assign",
    timeout_in_ms=3000,
)


def counts(parts):
    return [[len(delta.fids) for delta in part.delta_hash_tables] for part in parts]


def test_the_worked_example_splits_in_four():
    request = request_of(
        {"item": (2, range(11)), "user": (1, range(4))}, model_name="movie", signature_name="hashtable_assign"
    )
    request.model_name = "m" * (5 + 206 - request.ByteSize())
    assert request.ByteSize() == 206
    parts = RequestSplitter().split(request, 64)
    assert counts(parts) == [[2, 1], [2, 1], [2, 1], [5, 1]]
    assert [list(part.delta_hash_tables[0].fids) for part in parts][3] == [6, 7, 8, 9, 10]
    assert list(parts[1].delta_hash_tables[0].embeddings) == [2, 3, 3, 4]
    assert all(part.HasField("timeout_in_ms") and part.timeout_in_ms == 1000 for part in parts)
    assert all(part.model_name == request.model_name for part in parts)


def test_a_request_that_fits_is_returned_unchanged():
    request = request_of({"t": (1, [1])}, model_name="m")
    parts = RequestSplitter().split(request, request.ByteSize())
    assert parts == [request]
    assert not parts[0].HasField("timeout_in_ms")


def test_a_small_table_goes_entirely_into_the_last_part():
    request = request_of({"big": (1, range(40)), "small": (1, [1, 2])}, model_name="m")
    parts = RequestSplitter().split(request, 80)
    assert [part[1] for part in counts(parts)] == [0] * (len(parts) - 1) + [2]


def test_what_is_sent_fits_the_limit_and_has_rows():
    request = request_of({"a": (3, range(50)), "b": (1, range(7))}, model_name="m", signature_name="s")
    parts = sendable_parts(request, 150)
    assert all(part.ByteSize() <= 150 for part in parts)
    assert all(sum(c) for c in counts(parts))
    assert [f for part in parts for f in part.delta_hash_tables[0].fids] == list(range(50))


def test_halving_gives_the_rounded_up_half_first_in_row_order():
    request = request_of({"a": (1, [1, 2, 3]), "b": (1, [4, 5])}, model_name="m")
    size = request.ByteSize()
    parts = sendable_parts(request, size - 1)  # n = 2: [1, 1], [2, 1]
    assert counts(parts) == [[1, 1], [2, 1]]
    single = request_of({"a": (1, [1, 2, 3]), "b": (1, [])}, model_name="m" * 40)
    assert counts(sendable_parts(single, 10)) == [[1, 0], [1, 0], [1, 0]]


def test_a_part_of_one_row_is_sent_even_if_it_is_too_large():
    request = request_of({"wide": (100, [1])}, model_name="m")
    assert counts(sendable_parts(request, 10)) == [[1]]


def test_a_request_without_rows_sends_nothing_and_one_without_tables_is_one_part():
    assert sendable_parts(request_of({"a": (2, [])}, model_name="m"), 100) == []
    assert len(sendable_parts(PushRequest(model_name="m"), 100)) == 1


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 3), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)),
        min_size=1,
    ),
    st.integers(20, 400),
    st.booleans(),
)
def test_arrays_split_exactly_like_messages(tables, limit, multi):
    request = request_of(tables, multi, model_name="m", signature_name="s", timeout_in_ms=5)
    batch = DeltaBatch.of(request)
    assert batch.size() == request.ByteSize()
    ours = [part.message() for part in sendable_parts(batch, limit)]
    assert ours == sendable_parts(request, limit)


def test_single_tables_become_ids_and_values_by_name():
    predict, total = push_request_to_predict(EXAMPLE)
    assert total == 15
    assert predict.model_spec.name == "mv"
    assert predict.model_spec.signature_name == "hashtable_assign"
    assert predict.model_spec.WhichOneof("version_choice") is None
    assert not predict.output_filter
    assert sorted(predict.inputs) == ["item_id", "item_value", "user_id", "user_value"]
    assert tensor_from_proto(predict.inputs["item_value"]).shape == (11, 2)
    assert list(predict.inputs["user_id"].int64_val) == [0, 1, 2, 3]


def test_tables_without_ids_are_still_fed():
    predict, total = push_request_to_predict(request_of({"a": (3, [])}, signature_name="hashtable_assign"))
    assert total == 0
    assert tensor_from_proto(predict.inputs["a_value"]).shape == (0, 3)
    assert tensor_from_proto(predict.inputs["a_id"]).shape == (0,)


def test_a_multi_table_becomes_one_flat_call_and_wins_over_single_tables():
    request = request_of({"a": (2, [7, 8]), "b": (1, []), "c": (1, [9])}, True, signature_name="mt/raw_assign")
    request.delta_hash_tables.add(unique_id="x", dim_size=1, fids=[1], embeddings=[1])
    predict, total = push_request_to_predict(request)
    assert total == 3
    assert sorted(predict.inputs) == ["flat_value", "id", "id_split"]
    assert list(predict.inputs["id_split"].int64_val) == [0, 2, 2, 3]
    assert np.allclose(tensor_from_proto(predict.inputs["flat_value"]), [7, 8, 8, 9, 9])


def test_values_that_do_not_match_the_ids_are_an_invalid_argument():
    request = PushRequest()
    request.delta_hash_tables.add(unique_id="a", dim_size=2, fids=[1], embeddings=[1.0])
    with pytest.raises(StatusError, match="need 2 values, got 1") as caught:
        push_request_to_predict(request)
    assert caught.value.code == 3
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("multi", [False, True])
def test_a_table_without_dim_size_is_forwarded_with_the_columns_of_its_values(multi):
    request = PushRequest(model_name="m", signature_name="s")
    into = request.delta_multi_hash_tables if multi else request.delta_hash_tables
    into.add(unique_id="a", fids=[1, 2], embeddings=[1.0, 2.0, 3.0, 4.0])
    into.add(unique_id="b", fids=[3], embeddings=[5.0])
    predict, total = push_request_to_predict(request)
    assert total == 3
    if multi:
        assert list(predict.inputs["id_split"].int64_val) == [0, 2, 3]
        assert list(predict.inputs["flat_value"].float_val) == [1.0, 2.0, 3.0, 4.0, 5.0]
    else:
        assert tensor_from_proto(predict.inputs["a_value"]).tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert tensor_from_proto(predict.inputs["b_value"]).tolist() == [[5.0]]


def test_a_table_without_dim_size_keeps_its_values_when_it_is_cut():
    request = PushRequest(model_name="m")
    request.delta_hash_tables.add(unique_id="a", fids=range(20), embeddings=range(60))
    parts = sendable_parts(request, 100)
    assert len(parts) > 1
    assert [value for part in parts for value in part.delta_hash_tables[0].embeddings] == list(range(60))
    assert not any(part.delta_hash_tables[0].HasField("dim_size") for part in parts)


def test_values_that_give_no_whole_columns_are_an_invalid_argument():
    request = PushRequest()
    request.delta_hash_tables.add(unique_id="a", fids=[1, 2], embeddings=[1.0, 2.0, 3.0])
    with pytest.raises(StatusError, match="2 fids of dim 1 need 2 values, got 3"):
        push_request_to_predict(request)
