"""Every file of an export, damaged in every way; and tables whose names map to one file name."""

import pytest
import torch

from shoal import HashTable
from shoal.errors import ConfigError, DataError
from shoal.serving import ExportMode, Feature, ModelExporter
from shoal.serving.server.loader import load_servable
from shoal.testing.damage import damages


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(4, 1)

    def forward(self, user):
        return {"score": self.out(user)}


def table_of(name, value=1.0, rows=10, stride=1):
    return HashTable(4, name=name).assign(torch.arange(rows) * stride, torch.full((rows, 4), value))


class SumTwo(torch.nn.Module):
    def forward(self, user, item):
        return {"score": (user + item).sum(1, keepdim=True)}


class SumThree(torch.nn.Module):
    def forward(self, s0, s1, s2):
        return {"score": (s0 + s1 + s2).sum(1, keepdim=True)}


def exporter(path, slots=("user",)):
    net = (Net, SumTwo, SumThree)[len(slots) - 1]()
    return ModelExporter(path, model_name="m", net=net, features={slot: Feature(slot=slot) for slot in slots})


def predict(where, root, **ids):
    servable = load_servable(where, root)
    inputs = {alias: torch.tensor([[id]]) for alias, id in ids.items()}
    return servable.signatures["serving_default"].run(inputs)["score"].flatten().tolist()


def test_every_damage_of_every_file_of_an_export_is_named(tmp_path):
    where = exporter(tmp_path).export([[table_of("user")]], global_step=1)[""]
    whole = predict(tmp_path / where, tmp_path, user=3)
    paths = sorted(path for path in (tmp_path / where).rglob("*") if path.is_file())
    assert {"manifest.json", "program.pt2", "user.manifest"} < {path.name for path in paths}
    for path in paths:
        for damage in damages(path, flips=4):
            try:
                assert predict(tmp_path / where, tmp_path, user=3) == whole
            except DataError as error:
                assert path.name in str(error)  # noqa: PT017
            else:
                assert path.name == "manifest.json", damage  # only white space was changed


def test_tables_whose_file_names_coincide_keep_their_rows(tmp_path):
    tables = {f"s{i}": table_of(name, i + 1.0) for i, name in enumerate(("u/a", "u:a", "u-a"))}
    where = exporter(tmp_path, tuple(tables)).export([tables], global_step=1)[""]
    assert predict(tmp_path / where, tmp_path, s0=3, s1=99, s2=99) == [4.0]
    assert predict(tmp_path / where, tmp_path, s0=99, s1=3, s2=99) == [8.0]
    assert predict(tmp_path / where, tmp_path, s0=99, s1=99, s2=3) == [12.0]


def test_shards_of_one_name_keep_their_rows_in_a_standalone_export(tmp_path):
    shards = [HashTable(4, name="user").assign(torch.arange(5) * 2 + i, torch.full((5, 4), i + 1.0)) for i in range(2)]
    where = exporter(tmp_path, ("user", "item")).export(
        [[shards[0], table_of("item", 0.0)], [shards[1]]], global_step=1, mode=ExportMode.STANDALONE
    )[""]
    assert predict(tmp_path / where, tmp_path, user=4, item=1) == [4.0]
    assert predict(tmp_path / where, tmp_path, user=5, item=1) == [8.0]


def test_two_tables_of_one_name_in_one_shard_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="names of an export's tables must be unique, got 'user_0' twice; rename one"):
        exporter(tmp_path).export([[table_of("user"), table_of("user")]], global_step=1)
