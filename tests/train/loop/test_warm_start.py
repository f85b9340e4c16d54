"""A run that starts with another run's rows and weights: all of them, those that fit, on ranks; and its notes."""

import shutil

import pytest
import torch

from shoal import fid
from shoal.errors import ConfigError
from shoal.table.offline.source import open_source
from shoal.testing import run_ranks
from shoal.train.loop.trainer import trainer
from tests.train.loop.helpers import Told, run, settings


@pytest.fixture(scope="module")
def former(tmp_path_factory, data):
    out = tmp_path_factory.mktemp("former")
    held = [str(data / "eval.tsv")]
    told = run(settings(data, out, data_dot_eval=held))
    return out, told


def begin(config, path):
    told = Told()
    return trainer(config, reporter=told, init_from=str(path)), told


def weights_of(folder):
    return {
        (table, id_): row.tolist()
        for table, batch in open_source(folder).scan()
        for id_, row in zip(batch.ids.tolist(), batch.weights.copy(), strict=True)
    }


def test_the_same_model_begins_where_the_other_ended(data, former, tmp_path):
    out, told = former
    config = settings(data, tmp_path, data_dot_eval=[str(data / "eval.tsv")])
    opened, said = begin(config, out)
    with opened as one:
        assert one.at.step == 0
        assert one.evaluate()["logloss"] == pytest.approx(told.evaluations[-1]["logloss"], rel=1e-6)
        assert one.rows.size() == told.ended["rows"]
        one.run()
    text = "\n".join(said.notes)
    assert "rows of 26 features" in text
    assert f"taken: {told.ended['rows']:,} rows" in text
    assert "new:" not in text
    assert "left out" not in text
    again, said = begin(config, out)  # resumes from its own checkpoint
    with again as one:
        assert one.at.step > 0
    assert any("is ignored, because the run resumes" in note for note in said.notes)


def test_features_are_found_by_name_wherever_they_stand_and_whatever_table_they_have(data, former, tmp_path):
    out, _ = former
    config = settings(data, None, data_dot_sparse=["C5", "C1", "C3"], **{"table_dot_features.C3.lr": 0.5})
    opened, said = begin(config, out / "ckpt-00000032")
    old = weights_of(out)
    slots = {5: ("features", 1), 1: ("features", 2), 3: ("features.C3", 3)}
    with opened as one:
        count = 0
        for (_, id_), row in old.items():
            if fid.slot_v2(id_) in slots:
                table, slot = slots[fid.slot_v2(id_)]
                count += 1
                if count % 17 == 0:
                    got, there = one.rows.tables[table].find(torch.tensor([fid.make_v2(slot, id_)]))
                    assert there.all()
                    assert got[0].tolist() == row
        assert one.rows.size() == count
    text = "\n".join(said.notes)
    assert f"taken: {count:,} rows of 3 features" in text
    assert "rows of C2, which is not a feature of this run" in text
    assert "there [" in text  # layers whose width depends on the features are new


def test_other_dims_and_definitions_are_left_out_by_name(data, former):
    out, _ = former
    opened, said = begin(settings(data, None, table_dot_dim=3), out)
    with opened as one:
        assert one.rows.size() == 0
    assert any("of dim 2; here it is 3" in note for note in said.notes)
    opened, said = begin(settings(data, None, features_dot_C2={"kind": "text", "default": "none"}), out)
    with opened as one:
        assert one.rows.size() > 0
    assert any("rows of C2, which has another definition here" in note for note in said.notes)


def test_what_is_not_a_checkpoint_is_refused(data, tmp_path):
    for path in (tmp_path, tmp_path / "absent", data / "train.tsv", tmp_path / "ckpt-00000007"):
        with pytest.raises(ConfigError, match="--init-from"):
            trainer(settings(data), init_from=str(path)).__enter__()


def test_a_damaged_one_is_refused(data, former, tmp_path):
    shutil.copytree(former[0] / "ckpt-00000032", tmp_path / "ckpt-00000032")
    dense = tmp_path / "ckpt-00000032" / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:-5])
    with pytest.raises(Exception, match="dense"):
        trainer(settings(data), init_from=str(tmp_path / "ckpt-00000032")).__enter__()


def begun(rank, world, *, data, path):
    with trainer(settings(data), init_from=str(path)) as one:
        return one.rows.size(), [value.sum().item() for value in one.model.state_dict().values()]


def test_ranks_share_the_rows(data, former):
    (alone,) = run_ranks(1, begun, data=data, path=former[0])
    assert run_ranks(2, begun, data=data, path=former[0]) == [alone, alone]


def test_rows_go_to_parameter_servers_too(data, former):
    pytest.importorskip("zmq")
    from shoal.sharded.ps import Engine, ParameterServer, Shard

    with ParameterServer(Engine(Shard(0, 1))) as server:
        opened, _ = begin(settings(data, None, train_dot_ps=[server.address]), former[0])
        with opened as one:
            old = weights_of(former[0])
            (table,) = one.rows.tables.values()
            found = table.lookup(torch.tensor([id_ for _, id_ in old]))
            assert torch.equal(found, torch.tensor(list(old.values())))
