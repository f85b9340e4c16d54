"""Bytes on the wire: sync messages, agent messages, tensors, Predict."""

import contextlib

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pool
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import DataError
from shoal.serving import (
    ClientConfig,
    GetResourceResponse,
    HeartBeatResponse,
    ModelSpec,
    ModelState,
    ModelVersionStatus,
    PredictRequest,
    PushRequest,
    ServerType,
    SignatureDefMap,
    TensorProto,
    tensor_from_proto,
    tensor_to_proto,
)
from shoal.serving.predict import decode_request, encode_request, model_spec
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.serving.wire import decode_varints, encode_varints, read_fields

SIGNATURE = "1210686173687461626c655f61737369676e"
TARGET = "1a0d31302e312e322e333a39303031"


def test_client_config_has_the_specified_bytes():
    config = ClientConfig(
        model_name="movie_ctr:ps_4", signature_name="hashtable_assign", targets=["10.1.2.3:9001"], timeout_in_ms=3000
    )
    assert config.SerializeToString().hex() == "0a0e6d6f7669655f6374723a70735f34" + SIGNATURE + TARGET + "20b817"


def test_client_config_with_extra_info_has_the_specified_bytes():
    config = ClientConfig(
        model_name="ps_4", signature_name="hashtable_assign", targets=["10.1.2.3:9001"], timeout_in_ms=3000
    )
    config.targets_extra_info.add(idc="dc1", cluster="blue", replica_id=6)
    assert config.SerializeToString().hex() == (
        "0a0470735f34" + SIGNATURE + TARGET + "20b817" + "2a0d" + "0a03646331" + "1204626c7565" + "1806"
    )


def test_push_request_repeats_a_tag_per_number():
    request = PushRequest(model_name="mv", signature_name="hashtable_assign")
    request.delta_hash_tables.add(unique_id="item", dim_size=2, fids=[300, 5], embeddings=[1.5, -2, 0, 4])
    assert request.ByteSize() == 57
    assert request.SerializeToString().hex() == (
        "0a026d76" + SIGNATURE + "1a21" + "0a046974656d" + "1002" + "18ac02" + "1805"
        "250000c03f" "25000000c0" "2500000000" "2500008040"
    )  # fmt: skip


def test_defaults_and_presence_of_sync_messages():
    assert ClientConfig().timeout_in_ms == 1000
    assert not ClientConfig().HasField("timeout_in_ms")
    assert ClientConfig.TargetExtraInfo().replica_id == -1


def test_agent_messages_have_their_field_numbers():
    response = HeartBeatResponse()
    response.addresses["ps:7"].address.append("a:1")
    assert response.SerializeToString().hex() == "0a0d" + "0a0470733a37" + "1205" + "0a03613a31"
    resource = GetResourceResponse(
        address="a", shard_id=1, replica_id=-1, memory=3, cpu=-1.0, network=-1.0, work_load=-1.0
    )
    assert resource.SerializeToString().hex() == (
        "0a0161" "1001" "18ffffffffffffffffff01" "2003" "2d000080bf" "35000080bf" "3d000080bf"
    )  # fmt: skip
    assert (ServerType.PS, ServerType.ENTRY, ServerType.DENSE) == (0, 1, 2)
    assert ModelState.AVAILABLE == 30 == ModelVersionStatus.AVAILABLE


def test_messages_keep_the_default_descriptor_pool_free_for_tensorflow():
    assert PredictRequest.DESCRIPTOR.full_name == "tensorflow.serving.PredictRequest"
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("tensorflow.serving.PredictRequest")


def test_metadata_map_is_packed_under_the_name_that_stock_clients_unpack():
    from google.protobuf import any_pb2

    packed = any_pb2.Any()
    packed.type_url = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    assert packed.type_url.endswith(SignatureDefMap.DESCRIPTOR.full_name)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_varints_round_trip_and_agree_with_protobuf(values):
    array = np.array(values, np.int64)
    packed = bytes(encode_varints(array))
    assert decode_varints(memoryview(packed), len(values)).tolist() == values
    assert TensorProto(int64_val=values).SerializeToString().endswith(packed)


def test_cut_off_varints_are_errors():
    with pytest.raises(DataError, match="cut off"):
        decode_varints(memoryview(b"\x80"), 10)
    with pytest.raises(ValueError, match="varint"):
        decode_varints(memoryview(b"\xff" * 11 + b"\x01"), 10)
    with pytest.raises(DataError, match="allows 1"):
        decode_varints(memoryview(b"\x01\x02"), 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, -2.0], [0.0, 4.0]]),
        torch.tensor(3.25, dtype=torch.float64),
        torch.tensor([-1, 2**31 - 1], dtype=torch.int32),
        torch.tensor([-1, 0, 2**63 - 1]),
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([-7], dtype=torch.int16),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([True, False]),
        torch.tensor([1.0, -0.5]).half(),
        torch.tensor([1.0, float("inf")]).bfloat16(),
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_tensors_survive_the_wire(tensor):
    proto = tensor_to_proto(tensor)
    assert not proto.tensor_content
    assert [dim.size for dim in proto.tensor_shape.dim] == list(tensor.shape)
    back = tensor_from_proto(proto)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)
    proto2 = TensorProto.FromString(proto.SerializeToString())
    assert torch.equal(tensor_from_proto(proto2), tensor)


def test_typed_lists_are_the_ones_of_the_message():
    assert list(tensor_to_proto(torch.tensor([1.5])).float_val) == [1.5]
    assert list(tensor_to_proto([3, -4]).int64_val) == [3, -4]
    assert list(tensor_to_proto([0.5]).float_val) == [0.5]
    assert list(tensor_to_proto(torch.tensor([1.0]).half()).half_val) == [0x3C00]
    assert list(tensor_to_proto(torch.tensor([1.0]).bfloat16()).half_val) == [0x3F80]
    assert list(tensor_to_proto(torch.tensor([-3], dtype=torch.int8)).int_val) == [-3]
    assert list(tensor_to_proto(["ä", b"\xff"]).string_val) == ["ä".encode(), b"\xff"]
    assert tensor_to_proto(np.array([1.0])).dtype == 2
    assert list(tensor_to_proto([1 << 63]).uint64_val) == [1 << 63]


def test_strings_come_back_as_an_object_array_of_bytes():
    back = tensor_from_proto(tensor_to_proto(np.array([[b"a", b"bb"]], object)))
    assert back.dtype == object
    assert back.tolist() == [[b"a", b"bb"]]


def shaped(dtype, *shape, **fields):
    proto = TensorProto(dtype=dtype, **fields)
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    return proto


def test_a_short_list_is_extended_with_its_last_value_and_an_empty_one_is_zeros():
    assert tensor_from_proto(shaped(1, 4, float_val=[1, 2])).tolist() == [1, 2, 2, 2]
    assert tensor_from_proto(shaped(9, 2)).tolist() == [0, 0]
    assert tensor_from_proto(shaped(7, 2)).tolist() == [b"", b""]
    assert tensor_from_proto(shaped(7, 3, string_val=[b"x"])).tolist() == [b"x"] * 3


def test_content_is_little_endian_and_must_have_the_right_length():
    assert tensor_from_proto(shaped(3, 2, tensor_content=b"\x01\0\0\0\xff\xff\xff\xff")).tolist() == [1, -1]
    with pytest.raises(DataError, match="needs 8"):
        tensor_from_proto(shaped(3, 2, tensor_content=b"\x01\0\0\0"))


@pytest.mark.parametrize(
    ("proto", "text"),
    [
        (shaped(1, 1, float_val=[1, 2]), "does not fit"),
        (shaped(99, 1), "not supported"),
        (shaped(1, -1), "must be >= 0, got -1"),
        (shaped(7, 1, string_val=[b"a", b"b"]), "does not fit"),
        (shaped(1, 2**40, 2**40), "at most"),
    ],
)
def test_broken_tensors_are_refused(proto, text):
    with pytest.raises(DataError, match=text):
        tensor_from_proto(proto)


def test_a_huge_shape_is_refused_before_memory_is_taken():
    with pytest.raises(DataError, match="at most 1000"):
        decode_tensor(memoryview(shaped(1, 10**9).SerializeToString()), max_bytes=1000)


@given(st.binary(max_size=200))
def test_random_bytes_never_crash_the_readers(data):
    for read in (
        decode_request,
        lambda d: decode_tensor(memoryview(d), 4096),
        lambda d: list(read_fields(memoryview(d))),
    ):
        with contextlib.suppress(ValueError):
            read(data)


def test_predict_requests_agree_with_protobuf():
    inputs = {"a": encode_tensor(torch.arange(3)), "b": encode_tensor(torch.tensor([0.5]))}
    data = encode_request(model_spec("m", "s", 7), inputs, ["x", "y"])
    request = PredictRequest.FromString(data)
    assert request.model_spec == ModelSpec.FromString(model_spec("m", "s", 7).SerializeToString())
    assert request.model_spec.version.value == 7
    assert list(request.output_filter) == ["x", "y"]
    assert list(request.inputs["a"].int64_val) == [0, 1, 2]
    call = decode_request(request.SerializeToString())
    assert call.spec.name == "m"
    assert call.tensor("b").tolist() == [0.5]


def test_elements_that_stand_alone_cost_no_more_than_they_should():
    """Half a million lone values take milliseconds, not an object each."""
    count = 500_000
    shape = TensorProto(dtype=1)
    shape.tensor_shape.dim.add(size=count)
    lone = shape.SerializeToString() + b"\x2d\x00\x00\x80\x3f" * count
    assert decode_tensor(lone).sum() == count
    empty = shape.SerializeToString() + b"\x2a\x00" * count + b"\x2a\x04\x00\x00\x00\x40"
    assert decode_tensor(empty).sum() == 2 * count
    with pytest.raises(DataError, match="does not fit its shape"):
        decode_tensor(lone + b"\x2d\x00\x00\x80\x3f")
    with pytest.raises(DataError, match="131072"):
        decode_request(b"\x12\x00" * 200_000)
