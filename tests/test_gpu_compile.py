"""Every GPU kernel compiles for a Hopper GPU, down to its machine code, on a machine without a GPU.

On such a machine the other tests use Triton's interpreter, which accepts programs that the compiler rejects.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "gpu_compile"


def kernels(package):
    """Names of the kernels that a package's modules launch."""
    found = set()
    for path in (ROOT / "src" / "shoal" / package).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for decorator in map(ast.unparse, node.decorator_list):
                    if decorator in ("Kernel", "Fast") or decorator.startswith("triton.jit("):
                        found.add(node.name)
    return found


def run(script):
    """What a script of the folder printed."""
    triton = pytest.importorskip("triton")
    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas").exists():
        pytest.skip("this Triton brings no assembler for NVIDIA cards")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["DISABLE_PTXAS_OPT"] = "1"  # still assembled, but faster
    paths = [str(ROOT), str(FOLDER), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{script}.py")],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "package"), [("tables", "table/cuda"), ("ops", "ops/cuda")])
def test_every_kernel_compiles_for_a_card_that_is_not_here(script, package):
    assert set(run(script).split()) == kernels(package)


@pytest.mark.timeout(900)
def test_quick_launches_are_those_that_triton_would_make():
    assert "again" in run("launches")
