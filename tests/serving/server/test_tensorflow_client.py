"""An unmodified TensorFlow Serving client in one process, against `shoal serve` in another.

It runs where ``SHOAL_TFS_PYTHON`` names an interpreter that can import ``tensorflow_serving`` (pip install
tensorflow-serving-api), or where the interpreter of the tests can.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from google.protobuf import text_format

from shoal.serving import Feature, ModelExporter, ModelServerConfig, gen_model_config
from shoal.serving.export.tables import export_ps
from shoal.table import MultiHashTable, test_hash_table
from tests.serving.sync.test_online import commands  # noqa: F401
from tests.serving.sync.test_sync_client import instance

PYTHON = os.environ.get("SHOAL_TFS_PYTHON", "")
HERE = importlib.util.find_spec("tensorflow_serving") is not None

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PYTHON and not HERE,
        reason="no tensorflow-serving-api here; set SHOAL_TFS_PYTHON to the interpreter of an environment with it",
    ),
]


def test_an_unmodified_tensorflow_serving_client_is_served(tmp_path, commands, net):  # noqa: F811
    torch.manual_seed(2)
    table = test_hash_table(4, name_suffix="tfs")
    table.assign(torch.arange(20), torch.randn(20, 4))
    multi = MultiHashTable.from_configs({"a": instance(1), "b": instance(2)}, name_suffix="tfs")
    multi.assign(
        {"a": (torch.tensor([4]), torch.tensor([[3.5]])), "b": (torch.tensor([6]), torch.tensor([[1.0, -2.0]]))}
    )
    tool = ModelExporter(
        tmp_path, model_name="movie", net=net, features={"user": Feature(slot="u")}, dense={"price": torch.zeros(2, 2)}
    )
    tool.export([{"u": table}], global_step=3)
    export_ps(tmp_path / "shard" / "1", {"user": table}, model_name="shard", sub_graph="ps_0", global_step=3)
    export_ps(tmp_path / "multi" / "1", [multi], model_name="multi", sub_graph="ps_0", global_step=3)
    config = ModelServerConfig()
    for name, path in {"movie": "exported_models", "shard": "shard", "multi": "multi"}.items():
        config.model_config_list.config.append(gen_model_config(name, str(tmp_path / path)))
    (tmp_path / "models.txt").write_text(text_format.MessageToString(config))
    serving = commands(
        "serve", "--config", tmp_path / "models.txt", "--port", 0, "--rest-port", 0, "--threads", 1, "--json"
    )
    ready = serving.line()
    assert ready["models"] == ["movie", "multi", "shard"]

    def score(ids, price):
        rows = table.lookup(torch.tensor(ids).reshape(-1)).reshape(len(ids), -1, 4).sum(1)
        return net(user=rows, price=torch.tensor(price))["score"].tolist()

    expected, pair = score([[7, 9], [7, 1]], [[0.5, 1.0], [-2.0, 0.0]]), table.lookup(torch.tensor([7, 9]))
    one = score([[7, 9]], [[0.5, 1.0]])
    done = subprocess.run(
        [PYTHON or sys.executable, Path(__file__).with_name("tfs_client.py"), ready["grpc"], ready["rest"]],
        capture_output=True, text=True, timeout=300, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    version = report["version"]
    assert report["serving_default"] == {"score": [[2], pytest.approx(expected)]}
    assert report["content"] == {"score": [[1], pytest.approx(one)]}
    assert report["lookup"] == {"user": [[2, 4], pytest.approx(pair.reshape(-1).tolist())]}
    assert report["raw_lookup"] == {"flat_emb": [[5], [3.5, 0, 0, 1, -2]]}
    assert report["hashtable_assign"] == {"MonolithHashTable_tfs_result": [[], [2]]}
    assert report["after"] == {"user": [[2, 4], list(range(8))]}
    assert report["metadata"] == {
        "version": version,
        "signatures": ["hashtable_assign", "serving_default"],
        "method": "tensorflow/serving/predict",
        "inputs": {"price": ["DT_FLOAT", [-1, 2]], "user": ["DT_INT64", [-1, -1]]},
    }
    assert report["status"] == [[version, "AVAILABLE", 0]]
    assert report["refused"] == ["NOT_FOUND", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
    assert report["rest"] == {"predictions": pytest.approx(one)}
    assert report["rest_status"]["model_version_status"][0]["state"] == "AVAILABLE"
