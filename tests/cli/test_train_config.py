"""The configuration of `shoal train`, and its metrics: plain values, no training."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.train.loop.config import OutConfig
from shoal.trainer import Metrics, exact_auc, load_config

MINIMAL = '[data]\ntrain = ["a.tsv"]\n'


def write(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_minimal_configuration_has_defaults_and_paths_of_its_folder(tmp_path):
    config = load_config(write(tmp_path, MINIMAL + '[out]\ndir = "run"\n'))
    assert config.data.train == (str(tmp_path / "a.tsv"),)
    assert config.out.dir == str(tmp_path / "run")
    assert (config.table.dim, config.model.name, config.train.batch_size) == (16, "deepfm", 4096)
    assert len(config.data.schema().sparse) == 26
    assert config.data.schema().log_dense


def test_what_a_section_does_not_know_goes_to_the_model_and_the_format(tmp_path):
    text = MINIMAL + 'format = "csv"\nlabel = "y"\nsparse = ["u"]\nseparator = "|"\n[model]\nhidden = [8]\n'
    config = load_config(write(tmp_path, text))
    assert config.model.options == {"hidden": [8]}
    assert config.data.make_format().ragged


def test_a_served_model_has_the_name_of_its_folder_or_of_the_file(tmp_path):
    def serve(text, changes=None):
        return load_config(write(tmp_path, MINIMAL + text), changes).serve

    assert serve("").name is None
    found = serve('[serve]\ndir = "exports/ctr/"\nevery_s = 60\n')
    assert (found.name, found.every_s, found.keep) == ("ctr", 60.0, 2)
    assert found.dir == str(tmp_path / "exports/ctr")
    assert serve('[serve]\nregistry = "dir:///r"\npush_every_s = 1\n').name == "run"
    assert serve('[serve]\ndir = "exports/ctr"\nmodel = "clicks"\ncodec = "fixed_r8:0.5"\n').name == "clicks"
    assert serve("", {"serve.dir": "x/other"}).name == "other"


def test_changes_stand_above_the_file(tmp_path):
    path = write(tmp_path, MINIMAL + "[train]\nepochs = 2\n")
    config = load_config(path, {"train.epochs": 3, "model.hidden": [4], "table.lr": 1})
    assert (config.train.epochs, config.model.options, config.table.lr) == (3, {"hidden": [4]}, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"section \[data\] is missing"),
        ("[data]\n", r"\[data\] train is missing"),
        ("[data]\ntrain = []\n", "must name the files to train on, got none"),
        ("[data]\ntrain = 3\n", "train must be a list of texts, got 3"),
        (
            MINIMAL + "[trian]\n",
            r"no section \[trian\] \(did you mean 'train'\?\); sections are data, table, model, train,",
        ),
        (
            MINIMAL + "[train]\nepoch = 1\n",
            r"\[train\] has no setting 'epoch' \(did you mean 'epochs'\?\); it has epochs, batch_size",
        ),
        (MINIMAL + "[serve]\nkeep = 0\n", r"\[serve\] keep must be at least 1, got 0"),
        (MINIMAL + "[serve]\nevery_s = 1\n", r"\[serve\] every_s needs a folder for the exports"),
        (MINIMAL + "[serve]\nwhen_better = true\n", r"\[serve\] when_better needs a folder"),
        (MINIMAL + '[serve]\ndir = "e"\nwhen_better = true\n', r"\[serve\] when_better needs files to evaluate on"),
        (MINIMAL + "[serve]\npush_every_s = 1\n", r"\[serve\] push_every_s needs a registry"),
        (MINIMAL + '[serve]\nmodel = "a/b"\n', r"\[serve\] model must be a name without '/', got 'a/b'"),
        (MINIMAL + '[serve]\nmodel = ""\n', r"\[serve\] model must not be empty"),
        (MINIMAL + '[serve]\ncodec = "halv"\n', r"\[serve\] codec must be one of float32, half, .* mean 'half'"),
        (MINIMAL + '[serve]\ncodec = "half:2"\n', r"\[serve\] codec half must be given without a number, got 'half:2'"),
        (MINIMAL + '[serve]\ncodec = "fixed_r8"\n', r"\[serve\] codec must be fixed_r8: and its r, such as"),
        (MINIMAL + '[serve]\ncodec = "one_bit:nan"\n', r"\[serve\] codec must be one_bit: and its amplitude"),
        (MINIMAL + "[train]\nepochs = 0\n", r"\[train\] epochs must be at least 1, got 0"),
        (MINIMAL + "[train]\nepochs = 1.5\n", "epochs must be a whole number, got 1.5"),
        (MINIMAL + "[train]\nepochs = true\n", "epochs must be a whole number, got True"),
        (
            MINIMAL + '[train]\noptimizer = "lion"\n',
            "optimizer must be one of 'adam', 'adamw', 'adagrad', 'sgd', got 'lion'",
        ),
        (MINIMAL + '[table]\noptimizer = "lion"\n', r"\[table\] optimizer must be one of .*adagrad.*got 'lion'"),
        (
            MINIMAL + "[table]\noptimizer_options = { beta = 1 }\n",
            "adagrad has no setting 'beta'; it has .*initial_accumulator",
        ),
        (MINIMAL + "[table]\ndim = 0\n", r"\[table\] dim must be at least 1, got 0"),
        (MINIMAL + "[eval]\npatience = 2\n", "patience needs files to evaluate on"),
        (MINIMAL + 'format = "xml"\n', "format must be one of criteo, csv"),
        (MINIMAL + "colums = [1]\n", "format 'criteo' does not take colums"),
        (MINIMAL + "shufle_rows = 1\n", r"\[data\] has no setting 'shufle_rows' \(did you mean 'shuffle_rows'\?\)"),
        (MINIMAL + 'format = "csv"\nlabel = "y"\nsparse = ["u"]\nseperator = "|"\n', "did you mean 'separator'"),
        (MINIMAL + 'format = "cvs"\n', "got 'cvs' .did you mean 'csv'"),
        (MINIMAL + "sparse = []\ndense = []\n", "dense and sparse must not both be empty"),
        (MINIMAL + "[table]\nadmit_after = 15\n", "admit_after must be at most 14, got 15"),
        (MINIMAL + "[table]\nlr = inf\n", r"\[table\] lr must be at least 0, got inf"),
        (MINIMAL + f"[train]\nseed = {1 << 63}\n", r"\[train\] seed must be a 64-bit integer"),
        (MINIMAL + "[model]\nname.x = 3\n", r"\[model\] name must be a text"),
        (MINIMAL + 'format = "csv"\n', "label must name the column to predict"),
        ("[data\n", "not a TOML file"),
        ("data = 3\n", r"\[data\] must be a section, got 3"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(tmp_path, capsys, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    assert main(["train", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shoal train: ")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "CONFIG.toml or --train FILE … must be given"),
        (["/no/such.toml"], "cannot read the configuration"),
        (["--train", "/no/such.tsv"], "there is no file '/no/such.tsv'"),
        (["--train", "x", "--set", "lr"], "--set must be section.name=value"),
        (["--train", "x", "--set", "lr=3"], "settings must be section.name"),
        (["--generate", "movielens:3", "x"], "--generate must be criteo:N"),
        (["--generate", "criteo:3"], "--generate needs the file to write"),
    ],
)
def test_wrong_usage_ends_with_two_and_one_line(capsys, argv, message):
    assert main(["train", *argv]) == 2
    assert message in capsys.readouterr().err


def test_help_has_examples(capsys):
    assert main(["train", "--help"]) == 0
    assert "shoal train --init" in capsys.readouterr().out
    assert main(["train", "--no-such-flag"]) == 2


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), max_size=40))
def test_auc_counts_pairs(samples):
    scores, labels = np.array([s for s, _ in samples], float), np.array([y for _, y in samples], bool)
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    found = exact_auc(scores, labels)
    assert math.isnan(found) if not pairs else found == pytest.approx(sum(pairs) / len(pairs))


def test_streaming_metrics_agree_with_exact_ones_and_survive_a_checkpoint():
    random = np.random.default_rng(0)
    metrics = Metrics(window=1000)
    logits = random.normal(-1, 2, 20_000).astype(np.float32)
    labels = (random.random(20_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    for part in range(0, 20_000, 700):
        metrics.add(logits[part : part + 700], labels[part : part + 700])
    values = metrics.values()
    assert values["auc"] == pytest.approx(exact_auc(logits, labels), abs=2e-4)
    recent = slice(20_000 - 20_000 % 700 - 700, None)
    assert values["window_auc"] == pytest.approx(exact_auc(logits[recent], labels[recent]))
    wide = logits.astype(float)
    loss = -(labels * -np.log1p(np.exp(-wide)) + (1 - labels) * -np.log1p(np.exp(wide))).mean()
    assert values["logloss"] == pytest.approx(loss, rel=1e-6)
    assert values["calibration"] == pytest.approx((1 / (1 + np.exp(-wide))).sum() / labels.sum())
    again = Metrics(window=1000)
    again.load(metrics.state())
    assert again.values() == values


def test_huge_logits_are_counted_without_a_warning():
    metrics = Metrics()
    metrics.add(np.array([-2000.0, 2000.0], np.float32), np.array([0.0, 1.0], np.float32))
    assert metrics.values() == {"auc": 1.0, "window_auc": 1.0, "logloss": 0.0, "calibration": 1.0}


def test_metrics_of_nothing_are_nan():
    assert all(math.isnan(value) for value in Metrics().values().values())
    empty = Metrics()
    empty.load(Metrics().state())
    assert empty.rows == 0


def test_a_page_on_a_network_names_the_settings_that_it_needs():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:9.*set \[out\] metrics_tls_cert.*or metrics_insecure = true"):
        OutConfig(metrics="0.0.0.0:9").security()
    OutConfig(metrics="0.0.0.0:9", metrics_insecure=True).security()
