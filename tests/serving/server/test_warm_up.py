"""Warm-up requests at load: those of TensorFlow Serving's file, else a generated one."""

import logging
import struct
from pathlib import Path

import pytest
import torch

from shoal import _core
from shoal.errors import DataError
from shoal.serving import Feature, ModelExporter, ModelServer, ModelServerConfig, gen_model_config
from shoal.serving.predict import encode_request, model_spec
from shoal.serving.server.loader import load_servable
from shoal.serving.server.warm_up import FILE, requests_in
from shoal.serving.tensors import encode_tensor
from shoal.serving.wire import field
from shoal.table import test_hash_table
from tests.serving.helpers import Net


def masked(data):
    crc = _core.crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(payload):
    size = struct.pack("<Q", len(payload))
    return size + masked(size) + payload + masked(payload)


def logged(request):
    """A ``PredictionLog`` with a ``PredictLog``."""
    return record(field(1, b"") + field(6, field(1, request)))


def request_of(rows=3, signature="", **changed):
    inputs = {"user": torch.zeros(rows, 2, dtype=torch.int64), "price": torch.zeros(rows, 2)} | changed
    return encode_request(model_spec("m", signature), {name: encode_tensor(value) for name, value in inputs.items()})


def export(folder, warmup=None):
    table = test_hash_table(4, name_suffix="warm")
    table.assign(torch.arange(5), torch.randn(5, 4))
    tool = ModelExporter(
        folder, model_name="m", net=Net(), features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)},
        warmup=warmup,
    )  # fmt: skip
    return Path(tool.export([{"u": table}], global_step=1)[""])


def watched(servable):
    """The numbers of rows that a servable's signature is run with from now on."""
    seen = []
    signature = servable.signatures["serving_default"]
    run = signature.run
    signature.run = lambda inputs: (seen.append(len(inputs["user"])), run(inputs))[1]
    return seen


def test_requests_of_the_file_are_answered(tmp_path):
    (tmp_path / "requests").write_bytes(logged(request_of(3)) + logged(request_of(7)))
    where = export(tmp_path / "model", tmp_path / "requests")
    servable = load_servable(where, where.parent)
    seen = watched(servable)
    assert servable.warm_up() == 2
    assert seen == [3, 7]


def test_without_a_file_a_row_is_made_up(tmp_path):
    where = export(tmp_path)
    servable = load_servable(where, where.parent)
    seen = watched(servable)
    assert servable.warm_up() == 1
    assert seen == [1]


def test_a_bad_request_is_logged_and_the_others_are_answered(tmp_path, caplog):
    wrong = request_of(price=torch.zeros(3, 5))
    others = [wrong, request_of(signature="nothing"), request_of(signature="hashtable_assign"), request_of(2)]
    (tmp_path / "requests").write_bytes(b"".join(map(logged, others)) + record(field(2, b"another kind of log")))
    where = export(tmp_path / "model", tmp_path / "requests")
    servable = load_servable(where, where.parent)
    with caplog.at_level(logging.INFO):
        assert servable.warm_up() == 1
    assert "input 'price' must have shape [None, 2] (None = any), got [3, 5]" in caplog.text
    assert "skipping a warm-up request for signature 'nothing'" in caplog.text
    assert "skipping a warm-up request for signature 'hashtable_assign'" in caplog.text


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:30] + b"!" + data[31:]])
def test_a_damaged_file_is_refused_and_the_version_is_served(tmp_path, damage, caplog):
    (tmp_path / "requests").write_bytes(damage(logged(request_of(3))))
    with pytest.raises(DataError, match="requests is damaged"):
        list(requests_in(tmp_path / "requests"))
    where = export(tmp_path / "model", tmp_path / "requests")
    servable = load_servable(where, where.parent)
    assert servable.warm_up() == 0
    assert f"{FILE.name} is damaged" in caplog.text


def test_a_server_warms_what_it_loads(tmp_path, monkeypatch):
    from shoal.serving.server import loader

    warmed = []
    real = loader.warm_up
    monkeypatch.setattr(loader, "warm_up", lambda servable, path: warmed.append((path.name, real(servable, path))))
    where = export(tmp_path)
    config = ModelServerConfig()
    config.model_config_list.config.append(gen_model_config("m", str(where.parent)))
    server = ModelServer(config=config, poll_wait_seconds=0).start()
    try:
        assert warmed == [(where.name, 1)]
    finally:
        server.stop(0)
