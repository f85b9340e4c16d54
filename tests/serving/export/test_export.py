"""Exports: plans, atomic directories, state files, retention, reloading to identical predictions."""

import json
import threading
from pathlib import Path

import pytest
import torch

from shoal.durable import Draft, read_saved, write_saved
from shoal.errors import ConfigError, DataError
from shoal.serving import (
    ExportContext,
    ExportMode,
    Feature,
    Manifest,
    ModelExporter,
    ModelManager,
    ServingModelState,
    delete_old_exports,
    enter_export_mode,
    export_ps,
    get_current_export_ctx,
    get_export_saver_listener_state,
    get_global_step,
    is_dry_run_or_exporting,
    is_exporting,
    is_exporting_distributed,
    is_exporting_standalone,
    overwrite_export_saver_listener_state,
    plan_export,
)
from shoal.serving.export.plan import write_version
from shoal.serving.export.tables import serving_config
from shoal.serving.server.loader import load_servable
from shoal.table import FloatCompressorConfig, MultiHashTable, test_hash_table
from tests.serving.sync.test_sync_client import instance


def table_of(rows=10, dim=4, suffix="user"):
    table = test_hash_table(dim, name_suffix=suffix)
    table.assign(torch.arange(rows), torch.randn(rows, dim))
    return table


# --- context ----------------------------------------------------------------------------------------------------------


def test_export_mode_is_entered_once_and_always_reset():
    assert not is_exporting()
    with enter_export_mode(ExportMode.STANDALONE) as context:
        assert is_exporting()
        assert is_exporting_standalone()
        assert not is_exporting_distributed()
        assert is_dry_run_or_exporting()
        assert get_current_export_ctx() is context
        with pytest.raises(AssertionError), enter_export_mode(ExportMode.DISTRIBUTED):
            pass
    assert get_current_export_ctx() is None
    with pytest.raises(RuntimeError), enter_export_mode(ExportMode.DISTRIBUTED):
        raise RuntimeError
    assert not is_exporting()
    assert [int(mode) for mode in ExportMode] == [0, 1, 2]


def test_an_export_context_collects_graphs_and_signatures():
    context = ExportContext(with_remote_gpu=True)
    graph = context.sub_graph("ps_0")
    assert context.sub_graph("ps_0") is graph
    context.dense_sub_graph("dense_0")
    assert context.sub_graph_num == 1
    context.add_signature(graph, "lookup", {"a": 1}, {"b": 2})
    context.merge_signature(graph, "lookup", {"c": 3}, {})
    assert context.signatures(graph)["lookup"].inputs == {"a": 1, "c": 3}
    context.add_signature(graph, "lookup", {"d": 4}, {})
    assert context.signatures(graph)["lookup"].inputs == {"d": 4}


# --- plans ------------------------------------------------------------------------------------------------------------


def test_plans_share_one_version(tmp_path):
    base = str(tmp_path)
    assert plan_export(base, 2, timestamp=170) == {
        "entry": f"{base}/entry/170", "ps_0": f"{base}/ps_0/170", "ps_1": f"{base}/ps_1/170",
    }  # fmt: skip
    assert list(plan_export(base, 1, timestamp=170, with_remote_gpu=True)) == ["entry", "ps_0", "dense_0"]
    assert list(plan_export(base, 0, timestamp=170, with_remote_gpu=True)) == ["entry", "dense_0"]
    assert list(plan_export(base, 3, timestamp=170, dense_only=True)) == ["entry"]


@pytest.mark.parametrize("version", [-1, 2**63, 20261119220612123456])
def test_a_version_that_servers_could_not_report_is_refused(tmp_path, net, version):
    with pytest.raises(ConfigError, match=f"timestamp must be from 0 to .* got {version}"):
        plan_export(tmp_path, 1, timestamp=version)
    with pytest.raises(ConfigError, match="global_step must be from 0"):
        plan_export(tmp_path, 1, global_step=version, rank=0)
    tool = ModelExporter(tmp_path, model_name="m", net=net, features={"user": Feature(slot="u")})
    with pytest.raises(ConfigError, match="timestamp must be from 0"):
        tool.export([], global_step=1, timestamp=version)
    assert not list(tmp_path.iterdir())
    assert plan_export(tmp_path, 0, timestamp=2**63 - 1) == {"entry": f"{tmp_path}/entry/{2**63 - 1}"}


def test_ranks_agree_by_step(tmp_path):
    base = str(tmp_path)
    assert plan_export(base, 3, timestamp=9, global_step=50, rank=0, with_remote_gpu=True) == {
        "entry": f"{base}/entry/50", "ps_0": f"{base}/ps_0/50", "dense_0": f"{base}/dense_0/50",
    }  # fmt: skip
    assert plan_export(base, 3, global_step=50, rank=2, with_remote_gpu=True) == {"ps_2": f"{base}/ps_2/50"}
    assert plan_export(base, 3, global_step=50, rank=1, dense_only=True) == {}
    with pytest.raises(ConfigError, match="global_step"):
        plan_export(base, 3, rank=0)
    with pytest.raises(ConfigError, match="num_ps must be >= 0, got -1"):
        plan_export(base, -1)


def test_a_taken_second_is_waited_out(tmp_path):
    first = plan_export(tmp_path, 1)
    version = first["entry"].rpartition("/")[2]
    (tmp_path / "ps_0" / version).mkdir(parents=True)
    assert plan_export(tmp_path, 1)["entry"].rpartition("/")[2] > version


def filled(text):
    def write(directory):
        (directory / "f").write_text(text)
        return {"what": "a test"}

    return write


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    def broken(directory):
        (directory / "half").write_text("x")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        write_version(tmp_path / "a" / "5", broken)
    assert list((tmp_path / "a").iterdir()) == []
    assert write_version(tmp_path / "a" / "5", filled("1"))
    assert not write_version(tmp_path / "a" / "5", filled("2"))
    assert (tmp_path / "a" / "5" / "f").read_text() == "1"


def test_two_writers_of_one_directory_leave_one(tmp_path):
    wrote = []
    threads = [
        threading.Thread(target=lambda: wrote.append(write_version(tmp_path / "5", filled("1")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wrote) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["5"]


# --- state and retention ----------------------------------------------------------------------------------------------


def test_the_state_is_text_and_a_missing_file_is_empty(tmp_path):
    assert len(get_export_saver_listener_state(tmp_path / "none").entries) == 0
    state = ServingModelState()
    state.entries.add(export_dir="/x/1", global_step=10)
    overwrite_export_saver_listener_state(tmp_path, state)
    assert (
        tmp_path / "ExportSaverListenerState"
    ).read_text() == 'entries {\n  export_dir: "/x/1"\n  global_step: 10\n}\n'
    assert get_export_saver_listener_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["ExportSaverListenerState"]
    (tmp_path / "ExportSaverListenerState").write_text("nonsense {")
    with pytest.raises(DataError):
        get_export_saver_listener_state(tmp_path)


def test_old_exports_are_deleted_with_their_checkpoints(tmp_path):
    state = ServingModelState()
    for step in (10, 20, 30, 40):
        (tmp_path / str(step)).mkdir()
        state.entries.add(export_dir=str(tmp_path / str(step)), global_step=step)
    overwrite_export_saver_listener_state(tmp_path, state)
    (tmp_path / "10").rmdir()
    deleted = delete_old_exports(tmp_path, [30], ["/m/model.ckpt-40"])
    assert deleted == [str(tmp_path / "10"), str(tmp_path / "20")]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["30", "40"]
    assert [entry.global_step for entry in get_export_saver_listener_state(tmp_path).entries] == [30, 40]
    assert delete_old_exports(tmp_path, [30, 40]) == []


def test_the_step_of_a_checkpoint_path():
    assert get_global_step("/a/model.ckpt-12/model.ckpt-34") == 34
    assert get_global_step("model.ckpt-0") == 0
    for bad in ("/a/model.ckpt-", "/a/model.ckpt-1.index", "/a/ckpt-3", "model.ckpt-3/x"):
        with pytest.raises(AssertionError):
            get_global_step(bad)


# --- content ----------------------------------------------------------------------------------------------------------


def test_a_shard_is_exported_with_its_signatures_and_reloads(tmp_path):
    table = table_of()
    assert export_ps(tmp_path / "ps_0" / "7", {"user": table}, model_name="m", sub_graph="ps_0", global_step=3)
    manifest = json.loads((tmp_path / "ps_0" / "7" / "manifest.json").read_text())
    assert list(manifest)[:8] == [
        "format",
        "model_name",
        "sub_graph",
        "version",
        "global_step",
        "tags",
        "signatures",
        "tables",
    ]
    assert (manifest["format"], manifest["version"], manifest["tags"]) == (1, 7, ["serve"])
    assert sorted(manifest["signatures"]) == ["hashtable_assign", "lookup"]
    assert manifest["signatures"]["lookup"]["outputs"]["user"] == {"dtype": "float", "shape": [None, 4]}
    (described,) = manifest["tables"]
    assert (described["name"], described["kind"], described["dims"], described["asset_dir"]) == (
        table.name,
        "hash",
        [4],
        "assets",
    )
    assert (tmp_path / "ps_0" / "7" / "assets" / f"{table.name}-00000-of-00001").exists()
    servable = load_servable(tmp_path / "ps_0" / "7", tmp_path)
    ids = torch.tensor([3, 99, 0])
    assert torch.equal(servable.signatures["lookup"].run({"user": ids})["user"], table.lookup(ids))
    assert servable.tables[table.name].table.serving


def test_a_multi_table_is_exported_and_reloads(tmp_path):
    table = MultiHashTable.from_configs({"b": instance(2), "a": instance(1)}, name_suffix="0")
    table.assign(
        {"a": (torch.tensor([1]), torch.tensor([[5.0]])), "b": (torch.tensor([2]), torch.tensor([[6.0, 7.0]]))}
    )
    export_ps(tmp_path / "1", table, model_name="m", sub_graph="ps_0", global_step=1)
    servable = load_servable(tmp_path / "1", tmp_path)
    assert sorted(servable.signatures) == ["MonolithMultiHashTable_0/raw_assign", "lookup", "raw_lookup"]
    out = servable.signatures["raw_lookup"].run({"id": torch.tensor([1, 9, 2]), "id_split": torch.tensor([0, 2, 3])})
    assert out["flat_emb"].tolist() == [5, 0, 6, 7]
    result = servable.signatures["MonolithMultiHashTable_0/raw_assign"].run(
        {"id": torch.tensor([9]), "id_split": torch.tensor([0, 1, 1]), "flat_value": torch.tensor([3.0])}
    )
    assert result["result"].item() == 0
    assert servable.signatures["lookup"].run({"a": torch.tensor([9]), "b": torch.tensor([9])})["a"].tolist() == [[3.0]]


def test_shared_embeddings_are_read_from_the_checkpoint(tmp_path):
    table = table_of()
    assets = tmp_path / "model.ckpt-3.assets"
    assets.mkdir()
    table.save(str(assets / table.name))
    final = tmp_path / "exported_models" / "ps_0" / "7"
    export_ps(final, {"user": table}, model_name="m", sub_graph="ps_0", global_step=3, shared_assets=assets)
    assert not (final / "assets").exists()
    servable = load_servable(final, tmp_path)
    assert torch.equal(servable.tables[table.name].table.lookup(torch.arange(10)), table.lookup(torch.arange(10)))
    with pytest.raises(DataError, match="must be inside its root"):
        load_servable(final, final)


@pytest.mark.parametrize("where", ["../../secret", "/etc", "assets/../../../x"])
def test_a_manifest_cannot_lead_out_of_its_root(tmp_path, where):
    export_ps(tmp_path / "m" / "1", {"user": table_of()}, model_name="m", sub_graph="ps_0", global_step=1)
    file = tmp_path / "m" / "1" / "manifest.json"
    saved = read_saved(file)
    saved.fields["tables"][0]["asset_dir"] = where
    write_saved(file, saved.fields, saved.files)
    with pytest.raises(DataError, match="must be inside its root"):
        load_servable(tmp_path / "m" / "1", tmp_path / "m")


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2}', '{"format": 1, "tables": 3}', "[1]"])
def test_broken_manifests_are_data_errors(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"manifest\.json"):
        Manifest.read(tmp_path)


def test_serving_configs_have_no_optimizer_rows_and_the_asked_for_codec():
    codec = FloatCompressorConfig(fp16=FloatCompressorConfig.Fp16())
    config = serving_config(table_of().table_config, codec, skip_zero_embedding=True)
    assert config.entry_config.entry_type == 2
    assert config.skip_zero_embedding
    assert config.entry_config.segments[0].comp_config.WhichOneof("type") == "fp16"


def exporter(tmp_path, net, **fields):
    return ModelExporter(
        tmp_path,
        model_name="m",
        net=net,
        features={"user": Feature(slot="u")},
        dense={"price": torch.zeros(2, 2)},
        **fields,
    )


def test_a_standalone_export_reloads_to_identical_predictions(tmp_path, net):
    table = table_of()
    plan = exporter(tmp_path, net).export([{"u": table}], global_step=5, timestamp=100)
    assert plan == {"": str(tmp_path / "exported_models" / "100")}
    servable = load_servable(tmp_path / "exported_models" / "100", tmp_path)
    assert sorted(servable.signatures) == ["hashtable_assign", "serving_default"]
    inputs = {"user": torch.randint(0, 12, (5, 3)), "price": torch.randn(5, 2)}
    got = servable.signatures["serving_default"].run(inputs)["score"]
    rows = table.lookup(inputs["user"].reshape(-1)).reshape(5, 3, 4).sum(1)
    with torch.inference_mode():
        assert torch.equal(got, net(user=rows, price=inputs["price"])["score"])
    state = get_export_saver_listener_state(tmp_path / "exported_models")
    assert [entry.global_step for entry in state.entries] == [5]


@pytest.mark.parametrize(("combiner", "padding"), [("sum", None), ("mean", None), ("mean", -1), ("none", -1)])
def test_features_are_pooled(combiner, padding):
    from shoal.serving.server.program import pool

    ids = torch.tensor([[1, 2], [3, -1]])
    rows = torch.tensor([[1.0], [2.0], [3.0], [9.0]])
    got = pool(Feature(slot="u", combiner=combiner, padding=padding), ids, rows)
    expected = {
        ("sum", None): [[3.0], [12.0]],
        ("mean", None): [[1.5], [6.0]],
        ("mean", -1): [[1.5], [3.0]],
        ("none", -1): [[[1.0], [2.0]], [[3.0], [0.0]]],
    }
    assert got.tolist() == expected[combiner, padding]


def test_a_distributed_export_writes_every_sub_graph_and_honours_retention(tmp_path, net):
    shards = [{"u": table_of(suffix="u_0")}, {"u": table_of(suffix="u_1")}]
    tool = exporter(tmp_path, net)
    first = tool.export(shards, global_step=1, mode=ExportMode.DISTRIBUTED, timestamp=10, with_remote_gpu=True)
    assert sorted(first) == ["dense_0", "entry", "ps_0", "ps_1"]
    assert list(Manifest.read(tmp_path / "exported_models/dense_0/10").signatures) == ["gpu_remote_call"]
    tool.export(shards, global_step=2, mode=ExportMode.DISTRIBUTED, timestamp=20, existing_steps=[2])
    assert not (tmp_path / "exported_models/entry/10").exists()
    assert (tmp_path / "exported_models/ps_1/20").exists()
    only = tool.export(shards, global_step=3, mode=ExportMode.DISTRIBUTED, timestamp=30, dense_only=True)
    assert list(only) == ["entry"]
    some = tool.export(shards, global_step=4, mode=ExportMode.DISTRIBUTED, timestamp=40, include_graphs=["ps_1"])
    assert list(some) == ["ps_1"]
    with pytest.raises(ConfigError, match="DISTRIBUTED"):
        tool.export(shards, global_step=3, dense_only=True)


def test_a_distributed_export_that_fails_leaves_nothing_and_the_entry_comes_last(tmp_path, net, monkeypatch):
    shards = [{"u": table_of(suffix="u_0")}, {"u": table_of(suffix="u_1")}]
    tool = exporter(tmp_path, net)
    named = []
    real = Draft.publish

    def publish(draft):
        named.append(Path(draft.target).parent.name)
        real(draft)

    monkeypatch.setattr(Draft, "publish", publish)
    tool.export(shards, global_step=5, mode=ExportMode.DISTRIBUTED, timestamp=1, with_remote_gpu=True)
    assert named == ["ps_0", "ps_1", "dense_0", "entry"]
    folders = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    monkeypatch.setattr("shoal.serving.export.exporter.export_program", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tool.export(shards, global_step=6, mode=ExportMode.DISTRIBUTED, timestamp=2)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == folders


def test_a_slot_without_a_table_is_refused(tmp_path, net):
    with pytest.raises(ConfigError, match="no table has the slots"):
        exporter(tmp_path, net).export([{"other": table_of()}], global_step=1)


# --- side-loaded models -----------------------------------------------------------------------------------------------


def deliver(source, version, done=True):
    for sub in ("entry", "ps_0"):
        directory = source / f"m@{version}" / "m" / sub / str(version)
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(str(version))
    if done:
        (source / f"m@{version}.write.done").touch()


def test_the_newest_complete_delivery_is_copied_and_five_are_kept(tmp_path):
    source, receive = tmp_path / "source", tmp_path / "receive"
    source.mkdir()
    manager = ModelManager("m", source, receive, False)
    manager.run_once()
    deliver(source, 9)
    deliver(source, 10)
    deliver(source, 11, done=False)
    (source / "m@7.read.lock").touch()
    manager.wait_secs = 1
    assert manager.start()
    assert manager.received_versions() == [10]
    assert (receive / "m" / "ps_0" / "10" / "manifest.json").read_text() == "10"
    assert not list(source.glob("*.read.lock"))
    for version in range(12, 19):
        deliver(source, version)
        manager.run_once()
    assert manager.received_versions() == [14, 15, 16, 17, 18]
    assert not list(receive.rglob("*-temp"))
    manager.stop()
    assert ModelManager(None, "", "", False).start()


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    source, receive = tmp_path / "source", tmp_path / "receive"
    source.mkdir()
    deliver(source, 1)
    manager = ModelManager("m", source, receive, False)
    import os

    real = os.rename

    def failing(a, b):
        if "ps_0" in str(b):
            raise OSError("disk full")
        real(a, b)

    monkeypatch.setattr("shoal.serving.cluster.rollout.os.rename", failing)
    manager.run_once()
    assert manager.received_versions() == []
    assert not [path for path in receive.rglob("*") if path.is_file()]
    monkeypatch.undo()
    manager.run_once()
    assert manager.received_versions() == [1]
