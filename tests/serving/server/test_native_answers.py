"""A server that answers natively gives torch's results, and reports what runs a net."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch

from shoal import _core
from shoal.serving import Feature, ModelExporter, ModelServer, ModelServerConfig, gen_model_config
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.server.loader import load_servable
from shoal.serving.server.rest.status_page import snapshot
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.table import test_hash_table
from tests.serving.helpers import eventually

pytestmark = pytest.mark.skipif(not _core.front_available(), reason="the extension was built without nghttp2")


class Deep(torch.nn.Module):
    """All that features can be: pooled, padded, apart."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4 + 6 + 12 + 2, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))

    def forward(self, user, item, words, price):
        made = self.layers(torch.cat([user, item, words.flatten(1), price], 1))
        return {"score": made[:, 0].sigmoid(), "classes": made.softmax(1)}


class Strange(Deep):
    def forward(self, user, item, words, price):
        return {"score": torch.erfinv(super().forward(user, item, words, price)["score"] * 0.9)}


def export(folder, net, version=None, step=1):
    torch.manual_seed(step)
    tables = {slot: test_hash_table(dim, name_suffix=f"{slot}_native_{step}") for slot, dim in (("u", 4), ("i", 6))}
    for table in tables.values():
        table.assign(torch.arange(40), torch.randn(40, table.dim_size))
    features = {
        "user": Feature(slot="u", combiner="mean", padding=0), "item": Feature(slot="i"),
        "words": Feature(slot="u", combiner="none", padding=7),
    }  # fmt: skip
    tool = ModelExporter(folder, model_name="m", net=net, features=features, dense={"price": torch.zeros(2, 2)})
    return Path(tool.export([tables], global_step=step, timestamp=version)[""])


@contextmanager
def serving(base, **fields):
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(base)))
    server = ModelServer(config=config, poll_wait_seconds=0, front="native", **fields).start()
    try:
        yield server
    finally:
        server.stop(0)


def inputs_of(rows, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = lambda n: torch.randint(0, 50, (rows, n), generator=draw)  # noqa: E731
    return {"user": ids(3), "item": ids(2), "words": ids(3), "price": torch.randn(rows, 2, generator=draw)}


def ask(channel, inputs, outputs=()):
    request = encode_request(model_spec("m"), {name: encode_tensor(one) for name, one in inputs.items()}, outputs)
    answer = channel.unary_unary(PREDICT)(request, timeout=60)
    return {name: decode_tensor(value) for name, value in decode_response(answer)[1].items()}


def assert_as_torch(server, where, seeds, outputs=()):
    run = load_servable(where, where.parent).signatures["serving_default"].run
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(8) as pool:
        given = [inputs_of(1 + seed % 5, seed) for seed in seeds]
        for inputs, got in zip(given, pool.map(lambda one: ask(channel, one, outputs), given), strict=True):
            expected = {name: value for name, value in run(inputs).items() if name in outputs or not outputs}
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_native_answers_are_torchs(tmp_path):
    where = export(tmp_path, Deep())
    with serving(where.parent) as server:
        assert_as_torch(server, where, range(40))
        assert_as_torch(server, where, range(10), ["classes"])
        eventually(lambda: server.native_requests > 30, what="batches to be counted")  # after their answers
        assert snapshot(server)["models"][0]["net"] == "native"


def test_a_bad_request_is_told_what_is_wrong_and_others_go_on_natively(tmp_path):
    where = export(tmp_path, Deep())
    with serving(where.parent) as server:
        assert_as_torch(server, where, range(10))
        with grpc.insecure_channel(server.address) as channel:
            for change, says in (
                ({"price": torch.zeros(3, 5)}, "input 'price' must have shape"),
                ({"user": torch.zeros(2, 3, dtype=torch.int64)}, "inputs must have one row per sample"),
                ({"item": torch.zeros(3, 2)}, "input 'item' must be int64, got float"),
                ({"words": torch.zeros(3, 4, dtype=torch.int64)}, "words"),
            ):
                with pytest.raises(grpc.RpcError) as error:
                    ask(channel, inputs_of(3, 0) | change)
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert says in error.value.details()
        before = server.native_requests
        assert_as_torch(server, where, range(30))
        eventually(lambda: server.native_requests > before, what="batches to be counted")


def test_another_version_takes_over(tmp_path):
    first = export(tmp_path, Deep(), 1)
    with serving(first.parent) as server:
        assert_as_torch(server, first, range(10))
        second = export(tmp_path, Deep(), 2, step=2)
        server.refresh()
        eventually(lambda: server.model("m").current().number == 2)
        before = server.native_requests
        assert_as_torch(server, second, range(20))
        eventually(lambda: server.native_requests > before, what="batches to be counted")


def test_a_net_that_the_core_does_not_know_is_torchs(tmp_path, caplog):
    where = export(tmp_path, Strange())
    with caplog.at_level("INFO"), serving(where.parent) as server:
        assert_as_torch(server, where, range(10))
        assert server.native_requests == 0
        assert snapshot(server)["models"][0]["net"] == (
            "torch, since aten.erfinv.default is not among the native operations"
        )
    assert "the net is run by torch, since aten.erfinv.default" in caplog.text
