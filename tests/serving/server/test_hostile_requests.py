"""Requests that are wrong on purpose: each is answered, costs little, and does not change the server."""

import asyncio
import json
import random
import resource
import tracemalloc

import grpc
import pytest
import torch

from shoal.serving import (
    Feature,
    GetModelMetadataRequest,
    GetModelStatusRequest,
    ModelExporter,
    ModelServer,
    PredictRequest,
    PredictResponse,
    tensor_from_proto,
    tensor_to_proto,
)
from shoal.serving.export.manifest import TensorSpec
from shoal.serving.server.batching import Batcher
from shoal.serving.status import StatusError
from shoal.table import test_hash_table
from tests.serving.helpers import Net
from tests.serving.server.test_batching import ask
from tests.serving.server.test_rest import ask as ask_rest
from tests.serving.server.test_server import CODE, Client, config_of, fails

MIB = 1 << 20
GOOD = {"user": torch.tensor([[1, 2]]), "price": torch.tensor([[0.5, 1.0]])}


@pytest.fixture
def served(tmp_path):
    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(10), torch.arange(40).float().reshape(10, 4))
    torch.manual_seed(0)
    tool = ModelExporter(
        tmp_path, model_name="m", net=Net(), features={"user": Feature(slot="u", padding=-1)},
        dense={"price": torch.zeros(2, 2)},
    )  # fmt: skip
    tool.export([{"u": table}], global_step=1, timestamp=7)
    config = config_of(m=(tmp_path / "exported_models",))
    server = ModelServer(rest_address="127.0.0.1:0", config=config, poll_wait_seconds=0).start()
    server.serve_tables("live", {"u": table})
    yield server
    server.stop(0)


def request_of(**inputs):
    request = PredictRequest()
    request.model_spec.name = "m"
    for alias, value in inputs.items():
        request.inputs[alias].CopyFrom(tensor_to_proto(value))
    return request


def claim(tensor, dtype, *shape):
    tensor.dtype = dtype
    for size in shape:
        tensor.tensor_shape.dim.add(size=size)


def send(client, request, timeout=60):
    return client.call("PredictionService", "Predict", request, PredictResponse, timeout=timeout)


# --- a batch that fails -----------------------------------------------------------------------------------------------


def test_whatever_escapes_a_batch_fails_its_requests_and_the_next_one_runs():
    class Escapes(BaseException):
        pass

    def run(inputs):
        if (inputs["x"] < 0).any():
            raise Escapes
        return {"y": inputs["x"]}

    async def main(pool):
        batcher = Batcher(run, pool=pool)
        with pytest.raises(StatusError, match="Escapes"):
            await asyncio.wait_for(ask(batcher, {"x": torch.tensor([-1])}), 60)
        return await asyncio.wait_for(ask(batcher, {"x": torch.tensor([5])}), 60)

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert asyncio.run(main(pool))["y"].tolist() == [5]


@pytest.mark.parametrize("shape", [(0, 2**62), (0, 2**31, 2**31), (2**40, 0), (0, 2**63 - 1)], ids=str)
@pytest.mark.parametrize("alias", ["user", "price"])
def test_an_empty_tensor_with_huge_sizes_is_refused_and_the_signature_goes_on(served, shape, alias):
    client = Client(served)
    for _ in range(3):
        request = request_of(**{name: value for name, value in GOOD.items() if name != alias})
        claim(request.inputs[alias], 9 if alias == "user" else 1, *shape)
        with fails(CODE.INVALID_ARGUMENT, alias):
            send(client, request)
        assert client.predict("m", "", GOOD)["score"].shape == (1,)
    request = PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "live", "lookup"
    claim(request.inputs["u"], 9, *shape)
    with fails(CODE.INVALID_ARGUMENT, "'u'"):
        send(client, request)


# --- joined outputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "spec"),
    [
        (lambda x: x @ x.T, TensorSpec("float", [None, None])),
        (lambda x: x @ x.T, TensorSpec("float", [None, 2])),
        (lambda x: x @ x.T, None),
        (lambda x: x.sum(), TensorSpec("float", [None])),
        (lambda x: x.sum(0), None),
        (lambda x: x[:1], TensorSpec("float", [None, 2])),
    ],
    ids=["pairs", "pairs told otherwise", "pairs not told", "scalar", "sum", "one row"],
)
def test_outputs_that_are_not_row_wise_are_never_cut(run, spec):
    async def main():
        batcher = Batcher(lambda inputs: {"y": run(inputs["x"])}, outputs={"y": spec} if spec else None)
        given = [torch.randn(rows, 2) for rows in (1, 2, 3, 1)]
        answers = await asyncio.wait_for(asyncio.gather(*(ask(batcher, {"x": each}) for each in given)), 60)
        for each, answer in zip(given, answers, strict=True):
            assert torch.allclose(answer["y"], run(each), atol=1e-6)

    asyncio.run(main())


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_a_small_request_cannot_take_much_memory(served):
    client = Client(served)
    request = request_of()
    for number in range(24):
        claim(request.inputs[f"i{number}"], 1, 8 * MIB - 1)
    assert request.ByteSize() < 1000
    assert client.predict("m", "", GOOD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with fails(CODE.INVALID_ARGUMENT, "unexpected"):
        send(client, request)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB
    request = request_of()
    claim(request.inputs["user"], 9, 2 * MIB, 1)
    claim(request.inputs["price"], 9, 2 * MIB, 2)
    with fails(CODE.INVALID_ARGUMENT, "must be float"):
        send(client, request)
    del request.inputs["price"]
    claim(request.inputs["price"], 1, 2 * MIB, 2)
    assert served.max_message_bytes == 2 * MIB * 16  # just enough for both together
    assert send(client, request).outputs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    request = request_of()
    claim(request.inputs["user"], 9, 3 * MIB, 1)
    claim(request.inputs["price"], 1, 3 * MIB, 2)
    with fails(CODE.INVALID_ARGUMENT, "when they are decoded"):
        send(client, request)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024
    assert client.predict("m", "", GOOD)


def test_a_request_within_the_budget_is_answered_whatever_its_form(served):
    client = Client(served)
    rows = 300_000  # 4.8 MB as bytes, so that it is not joined natively
    inputs = {"user": torch.ones(rows, 1, dtype=torch.int64), "price": torch.zeros(rows, 2)}
    assert client.predict("m", "", inputs)["score"].shape == (rows,)


def test_rest_rows_are_not_filled_up_beyond_the_budget(served):
    rows = [{"user": [], "price": [0, 0]}] * 20_000 + [{"user": [1] * 20_000, "price": [0, 0]}]
    tracemalloc.start()
    status, answer = ask_rest(served, "/v1/models/m:predict", {"instances": rows})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 400
    assert "after padding" in answer["error"]
    assert peak < 200 * MIB


# --- REST's codes -----------------------------------------------------------------------------------------------------


def test_different_numbers_of_rows_are_the_callers_fault(served):
    body = {"inputs": {"user": [[1], [2]], "price": [[0.5, 1.0]]}}
    status, answer = ask_rest(served, "/v1/models/m:predict", body)
    assert status == 400
    assert "'price': 1, 'user': 2" in answer["error"]
    with fails(CODE.INVALID_ARGUMENT, "one row per sample"):
        Client(served).predict("m", "", {"user": torch.ones(2, 1, dtype=torch.int64), "price": torch.zeros(3, 2)})


@pytest.mark.parametrize("text", [str(2**63), "1" + "0" * 40, "1" + "0" * 5000], ids=["2**63", "1e40", "1e5000"])
def test_a_version_that_no_int64_holds_is_the_callers_fault(served, text):
    for path in (f"/v1/models/m/versions/{text}", f"/v1/models/m/versions/{text}/metadata"):
        status, answer = ask_rest(served, path)
        assert status == 400
        assert "2**63" in answer["error"]
    assert ask_rest(served, f"/v1/models/m/versions/{text}:predict", {"instances": []})[0] == 400
    assert ask_rest(served, f"/v1/models/m/versions/{2**63 - 1}")[0] == 404


# --- random requests --------------------------------------------------------------------------------------------------


def mutate(rng, data):
    data = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del data[at : at + rng.randint(1, 4)]
            case 3:
                data[at:at] = data[: rng.randint(0, 40)]
            case _ if at < len(data):
                data[at] = rng.randrange(256)
    return bytes(data)


ANSWERS = (CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND)


def code_of(call, data):
    """How raw bytes are answered; the server may refuse them, but not fail by itself."""
    try:
        call(data, timeout=60)
    except grpc.RpcError as error:
        return error.code()
    return CODE.OK


def seeds_of_predict():
    requests = [request_of(**GOOD), request_of(user=torch.zeros(0, 3, dtype=torch.int64), price=torch.zeros(0, 2))]
    filtered = request_of(**GOOD)
    filtered.output_filter.append("score")
    filtered.model_spec.version.value = 7
    content = request_of(user=GOOD["user"])
    claim(content.inputs["price"], 1, 1, 2)
    content.inputs["price"].tensor_content = b"\0" * 8
    lookup = PredictRequest()
    lookup.model_spec.name, lookup.model_spec.signature_name = "live", "lookup"
    lookup.inputs["u"].CopyFrom(tensor_to_proto(torch.arange(5)))
    return [each.SerializeToString() for each in (*requests, filtered, content, lookup)]


@pytest.mark.parametrize("seed", range(4))
def test_every_broken_predict_request_is_answered_and_the_next_good_one_succeeds(served, seed):
    rng = random.Random(seed)
    client = Client(served)
    call = client.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    seeds = seeds_of_predict()
    expected = client.predict("m", "", GOOD)["score"]
    for number in range(300):
        data = mutate(rng, rng.choice(seeds))
        assert code_of(call, data) in ANSWERS, data.hex()
        if number % 10 == 0:
            assert torch.equal(client.predict("m", "", GOOD)["score"], expected)
    many = [call.future(mutate(rng, rng.choice(seeds)), timeout=60) for _ in range(200)]  # these are batched
    good = [call.future(seeds[0], timeout=60) for _ in range(20)]
    for each in many:
        assert each.exception(60) is None or each.code() in ANSWERS, each.details()
    for each in good:
        answer = tensor_from_proto(PredictResponse.FromString(each.result(60)).outputs["score"])
        assert torch.allclose(answer, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_every_shape_and_dtype_is_answered_and_the_next_good_one_succeeds(served, seed):
    rng = random.Random(seed)
    client = Client(served)
    call = client.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    sizes = [0, 1, 2, 3, 2**16, 2**31, 2**31 - 1, 2**32, 2**62, 2**63 - 1, -1, -(2**63)]
    for number in range(300):
        request = request_of()
        for alias in rng.sample(["user", "price", "extra"], rng.randint(0, 3)):
            tensor = request.inputs[alias]
            claim(tensor, rng.choice([1, 1, 9, 9, 2, 3, 7, 10, 14, 19, 23, 0, 99]),
                  *(rng.choice(sizes) for _ in range(rng.randint(0, 4))))  # fmt: skip
            tensor.tensor_shape.unknown_rank = rng.random() < 0.05
            for _ in range(rng.randint(0, 3)):
                rng.choice([tensor.float_val, tensor.int64_val, tensor.int_val, tensor.bool_val]).append(1)
            if rng.random() < 0.2:
                tensor.tensor_content = rng.randbytes(rng.choice([1, 4, 8, 16]))
            if rng.random() < 0.1:
                tensor.string_val.append(b"x")
        assert code_of(call, request.SerializeToString()) in ANSWERS, request
        if number % 20 == 0:
            assert client.predict("m", "", GOOD)["score"].shape == (1,)
    assert client.predict("m", "", GOOD)["score"].shape == (1,)


@pytest.mark.parametrize("seed", range(2))
def test_every_broken_metadata_and_status_request_is_answered(served, seed):
    rng = random.Random(seed)
    client = Client(served)
    metadata, status = GetModelMetadataRequest(metadata_field=["signature_def"]), GetModelStatusRequest()
    for each in (metadata, status):
        each.model_spec.name = "m"
    metadata.model_spec.version.value = 7
    calls = [
        (client.channel.unary_unary("/tensorflow.serving.PredictionService/GetModelMetadata"), metadata),
        (client.channel.unary_unary("/tensorflow.serving.ModelService/GetModelStatus"), status),
    ]
    for call, request in calls:
        good = call(request.SerializeToString(), timeout=60)
        for _ in range(200):
            data = mutate(rng, request.SerializeToString())
            assert code_of(call, data) in ANSWERS, data.hex()
            assert call(request.SerializeToString(), timeout=60) == good


def random_json(rng, depth=0):
    match rng.randrange(9 if depth < 4 else 6):
        case 0:
            return rng.choice([0, 1, -1, 2**31, 2**63, -(2**70), 10**400])
        case 1:
            return rng.choice([0.5, -1e308, float("nan"), float("inf"), 1e-320])
        case 2:
            return rng.choice(["", "x", "\0", "é" * 9, "1"])
        case 3:
            return rng.choice([None, True, False])
        case 4:
            return {"b64": rng.choice(["", "AAAA", "%%%", 5])}
        case 5:
            return []
        case 6 | 7:
            return [random_json(rng, depth + 1) for _ in range(rng.randint(0, 4))]
        case _:
            names = ["user", "price", "b64", "x", "instances"]
            return {rng.choice(names): random_json(rng, depth + 1) for _ in range(rng.randint(0, 3))}


@pytest.mark.parametrize("seed", range(2))
def test_every_broken_rest_request_is_answered_and_the_next_good_one_succeeds(served, seed):
    rng = random.Random(seed)
    good = {"instances": [{"user": [1, 2], "price": [0.5, 1.0]}]}
    expected = ask_rest(served, "/v1/models/m:predict", good)
    assert expected[0] == 200
    text = json.dumps(good).encode()
    for _ in range(150):
        match rng.randrange(3):
            case 0:
                body = {rng.choice(["instances", "inputs"]): random_json(rng)}
                raw = json.dumps(body | ({"signature_name": random_json(rng)} if rng.random() < 0.3 else {})).encode()
            case 1:
                columns = {"user": random_json(rng), "price": random_json(rng)}
                raw = json.dumps({"inputs": columns}).encode()
            case _:
                raw = mutate(rng, text)
        path = rng.choice(["/v1/models/m:predict", "/v1/models/m/versions/7:predict", "/v1/models/live:predict"])
        headers = {"Content-Encoding": rng.choice(["gzip", "deflate", "identity"])} if rng.random() < 0.2 else {}
        status, answer = ask_rest(served, path, raw=raw, headers=headers)
        assert status in (200, 400, 404, 413), (status, answer, raw)
        assert ask_rest(served, "/v1/models/m:predict", good) == expected
