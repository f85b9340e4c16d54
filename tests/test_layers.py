"""The layers of the library: which packages may import which, what stays private, and the size of folders."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import shoal

SRC = Path(shoal.__file__).parent

# From top to bottom; a module imports only its own package and those above it, also inside functions. Names that
# `shoal.lazy.exports` imports on first use do not count: a package may export names from lower layers.
LAYERS = (
    (
        "errors",
        "fid",
        "ragged",
        "metrics",
        "proto",
        "switches",
        "host",
        "buffers",
        "lazy",
        "stamps",
        "background",
        "_core",
        "_gpu",
    ),
    ("durable",),
    ("observe",),
    ("ops",),
    ("table",),
    ("comm",),
    ("sharded",),
    ("nn", "models"),
    ("data",),
    ("serving",),
    ("train", "trainer"),
    ("gather",),
    ("testing",),
    ("plan", "demo", "up"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def modules():
    """(package, path, syntax tree) of every module."""
    found = []
    for path in sorted(SRC.rglob("*.py")):
        inside = path.relative_to(SRC)
        package = inside.parts[0].removesuffix(".py")
        if package != "__init__" and not path.name.endswith("_pb2.py"):
            found.append((package, str(inside), ast.parse(path.read_text())))
    return found


@cache
def nodes(tree):
    return list(ast.walk(tree))


def imports(tree):
    """Yield (module, name or None) of a module's imports from the library, except those under TYPE_CHECKING."""
    for_types = {
        id(inner)
        for node in nodes(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in nodes(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "shoal":
            yield from ((f"shoal.{alias.name}", None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal."):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("shoal."))


def test_every_package_has_a_layer():
    assert {package for package, _, _ in modules()} <= LEVEL.keys()


def test_a_layer_imports_only_layers_above_it():
    wrong = []
    for package, path, tree in modules():
        for module, _ in imports(tree):
            other = module.split(".")[1]
            if other in LEVEL and other != package and LEVEL[other] >= max(LEVEL[package], 1):
                wrong.append(f"{path} imports {module}")
    assert wrong == []


def test_no_private_name_is_imported_from_another_package():
    wrong = []
    for package, path, tree in modules():
        for module, name in imports(tree):
            parts = module.split(".")[1:]
            private = any(part.startswith("_") and part not in ("_core", "_gpu", "__version__") for part in parts)
            if parts[0] != package and (private or (name or "").startswith("_")):
                wrong.append(f"{path} imports {module}.{name}")
    assert wrong == []


def test_no_private_attribute_of_another_package_is_used():
    owners, used = defaultdict(set), set()
    for package, _, tree in modules():
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef):
                owners[node.name].add(package)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                owners[node.id].add(package)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                (owners[node.attr] if own else used).add(package if own else (package, node.attr))
    crossing = {
        (package, attribute)
        for package, attribute in used
        if owners[attribute]
        and package not in owners[attribute]
        and attribute not in ("_replace", "_timeout", "_version")
    }
    assert crossing == set()


def test_no_folder_has_more_than_twenty_source_files():
    count = defaultdict(int)
    for path in SRC.rglob("*.py"):
        if not path.name.endswith("_pb2.py"):
            count[str(path.parent.relative_to(SRC))] += 1
    core = Path(__file__).parents[1] / "csrc"  # absent if only the wheel and the tests are present
    for path in (*core.rglob("*.cpp"), *core.rglob("*.h")):
        count[str(path.parent.relative_to(core.parent))] += 1
    assert {folder: n for folder, n in count.items() if n > 20} == {}


# Collectives are called in one module; the others use other parts of torch.distributed: checkpoints, pipelines, FSDP,
# DTensor, elastic launching.
TORCH_DISTRIBUTED = {
    "comm/ranks/collectives.py",
    "nn/state/torch_checkpoint.py",
    "train/pipeline/group.py",
    "train/sharding.py",
    "gather/update/regions.py",
    "comm/launch/elastic.py",
}


def test_collectives_of_torch_are_called_in_one_module():
    found = set()
    for _, path, tree in modules():
        for node in nodes(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(f"{module}.{name}".lstrip(".").startswith("torch.distributed") for name in names):
                found.add(path)
    assert found <= TORCH_DISTRIBUTED


# Checkpoints, exports and all other files that readers must never see half written go through `shoal.durable`. The
# modules below rename only files of their own: a registry's, a download's, several at once, parts numbered at the end.
RENAMES = {
    "gather/protocol/spill.py",
    "serving/cluster/directory_store.py",
    "table/offline/exchange.py",
    "train/loop/rows/exported.py",
}


def is_plain_attribute(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def test_only_durable_renames_files_that_others_read():
    found = set()
    for package, path, tree in modules():
        for node in nodes(tree):
            called = f"{node.value.id}.{node.attr}" if is_plain_attribute(node) else ""
            if package != "durable" and called in ("os.rename", "os.renames", "os.replace", "shutil.move"):
                found.add(path)
    assert found <= RENAMES
