"""The file of `shoal up`, and the commands that follow from it."""

import os
import re
from contextlib import closing
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.train.loop.toml import load_config
from shoal.up.config import load_online
from shoal.up.local import LocalLauncher
from shoal.up.plan import PORTS, Place, check, names_of, plan
from shoal.up.write.yaml import dump

MINIMAL = """
[data]
train = ["log.csv"]
format = "csv"
label = "click"
[features.user]
[features.item]
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(more="", name="ctr.toml"):
        (tmp_path / name).write_text(MINIMAL + more)
        return load_online(name)

    return write


def plan_of(online):
    ports = iter(range(7000, 8000))
    places = {name: Place(ports={p: next(ports) for p in PORTS[kind]}) for name, kind in names_of(online).items()}
    return {one.name: one for one in plan(online, places)}


def test_a_minimal_file_is_a_trainer_and_a_replica_with_defaults(written):
    found = plan_of(written())
    assert list(found) == ["trainer", "replica-0"]
    assert found["replica-0"].command == (
        "shoal serve ctr.run/exports/ctr --name ctr --host 127.0.0.1 --port 7001 --rest-port 7002 "
        "--registry dir:ctr.run/registry --wait-s 600"
    )
    trainer = found["trainer"].command
    assert trainer.startswith("shoal train ctr.toml --metrics 127.0.0.1:7000 --set out.dir=ctr.run/checkpoints ")
    assert "serve.registry=dir:ctr.run/registry" in trainer
    assert "train.ps" not in trainer


def test_what_the_file_says_is_left_to_it(written):
    online = written(
        '[out]\ndir = "ck"\nevery_s = 5\n[serve]\ndir = "x/movies"\npush_every_s = 9\n[registry]\nurl = "zk://z:2181"\n'
        "[servers]\ncount = 2\ndurability = 'none'\n[replicas]\ncount = 3\nrest_port = 8501\n"
        "options = ['--workers', '4']\n[trainers]\nranks = 2\n[up]\ndir = 'here'\n"
    )
    assert (online.dir, online.checkpoints, online.exports, online.model) == ("here", "ck", "x/movies", "movies")
    found = plan_of(online)
    assert list(found) == ["server-0", "server-1", "trainer", "replica-0", "replica-1", "replica-2"]
    trainer = found["trainer"]
    assert trainer.command.startswith("shoal launch -n 2 -m shoal train ctr.toml ")
    for set_by_the_file in ("out.dir", "out.every_s", "serve.dir", "push_every_s"):
        assert set_by_the_file not in trainer.command
    assert "serve.registry=zk://z:2181" in trainer.command
    assert 'train.ps=["127.0.0.1:7000", "127.0.0.1:7002"]' in trainer.arguments
    assert trainer.after == ("server-0", "server-1")
    assert "--shard 1 --of 2" in found["server-1"].command
    assert found["replica-2"].command.endswith("--registry zk://z:2181 --wait-s 600 --workers 4")
    with closing(LocalLauncher()) as launcher:
        ports = [place.ports for place in launcher.places(online).values()]
    assert [each["rest"] for each in ports if "rest" in each] == [8501, 8502, 8503]


def test_paths_are_those_of_the_file(written, tmp_path, monkeypatch):
    online = written()
    monkeypatch.chdir("/")
    path = os.path.relpath(tmp_path / "ctr.toml")
    there = load_online(path)
    assert there.dir == path.removesuffix(".toml") + ".run"
    assert os.path.abspath(there.exports) == str(tmp_path / online.exports)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("[servers]\nnumber = 2\n", r"\[servers\] has no setting 'number'"),
        ("[replicas]\ncount = -1\n", "count must be at least 0, got -1"),
        ("[replicas]\ncount = 'two'\n", "count must be a whole number, got 'two'"),
        ("[servers]\ndurability = 'all'\n", "must be one of 'none', 'checkpoint', 'log'"),
        ("[up]\nbackoff_s = true\n", "must be a number"),
        ("[replicas]\noptions = '--json'\n", "must be a list of texts"),
        ("[train]\nps = ['h:1']\n[servers]\n", "names servers that already run"),
        ("[serve]\nregistry = ''\n", "must not have an empty registry"),
        ("[replicas]\ncount = 9\nrest_port = 65530\n", "must be at most 65535"),
        ("[up]\nstart_s = 0\n", "start_s must be at least 1, got 0"),
        ("[replica]\ncount = 2\n", r"there is no section \[replica\] \(did you mean 'replicas'\?\)"),
    ],
)
def test_wrong_files_are_refused_before_anything_starts(written, tmp_path, more, why, capsys):
    (tmp_path / "ctr.toml").write_text(MINIMAL + more)
    assert main(["up", "ctr.toml", "--dry-run"]) == 2
    assert re.search(why, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["ctr.toml"]


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ("['-']", r"\[data\] train must not be standard input.*got '-'; write to a folder"),
        ("'redis://h/clicks?from=soon'", r"\[data\] train: redis://h:6379/clicks: from must be .*got 'soon'"),
        ("['days/*.csv', 'kafka://h']", r"\[data\] train: .* kafka://HOST:PORT/TOPIC, got 'kafka://h'"),
    ],
)
def test_a_stream_that_cannot_be_read_is_refused_before_anything_starts(written, tmp_path, train, why, capsys):
    (tmp_path / "ctr.toml").write_text(f"[data]\ntrain = {train}\n")
    assert main(["up", "ctr.toml", "--dry-run"]) == 2
    assert re.search(why, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["ctr.toml"]


def test_files_that_are_no_file(written, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_online("absent.toml")
    (tmp_path / "x.toml").write_text("[")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load_online("x.toml")
    (tmp_path / "y.toml").write_text("")
    with pytest.raises(ConfigError, match=r"must have train = "):
        check(load_online("y.toml"))


def test_every_section_of_a_training_run_is_known(written):
    names = ("data", "features", "table", "model", "train", "eval", "out", "serve", "join", "trainers", "registry")
    written("".join(f"[{name}]\n" for name in names if name not in ("data", "features")))
    with pytest.raises(ConfigError, match=f"sections are {', '.join(['data', *names[2:8], 'features'])}$"):
        load_config(None, {"tables.dim": 2})


def test_a_dry_run_prints_the_commands_and_leaves_nothing(written, tmp_path, capsys):
    written("[servers]\n")
    assert main(["up", "ctr.toml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# server-0", "# trainer", "# replica-0"]
    assert all(line.startswith(("#", "shoal ")) for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["ctr.toml"]


def test_the_verbs_say_when_nothing_runs(written, capsys):
    written()
    assert main(["up", "status", "ctr.toml"]) == 2
    assert "has not run in ctr.run" in capsys.readouterr().err
    assert main(["up", "stop", "ctr.toml"]) == 0
    assert "is not running" in capsys.readouterr().out
    assert main(["up", "restart", "ctr.toml"]) == 2
    assert main(["up", "restart", "ctr.toml", "trainer"]) == 2


# --- files for Compose and Kubernetes ---------------------------------------------------------------------------------


def written_file(capsys, kind):
    assert main(["up", "ctr.toml", "--write", kind]) == 0
    return capsys.readouterr().out


NETWORK = "[servers]\ncount = 2\ninsecure = true\n[replicas]\ncount = 2\ninsecure = true\n"


def test_a_compose_file_is_valid_and_names_the_same_plan_of(written, capsys):
    compose_spec = pytest.importorskip("compose_spec")
    written(NETWORK)
    text = written_file(capsys, "compose")
    found = compose_spec.PyCompose.from_yaml(text).to_dict()["services"]
    assert list(found) == ["server-0", "server-1", "trainer", "replica-0", "replica-1"]
    trainer = found["trainer"]["command"]
    assert trainer[:2] == ["train", "/etc/shoal/online.toml"]
    assert 'train.ps=["server-0:7100", "server-1:7100"]' in trainer
    assert set(found["trainer"]["depends_on"]) == {"server-0", "server-1"}
    assert "--advertise replica-1:8500 --allow-insecure" in " ".join(found["replica-1"]["command"])


def test_kubernetes_manifests_are_valid_and_name_the_same_plan_of(written, capsys):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    online = written(NETWORK, name="ctr.toml")
    found = list(yaml.safe_load_all(written_file(capsys, "k8s")))
    for one in found:
        kubernetes_validate.validate(one, "1.31", strict=True)
    assert [one["kind"] for one in found[:2]] == ["ConfigMap", "PersistentVolumeClaim"]
    with open(online.file) as file:
        assert found[0]["data"]["online.toml"].strip() == file.read().strip()
    sets = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found if one["kind"] == "StatefulSet"}
    assert list(sets) == ["server-0", "server-1", "trainer", "replica-0", "replica-1"]
    arguments = sets["server-1"]["containers"][0]["args"]
    assert arguments[:5] == ["ps", "--shard", "1", "--of", "2"]
    assert "--allow-insecure" in arguments
    services = {one["metadata"]["name"] for one in found if one["kind"] == "Service"}
    assert services == set(sets)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("", r"set \[replicas\] insecure = true"),
        ("[replicas]\ninsecure = true\n[servers]\n", r"set \[servers\] insecure = true"),
        ("[replicas]\ninsecure = true\n[data.x]\n", ""),
    ],
)
def test_containers_without_keys_need_a_word_of_yours(written, more, why, capsys):
    written(more)
    code = main(["up", "ctr.toml", "--write", "compose"])
    assert (code, bool(re.search(why, capsys.readouterr().err))) == ((2, True) if why else (0, True))


def test_a_path_that_no_container_has_is_refused(written, tmp_path, capsys):
    (tmp_path / "ctr.toml").write_text(MINIMAL.replace("log.csv", "/var/log.csv") + "[replicas]\ninsecure = true\n")
    assert main(["up", "ctr.toml", "--write", "k8s"]) == 2
    assert "which a container does not have" in capsys.readouterr().err


def test_the_example_of_the_repository_is_the_one_that_init_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shoal.up.example.ROWS", 100)
    assert main(["up", "--init", str(tmp_path / "try")]) == 0
    assert f"shoal up {tmp_path}/try/online.toml" in capsys.readouterr().err
    root = Path(__file__).parents[2]
    assert (tmp_path / "try" / "online.toml").read_text() == (root / "examples" / "online.toml").read_text()
    assert load_config(tmp_path / "try" / "online.toml").serve.guard.active
    assert len(plan_of(load_online(tmp_path / "try" / "online.toml"))) == 4
    assert main(["up", "--init", str(tmp_path / "try")]) == 2


def test_the_dockerfile_of_the_repository_is_the_one_that_is_printed(capsys):
    root = Path(__file__).parents[2]
    assert main(["up", "--write", "dockerfile"]) == 0
    assert capsys.readouterr().out == (root / "Dockerfile").read_text()


@pytest.mark.parametrize(
    "value", [{"a": {"b": [1, 2.5, None, True, "yes", "x: y", "- z", "", "ü\n", "{"]}, "c": []}, {}]
)
def test_yaml_reads_back_as_it_was(value):
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(dump(value)) == value
