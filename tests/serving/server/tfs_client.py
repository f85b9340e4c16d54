"""An unmodified TensorFlow Serving client, run as a program in an environment that has tensorflow-serving-api.

    python tfs_client.py GRPC_ADDRESS REST_ADDRESS

It imports nothing from Shoal: the messages, stubs and tensors are TensorFlow's own. It prints one line of JSON.
"""

import json
import sys
import urllib.request

import grpc
from google.protobuf import wrappers_pb2
from tensorflow.core.framework import tensor_pb2, types_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)


def tensor(dtype, shape, field, values):
    proto = tensor_pb2.TensorProto(dtype=dtype)
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    getattr(proto, field).extend(values)
    return proto


def floats(shape, values):
    return tensor(types_pb2.DT_FLOAT, shape, "float_val", values)


def ids(values, shape=None):
    return tensor(types_pb2.DT_INT64, shape or [len(values)], "int64_val", values)


def predict(stub, model, signature, inputs, version=None, outputs=()):
    request = predict_pb2.PredictRequest(output_filter=outputs)
    request.model_spec.name, request.model_spec.signature_name = model, signature
    if version is not None:
        request.model_spec.version.CopyFrom(wrappers_pb2.Int64Value(value=version))
    for alias, value in inputs.items():
        request.inputs[alias].CopyFrom(value)
    return stub.Predict(request, timeout=60)


def listed(response):
    found = {}
    for alias, value in response.outputs.items():
        kind = {types_pb2.DT_FLOAT: "float_val", types_pb2.DT_INT32: "int_val"}[value.dtype]
        found[alias] = [[dim.size for dim in value.tensor_shape.dim], list(getattr(value, kind))]
    return found


def refused(call):
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def main(address, rest):
    channel = grpc.insecure_channel(address)
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    models = model_service_pb2_grpc.ModelServiceStub(channel)
    score = {"user": ids([7, 9, 7, 1], [2, 2]), "price": floats([2, 2], [0.5, 1, -2, 0])}
    default = predict(stub, "movie", "serving_default", score)
    report = {"serving_default": listed(default), "version": default.model_spec.version.value}
    content = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=b"\0\0\0\x3f\0\0\x80\x3f")
    for size in (1, 2):
        content.tensor_shape.dim.add(size=size)
    given = {"user": ids([7, 9], [1, 2]), "price": content}
    report["content"] = listed(predict(stub, "movie", "", given, version=default.model_spec.version.value))
    report["lookup"] = listed(predict(stub, "shard", "lookup", {"user": ids([7, 9])}))
    given = {"id": ids([4, 5, 6]), "id_split": ids([0, 1, 3])}
    report["raw_lookup"] = listed(predict(stub, "multi", "raw_lookup", given))
    given = {"MonolithHashTable_tfs_id": ids([9, 77]), "MonolithHashTable_tfs_value": floats([2, 4], range(8))}
    report["hashtable_assign"] = listed(predict(stub, "shard", "hashtable_assign", given))
    report["after"] = listed(predict(stub, "shard", "lookup", {"user": ids([9, 77])}, outputs=["user"]))
    request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "movie"
    signatures = get_model_metadata_pb2.SignatureDefMap()
    answer = stub.GetModelMetadata(request, timeout=60)
    assert answer.metadata["signature_def"].Unpack(signatures)
    definition = signatures.signature_def["serving_default"]
    report["metadata"] = {
        "version": answer.model_spec.version.value,
        "signatures": sorted(signatures.signature_def),
        "method": definition.method_name,
        "inputs": {
            alias: [types_pb2.DataType.Name(info.dtype), [dim.size for dim in info.tensor_shape.dim]]
            for alias, info in sorted(definition.inputs.items())
        },
    }
    status = get_model_status_pb2.GetModelStatusRequest()
    status.model_spec.name = "movie"
    report["status"] = [
        [each.version, get_model_status_pb2.ModelVersionStatus.State.Name(each.state), each.status.error_code]
        for each in models.GetModelStatus(status, timeout=60).model_version_status
    ]
    report["refused"] = [
        refused(lambda: predict(stub, "nothing", "", {})),
        refused(lambda: predict(stub, "movie", "nothing", {})),
        refused(lambda: predict(stub, "movie", "", {"user": ids([1], [1, 1])})),
    ]
    body = json.dumps({"instances": [{"user": [7, 9], "price": [0.5, 1]}]}).encode()
    with urllib.request.urlopen(f"http://{rest}/v1/models/movie:predict", body, timeout=60) as reply:
        report["rest"] = json.load(reply)
    with urllib.request.urlopen(f"http://{rest}/v1/models/movie", timeout=60) as reply:
        report["rest_status"] = json.load(reply)
    print(json.dumps(report))


main(*sys.argv[1:])
