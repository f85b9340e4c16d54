"""The modules that importing the library loads."""

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "triton", "grpc", "pyarrow", "pandas", "ray", "matplotlib")


def loaded(code):
    check = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import shoal, shoal.nn; shoal.nn.HashEmbeddingBag(shoal.HashTable(2))([[1]]).sum().backward()",
        "import shoal.ops, shoal.sharded; shoal.sharded.AllToAllHashTable, shoal.ops.fused_embedding_to_layout",
    ],
    ids=["a training step", "ops and ranks"],
)
def test_the_compiler_and_servers_are_not_loaded(code):
    assert loaded(code) == "[]"


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("grpc", "zmq", "kazoo", "pyarrow", "rich", "tyro", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def without_extras(code):
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)


def test_without_extras_public_names_can_be_imported_or_say_what_to_install():
    found = without_extras("""
import importlib
from shoal.errors import MissingExtraError

lacking = set()
for name in ("", ".ops", ".table", ".nn", ".models", ".comm", ".data", ".sharded", ".gather", ".serving", ".train"):
    module = importlib.import_module("shoal" + name)
    for one in module.__all__:
        try:
            getattr(module, one)
        except MissingExtraError as error:
            assert 'pip install "shoal[' in str(error), error
            lacking.add(name + "." + one)
assert {".serving.Client", ".train.Trainer"} < lacking, lacking
assert all(one.startswith(".serving.") for one in lacking - {".train.Trainer", ".train.ParameterSyncHook"}), lacking
from shoal.serving import StatusError
from shoal.train import Checkpoints
""")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", ["train", "serve", "ps", "predict"])
def test_a_command_whose_extra_is_not_installed_says_so(command):
    found = without_extras(f"from shoal.cli.main import main; sys.exit(main([{command!r}, '--help']))")
    assert found.returncode == 1
    assert found.stderr.startswith(f"shoal {command}: ")
    assert 'install it with: pip install "shoal[' in found.stderr
    assert found.stderr.count("\n") == 1
