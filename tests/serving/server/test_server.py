"""The model server over gRPC: answers, errors, versions, pushes, batching, sharded entries."""

import threading
import time

import grpc
import pytest
import torch

from shoal.errors import ConfigError
from shoal.serving import (
    ExportMode,
    Feature,
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    ModelExporter,
    ModelServer,
    ModelServerConfig,
    ModelState,
    PredictRequest,
    PredictResponse,
    ReloadConfigRequest,
    ReloadConfigResponse,
    SignatureDefMap,
    export_ps,
    gen_model_config,
    set_address_table,
    tensor_from_proto,
    tensor_to_proto,
)
from shoal.serving.net_utils import is_open
from shoal.serving.sync.split import Delta, DeltaBatch
from shoal.table import FloatCompressorConfig, MultiHashTable, test_hash_table
from tests.serving.helpers import eventually, free_port
from tests.serving.sync.test_sync_client import instance

CODE = grpc.StatusCode


class Client:
    """A stock client: protobuf messages over a channel, nothing of ours but the classes."""

    def __init__(self, server):
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{server.port}", options)

    def call(self, service, method, request, response, timeout=60):
        path = f"/tensorflow.serving.{service}/{method}"
        return self.channel.unary_unary(path, type(request).SerializeToString, response.FromString)(
            request, timeout=timeout
        )

    def predict(self, model, signature="", inputs=None, outputs=(), version=None, label=None):
        request = PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = model, signature
        if version is not None:
            request.model_spec.version.value = version
        if label is not None:
            request.model_spec.version_label = label
        for alias, value in (inputs or {}).items():
            request.inputs[alias].CopyFrom(tensor_to_proto(value))
        request.output_filter.extend(outputs)
        answer = self.call("PredictionService", "Predict", request, PredictResponse)
        return {alias: tensor_from_proto(value) for alias, value in answer.outputs.items()}

    def status(self, model):
        request = GetModelStatusRequest()
        request.model_spec.name = model
        answer = self.call("ModelService", "GetModelStatus", request, GetModelStatusResponse)
        return {each.version: each.state for each in answer.model_version_status}


class fails:
    """The call inside must fail with this code and say this."""

    def __init__(self, code, text):
        self.code, self.text = code, text

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert isinstance(error, grpc.RpcError), "the call should have failed"
        assert error.code() == self.code, error.details()
        assert self.text in error.details(), error.details()
        return True


def config_of(**models):
    config = ModelServerConfig()
    for name, (path, *policy) in models.items():
        config.model_config_list.config.append(gen_model_config(name, str(path), *policy))
    return config


@pytest.fixture
def serve():
    made = []

    def start(config=None, **fields):
        server = ModelServer(config=config, poll_wait_seconds=fields.pop("poll", 0), **fields).start()
        made.append(server)
        return server, Client(server)

    yield start
    for server in made:
        server.stop(0)


def table_of(suffix="t", dim=2, rows=5):
    table = test_hash_table(dim, name_suffix=suffix)
    table.assign(torch.arange(rows), torch.arange(rows * dim).float().reshape(rows, dim))
    return table


# --- tables -----------------------------------------------------------------------------------------------------------


def test_live_tables_are_looked_up_and_assigned(serve):
    table = table_of()
    server, client = serve()
    server.serve_tables("m:ps_0", {"user": table}, version=4)
    out = client.predict("m:ps_0", "lookup", {"user": torch.tensor([1, 77])})
    assert out["user"].tolist() == [[2, 3], [0, 0]]
    now = int(time.time())
    out = client.predict(
        "m:ps_0",
        "hashtable_assign",
        {f"{table.name}_id": torch.tensor([1, 9]), f"{table.name}_value": torch.ones(2, 2)},
    )
    assert out[f"{table.name}_result"].dtype == torch.int32
    assert out[f"{table.name}_result"].item() == 2
    assert table.lookup(torch.tensor([1, 9])).tolist() == [[1, 1], [1, 1]]
    assert table.max_update_time >= now
    assert client.status("m:ps_0") == {4: ModelState.AVAILABLE}


def test_a_push_with_a_value_that_is_not_finite_writes_nothing(serve):
    server, client = serve()
    one, two = table_of("one"), table_of("two")
    server.serve_tables("m", [one, two])
    push = {f"{each.name}_id": torch.tensor([1]) for each in (one, two)}
    push |= {f"{one.name}_value": torch.ones(1, 2), f"{two.name}_value": torch.tensor([[1.0, float("nan")]])}
    with fails(CODE.INVALID_ARGUMENT, f"table {two.name!r}: pushed values must be finite"):
        client.predict("m", "hashtable_assign", push)
    assert one.lookup(torch.tensor([1])).tolist() == [[2.0, 3.0]]
    push[f"{two.name}_value"] = torch.full((1, 2), 3e38)  # the sum is infinite, the values are not
    client.predict("m", "hashtable_assign", push)
    assert one.lookup(torch.tensor([1])).tolist() == [[1.0, 1.0]]


def test_a_live_multi_table_has_the_raw_signatures(serve):
    table = MultiHashTable.from_configs({"b": instance(2), "a": instance(1)}, name_suffix="0")
    server, client = serve()
    server.serve_tables("ps_0", table)
    inputs = {
        "id": torch.tensor([5, 6]),
        "id_split": torch.tensor([0, 1, 2]),
        "flat_value": torch.tensor([1.0, 2.0, 3.0]),
    }
    assert client.predict("ps_0", f"{table.name}/raw_assign", inputs)["result"].item() == 0
    out = client.predict("ps_0", "raw_lookup", {"id": torch.tensor([5, 6, 7]), "id_split": torch.tensor([0, 1, 3])})
    assert out["flat_emb"].tolist() == [1, 2, 3, 0, 0]
    out = client.predict("ps_0", "lookup", {"a": torch.tensor([5]), "b": torch.tensor([6])})
    assert out["a"].tolist() == [[1.0]]
    for bad in ([0, 1], [0, 2, 1], [1, 1, 2], [0, 1, 3]):
        with fails(CODE.INVALID_ARGUMENT, "id_split"):
            client.predict("ps_0", "raw_lookup", {"id": torch.tensor([5, 6]), "id_split": torch.tensor(bad)})
    with fails(CODE.INVALID_ARGUMENT, "must have 3 values"):
        client.predict("ps_0", f"{table.name}/raw_assign", {**inputs, "flat_value": torch.zeros(2)})


def test_wrong_requests_get_the_right_code_and_are_told_what_exists(serve):
    table = table_of()
    server, client = serve()
    server.serve_tables("m", {"user": table})
    good = {"user": torch.tensor([1])}
    with fails(CODE.NOT_FOUND, "has ['m']"):
        client.predict("other", "lookup", good)
    with fails(CODE.INVALID_ARGUMENT, "['hashtable_assign', 'lookup']"):
        client.predict("m", "nothing", good)
    with fails(CODE.INVALID_ARGUMENT, "'serving_default'"):
        client.predict("m", "", good)
    with fails(CODE.NOT_FOUND, "available versions are [1]"):
        client.predict("m", "lookup", good, version=3)
    with fails(CODE.NOT_FOUND, "label"):
        client.predict("m", "lookup", good, label="stable")
    with fails(CODE.INVALID_ARGUMENT, "missing ['user']"):
        client.predict("m", "lookup", {})
    with fails(CODE.INVALID_ARGUMENT, "unexpected ['more']"):
        client.predict("m", "lookup", {**good, "more": torch.tensor([1])})
    with fails(CODE.INVALID_ARGUMENT, "must be int64"):
        client.predict("m", "lookup", {"user": torch.tensor([1.0])})
    with fails(CODE.INVALID_ARGUMENT, "shape"):
        client.predict("m", "lookup", {"user": torch.tensor([[1]])})
    with fails(CODE.INVALID_ARGUMENT, "no output ['x']"):
        client.predict("m", "lookup", good, outputs=["x"])
    assert list(client.predict("m", "lookup", good, outputs=["user"])) == ["user"]
    names = f"{table.name}_id", f"{table.name}_value"
    with fails(CODE.INVALID_ARGUMENT, "must have 2 rows for 2 ids, got 1"):
        client.predict("m", "hashtable_assign", {names[0]: torch.tensor([1, 2]), names[1]: torch.ones(1, 2)})
    with fails(CODE.INVALID_ARGUMENT, "shape"):
        client.predict("m", "hashtable_assign", {names[0]: torch.tensor([1]), names[1]: torch.ones(1, 3)})


def test_malformed_and_oversized_messages_are_refused(serve):
    server, client = serve(max_message_bytes=100_000)
    server.serve_tables("m", {"user": table_of()})
    raw = client.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    with fails(CODE.INVALID_ARGUMENT, "PredictRequest"):
        raw(b"\xff\xff\xff", timeout=60)
    with fails(CODE.RESOURCE_EXHAUSTED, ""):
        raw(b"\0" * 200_000, timeout=60)
    with fails(CODE.RESOURCE_EXHAUSTED, ""):  # small on the wire, large when decompressed
        raw(b"\0" * 50_000_000, timeout=60, compression=grpc.Compression.Gzip)
    request = PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "m", "lookup"
    request.inputs["user"].dtype = 9
    request.inputs["user"].tensor_shape.dim.add(size=2**40)
    with fails(CODE.INVALID_ARGUMENT, "at most 100000"):
        client.call("PredictionService", "Predict", request, PredictResponse)
    assert client.predict("m", "lookup", {"user": torch.tensor([1])})


def test_metadata_describes_signatures(serve):
    server, client = serve()
    server.serve_tables("m", {"user": table_of()})
    request = GetModelMetadataRequest(metadata_field=["signature_def"])
    request.model_spec.name = "m"
    answer = client.call("PredictionService", "GetModelMetadata", request, GetModelMetadataResponse)
    assert answer.metadata["signature_def"].type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    signatures = SignatureDefMap()
    assert answer.metadata["signature_def"].Unpack(signatures)
    lookup = signatures.signature_def["lookup"]
    assert lookup.method_name == "tensorflow/serving/predict"
    assert lookup.inputs["user"].dtype == 9
    assert [dim.size for dim in lookup.outputs["user"].tensor_shape.dim] == [-1, 2]
    request.metadata_field[:] = ["other"]
    with fails(CODE.INVALID_ARGUMENT, "signature_def"):
        client.call("PredictionService", "GetModelMetadata", request, GetModelMetadataResponse)


# --- versions ---------------------------------------------------------------------------------------------------------


def export(path, version, value, step=1, codec=None, skip_zero=False):
    table = test_hash_table(2, name_suffix=f"v{version}_{time.monotonic_ns()}")
    table.assign(torch.tensor([1]), torch.full((1, 2), float(value)))
    table.name = "T"
    export_ps(path / str(version), {"u": table}, model_name="m", sub_graph="ps_0", global_step=step, codec=codec,
              skip_zero_embedding=skip_zero)  # fmt: skip


def value_of(client, **which):
    return client.predict("m", "lookup", {"u": torch.tensor([1])}, **which)["u"][0, 0].item()


def test_policies_choose_versions(serve, tmp_path):
    for version in (9, 10, 11):
        export(tmp_path, version, version)
    cases = {("latest", 1): [11], ("latest", 2): [10, 11], ("all", None): [9, 10, 11], ("specific", (9, 10)): [9, 10],
             ("latest_once", 1): [11]}  # fmt: skip
    for (policy, data), expected in cases.items():
        _, client = serve(config_of(m=(tmp_path, policy, data)))
        assert sorted(client.status("m")) == expected, policy
        assert value_of(client) == expected[-1]
        assert value_of(client, version=expected[0]) == expected[0]


def test_a_new_version_replaces_the_old_one_only_under_latest(serve, tmp_path):
    export(tmp_path, 1, 1)
    _server, client = serve(config_of(m=(tmp_path, "latest")), poll=0.05)
    _, once = serve(config_of(m=(tmp_path, "latest_once")), poll=0.05)
    _, polled_once = serve(config_of(m=(tmp_path, "latest")), poll=0)
    export(tmp_path, 2, 2)
    eventually(lambda: value_of(client) == 2)
    eventually(lambda: client.status("m") == {2: ModelState.AVAILABLE, 1: ModelState.END})
    with fails(CODE.NOT_FOUND, "available versions are [2]"):
        value_of(client, version=1)
    assert value_of(once) == 1
    assert value_of(polled_once) == 1


def test_a_broken_version_is_reported_and_the_old_one_goes_on(serve, tmp_path):
    export(tmp_path, 1, 1)
    _server, client = serve(config_of(m=(tmp_path, "latest")), poll=0.05)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{}")
    (tmp_path / "broken").rename(tmp_path / "2")
    eventually(lambda: client.status("m").get(2) == ModelState.END)
    request = GetModelStatusRequest()
    request.model_spec.name = "m"
    answer = client.call("ModelService", "GetModelStatus", request, GetModelStatusResponse)
    broken = next(each for each in answer.model_version_status if each.version == 2)
    assert broken.status.error_code == 13
    assert "manifest" in broken.status.error_message
    assert value_of(client) == 1


def test_reload_adds_and_removes_models_over_the_wire(serve, tmp_path):
    export(tmp_path / "a", 1, 5)
    _server, client = serve(model_root=tmp_path)
    request = ReloadConfigRequest(config=config_of(m=(tmp_path / "a",)))
    client.call("ModelService", "HandleReloadConfigRequest", request, ReloadConfigResponse)
    assert value_of(client) == 5
    outside = ReloadConfigRequest(config=config_of(m=("/etc",)))
    with fails(CODE.INVALID_ARGUMENT, "must be inside"):
        client.call("ModelService", "HandleReloadConfigRequest", outside, ReloadConfigResponse)
    with fails(CODE.INVALID_ARGUMENT, "must have a model_config_list"):
        client.call("ModelService", "HandleReloadConfigRequest", ReloadConfigRequest(), ReloadConfigResponse)
    assert value_of(client) == 5
    empty = ReloadConfigRequest()
    empty.config.model_config_list.SetInParent()
    client.call("ModelService", "HandleReloadConfigRequest", empty, ReloadConfigResponse)
    with fails(CODE.NOT_FOUND, "none"):
        client.status("m")


def test_models_that_a_reload_removed_can_be_added_again_over_the_wire(serve, tmp_path):
    export(tmp_path, 1, 5)
    server, client = serve(config_of(m=(tmp_path,)))
    for config in (config_of(), config_of(m=(tmp_path,))):
        config.model_config_list.SetInParent()
        request = ReloadConfigRequest(config=config)
        client.call("ModelService", "HandleReloadConfigRequest", request, ReloadConfigResponse)
    assert value_of(client) == 5
    with pytest.raises(ConfigError, match="model 'x': base_path must not be empty"):
        server.reload(config_of(x=("",)))
    assert value_of(client) == 5


def test_labels_name_versions(serve, tmp_path):
    for version in (1, 2):
        export(tmp_path, version, version)
    config = config_of(m=(tmp_path, "all"))
    config.model_config_list.config[0].version_labels["stable"] = 1
    config.model_config_list.config[0].version_labels["gone"] = 7
    _, client = serve(config)
    assert value_of(client, label="stable") == 1
    for label, found in (("stable", [1]), ("gone", None), ("other", None)):
        request = GetModelStatusRequest()
        request.model_spec.name, request.model_spec.version_label = "m", label
        if found is None:
            with fails(CODE.NOT_FOUND, "7" if label == "gone" else "label"):
                client.call("ModelService", "GetModelStatus", request, GetModelStatusResponse)
        else:
            answer = client.call("ModelService", "GetModelStatus", request, GetModelStatusResponse)
            assert [each.version for each in answer.model_version_status] == found


def test_no_request_fails_while_versions_switch_under_load(serve, tmp_path):
    export(tmp_path, 1, 1)
    server, client = serve(config_of(m=(tmp_path, "latest")), poll=0.02)
    stop, failures, answers = threading.Event(), [], []

    def ask():
        own = Client(server)
        while not stop.is_set():
            try:
                answers.append(value_of(own))
            except grpc.RpcError as error:
                failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(2, 8):
        export(tmp_path, version, version)
        eventually(lambda version=version: client.status("m").get(version) == ModelState.AVAILABLE)
    eventually(lambda: failures or 7 in answers[-4:])
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert max(answers) == 7


# --- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (FloatCompressorConfig(fp16=FloatCompressorConfig.Fp16()), torch.tensor([0.3, -0.7]).half().float()),
        (FloatCompressorConfig(fixed_r8=FloatCompressorConfig.FixedR8(r=2.0)), torch.tensor([0.296875, -0.703125])),
        (FloatCompressorConfig(one_bit=FloatCompressorConfig.OneBit(amplitude=0.25)), torch.tensor([0.25, -0.25])),
    ],
    ids=["fp16", "fixed_r8", "one_bit"],
)
@pytest.mark.parametrize("quantize", [False, True])
def test_pushes_to_a_quantized_replica_store_the_same_row_in_either_form(serve, tmp_path, codec, expected, quantize):
    from shoal.serving.sync.monolith.push_client import PushClient
    from shoal.serving.sync.push import encode_push
    from shoal.serving.sync.quantize import encoders

    export(tmp_path, 1, 1, codec=codec)
    server, client = serve(config_of(m=(tmp_path,)))
    values = torch.tensor([[0.3, -0.7]]).numpy()
    batch = DeltaBatch("m", "hashtable_assign", 60_000, False, [Delta("T", 2, torch.tensor([5]).numpy(), values)])
    pusher = PushClient(f"127.0.0.1:{server.port}", quantize=quantize)
    assert pusher.push(batch).status_code == 0
    got = client.predict("m", "lookup", {"u": torch.tensor([5])})["u"][0]
    assert torch.allclose(got, expected)
    if quantize:
        asked = encoders(eventually(lambda: pusher._form(batch, time.monotonic() + 60).codecs))
        assert len(encode_push(batch, asked)[0]) < len(encode_push(batch)[0])
    pusher.close()


@pytest.mark.parametrize("quantize", [False, True])
def test_pushes_to_a_quantized_multi_table_store_the_same_rows_in_either_form(serve, tmp_path, quantize):
    """Each sub-table in its own form: bytes, half floats, plain floats and signs in one message."""
    from shoal.serving.sync.monolith.push_client import PushClient
    from shoal.serving.sync.push import encode_push
    from shoal.serving.sync.quantize import encoders
    from shoal.table import HashTableConfigInstance

    forms = {
        "a": FloatCompressorConfig(fixed_r8=FloatCompressorConfig.FixedR8(r=2.0)),
        "b": FloatCompressorConfig(fp16=FloatCompressorConfig.Fp16()),
        "c": FloatCompressorConfig(fp32=FloatCompressorConfig.Fp32()),
        "d": FloatCompressorConfig(one_bit=FloatCompressorConfig.OneBit(amplitude=0.25)),
    }
    configs = {}
    for dim, (name, form) in enumerate(forms.items(), 1):
        config = instance(dim).table_config
        config.entry_config.segments[0].comp_config.CopyFrom(form)
        configs[name] = HashTableConfigInstance(config, [1.0])
    table = MultiHashTable.from_configs(configs, name_suffix="q")
    export_ps(tmp_path / "1", [table], model_name="m", sub_graph="ps_0", global_step=1)
    server, client = serve(config_of(m=(tmp_path,)))
    torch.manual_seed(4)
    ids = {"a": [5, -6, 7], "b": [1], "c": [], "d": [2, 3]}
    rows = {name: torch.rand(len(ids[name]), dim) * 1.9 - 0.95 for dim, name in enumerate(ids, 1)}
    deltas = [
        Delta(name, dim, torch.tensor(ids[name], dtype=torch.int64).numpy(), rows[name].numpy())
        for dim, name in enumerate(ids, 1)
    ]
    signature = "MonolithMultiHashTable_q/raw_assign"
    batch = DeltaBatch("m", signature, 60_000, True, deltas)
    pusher = PushClient(f"127.0.0.1:{server.port}", quantize=quantize)
    response = pusher.push(batch)
    assert (response.status_code, response.update_num) == (0, 6), response
    got = client.predict("m", "lookup", {name: torch.tensor(each, dtype=torch.int64) for name, each in ids.items()})
    assert torch.allclose(got["a"], (rows["a"] * 64 + 0.5).floor() / 64)
    assert torch.equal(got["b"], rows["b"].half().float())
    assert got["c"].shape == (0, 3)
    assert torch.equal(got["d"], torch.where(rows["d"] > 0, 0.25, -0.25))
    if quantize:
        asked = encoders(eventually(lambda: pusher._form(batch, time.monotonic() + 60).codecs))
        assert list(asked) == ["flat_value"]
        assert len(encode_push(batch, asked)[0]) < len(encode_push(batch)[0])
        with fails(CODE.INVALID_ARGUMENT, "10 bytes for these ids, got 3"):
            inputs = {"id": torch.tensor([5, 6, 7, 8]), "id_split": torch.tensor([0, 2, 3, 3, 4])}
            client.predict("m", signature, {**inputs, "flat_value": torch.zeros(3, dtype=torch.uint8)})
    pusher.close()


def test_zeros_are_tombstones_where_the_export_says_so(serve, tmp_path):
    export(tmp_path, 1, 1, skip_zero=True)
    server, client = serve(config_of(m=(tmp_path,)))
    client.predict("m", "hashtable_assign", {"T_id": torch.tensor([1]), "T_value": torch.zeros(1, 2)})
    assert server.model("m").current().servable.tables["T"].rows() == 0


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_standalone_model_answers_and_micro_batches(serve, tmp_path, net):
    table = test_hash_table(4, name_suffix="user")
    table.assign(torch.arange(50), torch.randn(50, 4))
    tool = ModelExporter(
        tmp_path, model_name="m", net=net, features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export([{"u": table}], global_step=1)
    server, client = serve(config_of(m=(tmp_path / "exported_models",)))
    requests = [{"user": torch.randint(0, 60, (b, 3)), "price": torch.randn(b, 2)} for b in (1, 2, 5, 1) * 6]
    results = [None] * len(requests)

    def ask(index):
        results[index] = Client(server).predict("m", "", requests[index])["score"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for request, got in zip(requests, results, strict=True):
        rows = table.lookup(request["user"].reshape(-1)).reshape(len(got), 3, 4).sum(1)
        assert torch.allclose(got, net(user=rows, price=request["price"])["score"], atol=1e-6)
    with fails(CODE.INVALID_ARGUMENT, "price"):
        client.predict("m", "", {"user": torch.tensor([[1]])})
    assert client.predict(
        "m", "serving_default", {"user": torch.zeros(0, 3, dtype=torch.int64), "price": torch.zeros(0, 2)}
    )["score"].shape == (0,)


def test_an_entry_asks_its_shards(serve, tmp_path, net):
    rows = torch.randn(20, 4)
    shards = []
    for shard in range(2):
        table = test_hash_table(4, name_suffix=f"user_{shard}")
        ids = torch.arange(-10, 10)
        mine = torch.remainder(ids, 2) == shard
        table.assign(ids[mine], rows[mine])
        shards.append({"u": table})
    tool = ModelExporter(
        tmp_path,
        model_name="m",
        net=net,
        features={"user": Feature(slot="u", combiner="mean")},
        dense={"price": torch.zeros(2, 2)},
    )
    tool.export(shards, global_step=1, mode=ExportMode.DISTRIBUTED)
    base = tmp_path / "exported_models"
    ps_servers = [serve(config_of(**{f"m:ps_{i}": (base / f"ps_{i}", "latest_once")}))[0] for i in range(2)]
    _, client = serve(config_of(m=(base / "entry",)))
    set_address_table({f"m:ps_{i}": [f"127.0.0.1:{server.port}"] for i, server in enumerate(ps_servers)})
    request = {"user": torch.tensor([[-3, 4, 4], [9, 0, -10]]), "price": torch.randn(2, 2)}
    got = client.predict("m", "", request)["score"]
    pooled = rows[request["user"] + 10].mean(1)
    assert torch.allclose(got, net(user=pooled, price=request["price"])["score"], atol=1e-6)
    set_address_table({"m:ps_0": []})
    with fails(CODE.UNAVAILABLE, "m:ps_"):
        client.predict("m", "", request)


@pytest.mark.parametrize("unified", [True, False])
def test_an_entry_sends_its_pooled_rows_to_the_net_on_another_host(serve, tmp_path, net, unified):
    rows = torch.randn(10, 4)
    table = test_hash_table(4, name_suffix="user_0")
    table.assign(torch.arange(10), rows)
    tool = ModelExporter(
        tmp_path,
        model_name="m",
        net=net,
        features={"user": Feature(slot="u", combiner="mean")},
        dense={"price": torch.zeros(2, 2)},
    )
    tool.export([{"u": table}], global_step=1, mode=ExportMode.DISTRIBUTED, with_remote_gpu=True, timestamp=7)
    base = tmp_path / "exported_models"
    assert not (base / "entry/7/variables").exists()  # the net is in another sub-graph
    names = {sub: f"m:{sub}" if unified else sub for sub in ("entry", "ps_0", "dense_0")}
    shards, _ = serve(config_of(**{names["ps_0"]: (base / "ps_0", "latest_once")}))
    dense, dense_client = serve(config_of(**{names["dense_0"]: (base / "dense_0",)}))
    _, client = serve(config_of(**{names["entry"]: (base / "entry",)}))
    keys = ("m:ps_0", "m:dense_0") if unified else ("ps:0", "dense:0")
    set_address_table({key: [f"127.0.0.1:{each.port}"] for key, each in zip(keys, (shards, dense), strict=True)})
    request = {"user": torch.tensor([[3, 4, 4], [9, 0, 77]]), "price": torch.randn(2, 2)}
    got = client.predict(names["entry"], "", request)["score"]
    pooled = torch.cat([rows, torch.zeros(1, 4)])[request["user"].clamp(max=10)].mean(1)
    expected = net(user=pooled, price=request["price"])["score"]
    assert torch.allclose(got, expected, atol=1e-6)
    direct = dense_client.predict(names["dense_0"], "gpu_remote_call", {"user": pooled, "price": request["price"]})
    assert torch.allclose(direct["score"], expected, atol=1e-6)
    with fails(CODE.INVALID_ARGUMENT, "serving_default"):
        dense_client.predict(names["dense_0"], "", request)


def test_the_address_tells_the_port_that_was_picked(serve):
    server, client = serve()
    assert server.address == f"127.0.0.1:{server.port}"
    assert server.port
    server.serve_tables("m", {"user": table_of()})
    client.channel = grpc.insecure_channel(server.address)
    assert client.predict("m", "lookup", {"user": torch.tensor([1])})["user"].tolist() == [[2, 3]]
    client.channel.close()


def test_a_server_is_started_once(serve):
    server, client = serve()
    server.serve_tables("m", table_of("once"))
    assert server.start() is server
    assert client.status("m") == {1: 30}
    server.stop(0)
    with pytest.raises(ConfigError, match="stopped cannot be started again"):
        server.start()


def test_tables_that_cannot_be_served_together_are_refused(serve):
    server, _ = serve()
    one, two = table_of("x"), table_of("y")
    with pytest.raises(ConfigError, match="must be unique, got 'MonolithHashTable_x' twice"):
        server.serve_tables("m", [one, two, one])
    with pytest.raises(ConfigError, match="HashTable or MultiHashTable objects, got int"):
        server.serve_tables("m", [two, 5])
    assert server.models() == []


def test_a_server_that_cannot_start_leaves_no_port_open(serve):
    taken, _ = serve(rest_address="127.0.0.1:0")
    server = ModelServer(f"127.0.0.1:{free_port()}", rest_address=f"127.0.0.1:{taken.rest_port}")
    with pytest.raises(ConfigError, match="cannot listen"):
        server.start()
    eventually(lambda: not is_open(server.address))
    with pytest.raises(ConfigError, match="distinct"):
        ModelServer(server.address, config=ModelServerConfig(model_config_list={"config": [{}, {}]}))
    again = ModelServer(server.address)  # the port is free again
    again.stop(0)
    again.stop(0)


def test_an_error_about_very_many_inputs_still_has_its_code(serve):
    server, client = serve()
    server.serve_tables("m", {"user": table_of()})
    with fails(CODE.INVALID_ARGUMENT, "inputs must be"):
        client.predict("m", "lookup", {f"a_long_name_of_an_input_{i}": torch.zeros(1) for i in range(3000)})


def test_stopping_lets_running_requests_finish(serve):
    gate, inside = threading.Event(), threading.Event()
    server, client = serve()
    server.serve_tables("m", {"user": table_of()})
    signature = server.model("m").current().servable.signatures["lookup"]
    run = signature.run
    signature.run = lambda inputs: inside.set() or (gate.wait(60) and run(inputs))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(client.predict("m", "lookup", {"user": torch.tensor([1])})))
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.3, gate.set).start()
    server.stop(60)
    thread.join(60)
    assert answers[0]["user"].tolist() == [[2, 3]]


def test_a_stock_generated_client_of_another_descriptor_pool_works(serve):
    """The same field numbers under the real names, built here from scratch as tensorflow_serving's protos are."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()

    def message(file, name, fields):
        proto = file.message_type.add(name=name)
        for number, field, kind, label, type_name in fields:
            proto.field.add(number=number, name=field, type=kind, label=label, type_name=type_name or None)
        return proto

    one, many, text, raw, group = 1, 3, 9, 12, 11
    file = descriptor_pb2.FileDescriptorProto(name="stock.proto", package="tensorflow.serving", syntax="proto3")
    message(file, "ModelSpec", [(1, "name", text, one, ""), (3, "signature_name", text, one, "")])
    shape = message(file, "Shape", [(2, "dim", group, many, ".tensorflow.serving.Shape.Dim")])
    shape.nested_type.add(name="Dim").field.add(number=1, name="size", type=3, label=one)
    lists = [(5, "float_val", 2, many, ""), (10, "int64_val", 3, many, "")]
    head = [(1, "dtype", 5, one, ""), (2, "tensor_shape", group, one, ".tensorflow.serving.Shape")]
    message(file, "Tensor", [*head, (4, "tensor_content", raw, one, ""), *lists])
    message(file, "Entry", [(1, "key", text, one, ""), (2, "value", group, one, ".tensorflow.serving.Tensor")])
    spec = (1, "model_spec", group, one, ".tensorflow.serving.ModelSpec")
    message(file, "Request", [spec, (2, "inputs", group, many, ".tensorflow.serving.Entry")])
    message(file, "Response", [(1, "outputs", group, many, ".tensorflow.serving.Entry")])
    pool.Add(file)
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.serving.{name}"))
        for name in ("Request", "Response")
    }
    server, client = serve()
    server.serve_tables("m", {"user": table_of()})
    request = classes["Request"]()
    request.model_spec.name, request.model_spec.signature_name = "m", "lookup"
    entry = request.inputs.add(key="user")
    entry.value.dtype = 9
    entry.value.tensor_shape.dim.add(size=1)
    entry.value.tensor_content = (1).to_bytes(8, "little")
    path = "/tensorflow.serving.PredictionService/Predict"
    call = client.channel.unary_unary(path, classes["Request"].SerializeToString, classes["Response"].FromString)
    (output,) = call(request, timeout=60).outputs
    assert list(output.value.float_val) == [2.0, 3.0]
