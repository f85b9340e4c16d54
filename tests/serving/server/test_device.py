"""`--device cuda` and `--precision`: a GPU answers as the CPU does, also while rows and weights are pushed.

Without a GPU the tests run in Triton's interpreter, in a process that sets it up before the first import; tests of CUDA
graphs need a GPU.
"""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import torch

import shoal
from shoal.errors import ConfigError, UnsupportedError
from shoal.serving import ExportMode, Feature, ModelExporter, ModelServer, ModelServerConfig, gen_model_config
from shoal.serving.export.program_file import load_exported
from shoal.serving.predict import PREDICT, decode_response, encode_request, model_spec
from shoal.serving.server.loader import load_servable
from shoal.serving.server.moments import Fresh
from shoal.serving.server.net.card import CardNet
from shoal.serving.server.net.placement import Placement
from shoal.serving.server.push_log import Mark
from shoal.serving.server.rest.status_page import snapshot
from shoal.serving.tensors import decode_tensor, encode_tensor
from shoal.train.loop.trainer import trainer
from shoal.trainer import load_config
from tests.interpreted import run_tests
from tests.train.loop.helpers import Told
from tests.train.loop.test_export import write_data

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available()
on_device = pytest.mark.skipif(not INTERPRETED and not GPU, reason="needs a GPU or Triton's interpreter")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*eterministic.*:UserWarning")]


@pytest.mark.timeout(600)
def test_in_the_interpreter(tmp_path):
    assert " passed" in run_tests(tmp_path, __file__)


# --- allowed devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"device": "tpu"}, r"device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "meta"}, r"device must be cpu, cuda or cuda:N, got 'meta'"),
        ({"precision": "fp8"}, r"precision must be one of fp32, bf16, got 'fp8'"),
        ({"max_batch_rows": -1}, r"max_batch_rows must be >= 0, got -1"),
    ],
)
def test_other_placements_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        Placement(**fields)


def test_a_gpu_that_is_not_there_is_refused():
    if INTERPRETED:
        pytest.skip("kernels are interpreted")
    with pytest.raises(UnsupportedError, match="device 'cuda:99' needs a CUDA GPU with that number; torch sees"):
        ModelServer(device="cuda:99")


def test_batches_are_larger_on_a_gpu():
    assert Placement().batch_rows == 1024
    assert Placement(max_batch_rows=7).batch_rows == 7
    if INTERPRETED or GPU:
        assert Placement(device="cuda").batch_rows == 8192


# --- a user's net -----------------------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4 + 12 + 2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, user, items, price):
        made = self.layers(torch.cat([user, items.flatten(1), price], 1))
        return {"score": made[:, 0].sigmoid(), "both": made}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(7)
    user, item = (shoal.HashTable(4, name=f"{name}_of_device") for name in ("user", "item"))
    for table in (user, item):
        table.assign(torch.arange(50), torch.randn(50, 4))
    tool = ModelExporter(
        tmp_path_factory.mktemp("net"), model_name="m", net=Net(), dense={"price": torch.zeros(2, 2)},
        features={"user": Feature(slot="u", combiner="mean", padding=0), "items": Feature(slot="i", combiner="none")},
    )  # fmt: skip
    return Path(tool.export([{"u": user, "i": item}], global_step=1, mode=ExportMode.STANDALONE)[""])


def loaded(path, **fields):
    return load_servable(path, path.parent, Placement(**fields))


def inputs_of(rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "user": torch.randint(0, 60, (rows, 3), generator=draw),
        "items": torch.randint(0, 60, (rows, 3), generator=draw),
        "price": torch.randn(rows, 2, generator=draw),
    }


def answer(servable, inputs):
    return servable.signatures["serving_default"].run(inputs)


def assert_same(one, other, inputs, tolerance=1e-5):
    got, expected = answer(one, inputs), answer(other, inputs)
    assert all(value.device.type == "cpu" for value in got.values())
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@on_device
def test_answers_are_those_of_the_cpu(exported):
    host, card = loaded(exported), loaded(exported, device="cuda", max_batch_rows=8)
    assert card.program.runs == "torch on cuda"
    for rows in (1, 2, 5, 8, 11):
        assert_same(card, host, inputs_of(rows, rows))


@on_device
def test_a_server_on_a_device_answers_many_callers(exported):
    host = loaded(exported)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(exported.parent)))
    server = ModelServer(config=config, poll_wait_seconds=0, device="cuda").start()
    wrong = []

    def ask(number):
        with grpc.insecure_channel(server.address) as channel:
            for step in range(4):
                given = inputs_of(1 + (number + step) % 3, 10 * number + step)
                request = encode_request(model_spec("m"), {name: encode_tensor(one) for name, one in given.items()})
                got = decode_response(channel.unary_unary(PREDICT)(request, timeout=120))[1]
                expected = answer(host, given)
                for name, value in expected.items():
                    if not torch.allclose(decode_tensor(got[name]), value, rtol=1e-5, atol=1e-5):
                        wrong.append((number, step, name))

    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not wrong
        assert snapshot(server)["models"][0]["net"] == "torch on cuda"
    finally:
        server.stop(0)


@on_device
def test_bf16_is_close(exported):
    host = loaded(exported)
    for device in ("cpu", "cuda"):
        card = loaded(exported, device=device, precision="bf16", max_batch_rows=8)
        assert card.program.runs.endswith(", bf16")
        given = inputs_of(6)
        got = answer(card, given)
        assert got["both"].dtype == torch.float32
        torch.testing.assert_close(got, answer(host, given), rtol=0.05, atol=0.05)
        assert not torch.equal(got["both"], answer(host, given)["both"])


# --- pushes -----------------------------------------------------------------------------------------------------------


@on_device
def test_pushed_rows_are_seen(exported):
    servables = [loaded(exported), loaded(exported, device="cuda")]
    host, card = servables
    for one in servables:
        for view in one.tables.values():
            view.assign_sub(0, torch.tensor([3, 55]), torch.full((2, 4), 0.5), time.time())
            view.erase_sub(0, torch.tensor([4]), Mark.at(time.time()))
    assert_same(card, host, inputs_of(40))
    for name, view in card.tables.items():
        assert view.lookups[0](torch.tensor([55, 4])).tolist() == [[0.5] * 4, [0.0] * 4]
        assert sorted(view.ids_sub(0).tolist()) == sorted(host.tables[name].ids_sub(0).tolist())
    fresh = {(name, 0): Fresh(torch.tensor([9, 1]), torch.ones(2, 4)) for name in card.tables}
    for one in servables:
        one.program.moments.switch(None, fresh)
    assert_same(card, host, inputs_of(40, 1))
    for one in servables:
        one.program.moments.switch(None, {})
    assert_same(card, host, inputs_of(40, 2))
    later = loaded(exported, device="cuda")
    for name, view in later.tables.items():
        view.copy_sub(0, torch.tensor([3, 4, 55]), card.tables[name], 0)
        view.assign_sub(0, torch.tensor([3]), torch.full((1, 4), 0.5), time.time())
    assert_same(later, host, inputs_of(40, 3))


@on_device
def test_pushed_weights_are_used_by_the_next_batch(exported):
    host, card = loaded(exported), loaded(exported, device="cuda", max_batch_rows=8)
    before = answer(card, inputs_of(5))
    weights = {name: value + 0.25 for name, value in host.program.weights.items()}
    for one in (host, card):
        one.program.moments.switch(one.program.bound(weights), {})
    assert_same(card, host, inputs_of(5))
    assert not torch.allclose(answer(card, inputs_of(5))["both"], before["both"])
    assert all(value.device.type == "cpu" for value in card.program.weights.values())


# --- a model of `shoal train` -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with trainer(load_config(write_data(folder, 64)), reporter=Told()) as one:
        one.run()
        return Path(one.export(str(folder / "exports/ctr")))


@on_device
def test_trained_models_answer_as_on_the_cpu(trained):
    host, card = loaded(trained), loaded(trained, device="cuda", max_batch_rows=8)
    columns = {"user": ["u1", "u3", None], "tags": [["a", "b"], [], ["zz"]], "price": [0.5, None, 9.5]}
    expected, got = (
        one.signatures["serving_default"].run(one.signatures["serving_default"].convert(columns))
        for one in (host, card)
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    name = next(iter(card.tables))
    ids = host.tables[name].ids_sub(0)[:3]
    fresh = {(name, 0): Fresh(ids, torch.ones(len(ids), host.tables[name].dims[0]))}
    again = []
    for one in (host, card):
        one.program.moments.switch(None, fresh)
        again.append(one.signatures["serving_default"].run(one.signatures["serving_default"].convert(columns)))
    torch.testing.assert_close(again[1], again[0], rtol=1e-5, atol=1e-5)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


@on_gpu
def test_graphs_are_captured_at_load_for_every_size(exported):
    card, host = loaded(exported, device="cuda", max_batch_rows=24), loaded(exported)
    assert card.warm_up() == 1
    assert card.program.moments.net.sizes == [1, 2, 4, 8, 16, 24]
    for rows in (1, 3, 17, 24, 25):
        assert_same(card, host, inputs_of(rows, rows))
    weights = {name: value * 2 for name, value in host.program.weights.items()}
    card.program.moments.switch(card.program.bound(weights), {})
    assert card.program.moments.net.sizes == [1, 2, 4, 8, 16, 24]


def test_a_capture_that_fails_for_new_weights_leaves_the_net_without_graphs(exported, monkeypatch):
    def fails(net, rows, like):
        assert net._graphs is not None
        net._graphs = None

    monkeypatch.setattr(CardNet, "_capture", fails)
    net = CardNet(load_exported(exported / "variables" / "program.pt2"), Placement(), graphs=True)
    net._graphs = {rows: SimpleNamespace(inputs={}) for rows in (1, 2)}
    other = net.with_weights({name: value * 2 for name, value in net.weights.items()})
    assert (other.sizes, net.sizes) == ([], [1, 2])


class Solver(torch.nn.Module):
    """Has torch look at a result on the host, which a graph cannot."""

    def forward(self, user, price):
        matrices = price[:, :, None] * price[:, None, :] * 0.1 + torch.eye(2)
        return {"score": user.sum(1) + torch.linalg.inv(matrices).sum((1, 2))}


@on_gpu
def test_a_net_that_cannot_be_captured_is_run_without_graphs(tmp_path, caplog):
    table = shoal.HashTable(4, name="user_solver")
    table.assign(torch.arange(9), torch.randn(9, 4))
    tool = ModelExporter(
        tmp_path, model_name="m", net=Solver(), dense={"price": torch.zeros(2, 2)}, features={"user": Feature(slot="u")}
    )
    path = Path(tool.export([{"u": table}], global_step=1)[""])
    host, card = loaded(path), loaded(path, device="cuda")
    given = {name: value for name, value in inputs_of(5).items() if name != "items"}
    assert_same(card, host, given)
    assert card.program.moments.net.sizes == []
    assert float(torch.rand(3, device="cuda").max()) < 1  # the failed capture has not taken the generator with it
