"""`[features.NAME]` of a run: definitions are read, used, saved, and compared with a checkpoint's."""

import json

import pytest
import torch

from shoal.data import Feature, Number, make_inputs
from shoal.errors import ConfigError
from shoal.trainer import load_config
from tests.cli.train_helpers import newest
from tests.train.loop.helpers import run

TOML = """
[data]
train = ["clicks.csv"]
format = "csv"
label = "click"
sparse = ["user"]
shuffle_rows = 0
prefetch = 0

[features.age]
kind = "bucket"
boundaries = [18, 25, 65]
default = 30

[features.country]
kind = "vocabulary"
file = "words/countries.txt"

[features.tags]
separator = "|"
max_length = 2

[features.user_x_country]
kind = "cross"
of = ["user", "country"]

[features.price]
kind = "number"
log = true

[table]
dim = 4

[model]
name = "dcn"
hidden = [8]

[train]
batch_size = 50
threads = 1

[out]
dir = "run"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "countries.txt").write_text("de\nfr\nus\n")
    (tmp_path / "run.toml").write_text(TOML)
    lines = [f"{i % 2},u{i % 7},{i % 80},{'de' if i % 3 else 'xx'},a|b{i % 5}|c,{i}.5" for i in range(200)]
    (tmp_path / "clicks.csv").write_text("click,user,age,country,tags,price\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_sections_define_features_and_numbers(folder):
    schema = load_config(folder / "run.toml").data.schema()
    assert schema.sparse == ("user", "age", "country", "tags", "user_x_country")
    assert schema.dense == ("price",)
    assert schema.feature("country") == Feature(kind="vocabulary", words=("de", "fr", "us"))
    assert schema.number("price") == Number(log=True)


def test_a_run_learns_from_them_and_its_checkpoint_has_them(folder):
    config = load_config(folder / "run.toml")
    run(config)
    manifest = json.loads((newest(folder / "run") / "manifest.json").read_text())
    saved = manifest["content"]["identity"]["schema"]["definitions"]
    assert saved["country"] == {"kind": "vocabulary", "words": ["de", "fr", "us"]}
    made = make_inputs(config.data.schema(), {"user": ["u3"], "country": ["de"], "tags": [["a", "b", "c"]]})
    assert made.offsets.diff().tolist() == [1, 1, 1, 2, 1]
    assert torch.isfinite(made.dense).all()


def test_a_run_with_other_definitions_does_not_resume(folder):
    run(load_config(folder / "run.toml"))
    with pytest.raises(ConfigError, match="boundaries"):
        run(load_config(folder / "run.toml", {"features.age.boundaries": [18, 70]}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"features.age.kind": "buckets"}, "did you mean 'bucket'"),
        ({"features.country.file": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"features.user_x_country.of": ["user", "contry"]}, "did you mean 'country'"),
        ({"features.age": 3}, r"sections \[features.NAME\]"),
        ({"featurs.age.kind": "bucket"}, "did you mean 'features'"),
    ],
)
def test_definitions_that_are_wrong_are_told_before_anything_is_read(folder, changes, match):
    with pytest.raises(ConfigError, match=match):
        load_config(folder / "run.toml", changes)
