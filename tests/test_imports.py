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
