"""Public names as type checkers see them: stubs that agree with the code, and a user's program."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

SRC = Path(shoal.__file__).parent
STUBS = sorted(SRC.rglob("__init__.pyi"))

PROGRAM = """
import torch
import shoal
from shoal.data import make_format
from shoal.ops import Ragged, reduce_sum
from shoal.serving import ExportMode, Feature, ModelExporter, ModelServer
from shoal.table import AdagradOptimizer, CombineAsSegment, EmbeddingHashTableConfig, HashTableConfigInstance
from shoal.table import MultiHashTable, ZerosInitializer
from shoal.train import AllReduceAggregator

table = shoal.HashTable(dim=16, optimizer=shoal.Adagrad(lr=0.05), expire_after="30d")
rows: torch.Tensor = table.lookup(torch.tensor([1, 2]))
table.assign(torch.tensor([1]), torch.zeros(1, 16)).evict()
exporter = ModelExporter("out", model_name="m", net=torch.nn.Linear(16, 1), features={"user": Feature(slot="user")})
exporter.export([{"user": table}], global_step=1)
server: ModelServer = ModelServer("127.0.0.1:0").start()
segment = CombineAsSegment(16, ZerosInitializer(), AdagradOptimizer(learning_rate=0.1))
config = EmbeddingHashTableConfig(initial_capacity=1)
multi: MultiHashTable = MultiHashTable.from_configs({"user": HashTableConfigInstance(config, [0.1])})
bags = shoal.nn.HashEmbeddingBag(table, combiner="sum")
"""

MISTAKES = {
    "shoal.HashTable(dmi=16)": "dmi",
    "shoal.HashTable()": "dim",
    "shoal.HashTabel(dim=16)": "HashTabel",
    "table.lokup(torch.tensor([1]))": "lokup",
    "shoal.Adagrad(learning_rate=0.1)": "learning_rate",
    "ModelServer(port=8500)": "port",
    "AdagradOptimizer(lr=0.1)": "lr",
    "EmbeddingHashTableConfig(capacity=1)": "capacity",
    "shoal.train.AllReduceAgregator": "AllReduceAgregator",
}


def package_of(stub):
    return ".".join(("shoal", *stub.parent.relative_to(SRC).parts))


def classes(module):
    return [name for name, value in vars(module).items() if isinstance(value, type)]


def check(folder, program):
    """What the type checker says of a program that is not part of this project."""
    pytest.importorskip("pyrefly")
    (folder / "pyrefly.toml").write_text(f'search-path = ["{SRC.parent}"]\n')
    (folder / "program.py").write_text(program)
    command = [str(Path(sys.executable).with_name("pyrefly")), "check", "-c", "pyrefly.toml", "program.py"]
    command += ["--python-interpreter-path", sys.executable, "--output-format", "min-text"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("stub", STUBS, ids=package_of)
def test_every_name_of_a_stub_is_there_and_every_public_name_is_in_its_stub(stub):
    package = importlib.import_module(package_of(stub))
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {each.asname for node in imports for each in node.names} | ({"__version__"} if package is shoal else set())
    if None in names:  # from ``import *``
        starred = [importlib.import_module(node.module) for node in imports if node.names[0].name == "*"]
        names |= {name for module in starred for name in getattr(module, "__all__", classes(module))}
        names -= {None}
    assert names == set(package.__all__)
    assert all(getattr(package, name) is not None for name in names)


def test_the_package_says_that_it_is_typed():
    assert (SRC / "py.typed").exists()


def test_a_users_program_is_accepted(tmp_path):
    result = check(tmp_path, PROGRAM)
    assert result.returncode == 0, result.stdout + result.stderr


def test_mistakes_in_a_users_program_are_found(tmp_path):
    result = check(tmp_path, PROGRAM + "\n".join(MISTAKES) + "\n")
    first = PROGRAM.count("\n") + 1
    for number, (text, word) in enumerate(MISTAKES.items()):
        found = [line for line in result.stdout.splitlines() if f"program.py:{first + number}:" in line]
        assert any(word in line for line in found), f"{text}: {result.stdout}"
