"""Rows on a GPU: training with them, and checkpoints that CPU and GPU tables restore from each other.

The first tests run on the CPU in Triton's interpreter, in a process that sets it up before the first import.
"""

import json
import os

import pytest
import torch

from shoal.comm.ranks.torch_ranks import start_ranks
from shoal.data import CRITEO, Stream, make_format
from shoal.durable import read_folder
from shoal.train.loop import checkpoint
from shoal.train.loop.checkpoint import Snapshot
from shoal.train.loop.rows.rows import Rows
from shoal.train.loop.trainer import trainer
from tests.cli.train_helpers import newest
from tests.interpreted import run_tests
from tests.train.loop.helpers import Told, run, settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLES = {
    "model_dot_name": "dcn", "table_dot_features.C3.dim": 5, "table_dot_features.C3.optimizer": "adam",
    "table_dot_features.C4.table": "C3", "table_dot_features.C9.admit_after": 1,
    "table_dot_features.C9.admit_capacity": 1000,
}  # fmt: skip


@pytest.mark.timeout(600)
def test_in_the_interpreter(tmp_path):
    assert "2 passed" in run_tests(tmp_path, __file__, "-k", "checkpoints_of")


def snapshot():
    model = torch.nn.Linear(2, 2)
    return Snapshot(step=3, model=model, optimizer=torch.optim.SGD(model.parameters()), reader={}, metrics={})


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize(("written", "read"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoints_of_either_device_are_read_on_the_other(data, tmp_path, written, read):
    config, ranks = settings(data, **TABLES), start_ranks()
    stream = Stream([str(data / "train.tsv")], make_format("criteo", CRITEO), config.data.schema(), batch_size=12)
    batches = [batch.samples for _, batch in zip(range(2), stream, strict=False)]
    ours, theirs = Rows(config, ranks, written), Rows(config, ranks, read)
    for samples in batches:
        ours.now_s = 1_700_000_000
        ours(samples).sum().backward()
    path = tmp_path / "ckpt-00000003"
    checkpoint.save_checkpoint(str(path), snapshot(), ours.local, ranks, lambda: None)
    manifest = checkpoint.load_checkpoint(read_folder(str(path)), snapshot(), theirs.local, ranks)
    assert [one["name"] for one in manifest.content["tables"]] == ["features", "features.C3", "features.C9"]
    assert theirs.sizes() == ours.sizes()
    assert sum(ours.sizes().values()) > 50
    for one, other in zip(ours.local, theirs.local, strict=True):
        assert one.training_state() == other.training_state()
    ours.eval(), theirs.eval()
    for samples in batches:
        assert torch.equal(ours(samples).cpu(), theirs(samples).cpu())
    ours.train(), theirs.train()
    for rows in (ours, theirs):  # optimizer states and the filter's counts were restored, too
        rows.now_s = 1_700_000_100
        rows(batches[0]).square().sum().backward()
    assert theirs.sizes() == ours.sizes()
    torch.testing.assert_close(ours(batches[0]).cpu(), theirs(batches[0]).cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("given", [{}, TABLES], ids=["one table", "several"])
def test_a_run_with_rows_on_the_gpu_goes_on_with_rows_in_memory_and_back(data, tmp_path, given):
    on_gpu = {"table_dot_device": "cuda", "train_dot_device": "cuda"}
    first = run(settings(data, tmp_path, **given, **on_gpu, train_dot_max_steps=8))
    assert first.ended["table_bytes"] > 0
    second = run(settings(data, tmp_path, **given, train_dot_max_steps=16))
    assert second.ended["rows"] > first.ended["rows"]
    told = Told()
    with trainer(settings(data, tmp_path, **given, **on_gpu), reporter=told) as one:
        assert one.at.step == 16
        assert one.rows.size() == second.ended["rows"]
        assert all(table.on_gpu for table in one.rows.local)
        result = one.run()
    manifest = json.loads((newest(tmp_path) / "manifest.json").read_text())["content"]
    assert sum(table["rows"] for table in manifest["tables"]) == result["rows"]
    alone = run(settings(data, tmp_path / "cpu", **given))
    assert result["logloss"] == pytest.approx(alone.ended["logloss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_that_expired_leave_the_gpu(data, tmp_path):
    given = {"table_dot_device": "cuda", "train_dot_device": "cuda", "table_dot_expire_after": "1d"}
    with trainer(settings(data, tmp_path, **given, train_dot_max_steps=2)) as one:
        one.run()
        rows = one.rows.size()
        one.rows.local[0].set_training_state({"max_update_time": one.rows.now_s + 3 * 86400})
        one.rows.evict()
        assert (rows > 0, one.rows.size()) == (True, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_dense_part_on_the_cpu_is_told(data):
    told = run(settings(data, table_dot_device="cuda", train_dot_max_steps=1))
    assert "rows are on the GPU, but the dense part is on the CPU" in told.notes[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("given", [{}, TABLES], ids=["one table", "several"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pipeline_learns_the_same(data, tmp_path, given, device):
    options = {"table_dot_device": device, "train_dot_device": "cuda", "data_dot_prefetch": 2, **given}
    plain, piped = (
        run(settings(data, tmp_path / str(pipeline), train_dot_pipeline=pipeline, **options)).ended
        for pipeline in (False, True)
    )
    assert [piped[name] for name in ("samples", "rows", "step")] == [
        plain[name] for name in ("samples", "rows", "step")
    ]
    assert piped["logloss"] == pytest.approx(plain["logloss"], rel=1e-4)  # a GPU sums in another order
