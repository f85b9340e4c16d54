"""Keep imports quick: import public names of packages on first use, and do not load the compiler."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import as_missing_extra

_ROOT = Path(__file__).parent.parent
F = TypeVar("F", bound=Callable[..., Any])


def exports(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package, from the imports of its stub (``__init__.pyi``).

    >>> names, get, _ = exports("shoal.nn")
    >>> "Embedding" in names, get("Embedding").__module__
    (True, 'shoal.nn.embedding')
    """
    origins = _imports_of(Path(str(sys.modules[package].__file__)).with_suffix(".pyi"))

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(origins[name])
            is_module = module.__name__ == package or not hasattr(module, name)
            value = import_module(f"{origins[name]}.{name}") if is_module else getattr(module, name)
        except ModuleNotFoundError as error:
            raise as_missing_extra(error) or error from None
        setattr(sys.modules[package], name, value)
        return value

    return list(origins), get, lambda: sorted(origins)


def _imports_of(stub: Path) -> dict[str, str]:
    """name -> module of every ``from module import name as name``, and of the names of ``from module import *``."""
    found = re.findall(r"^from (\S+) import (?:\(\s+)?(?:(\w+) as \2\b|\*)", stub.read_text(), re.MULTILINE)
    return {name: module for module, one in found for name in ([one] if one else _public(module))}


def _public(module: str) -> list[str]:
    """The names that ``from module import *`` imports: ``__all__``, or the classes of a stub."""
    path = _ROOT.joinpath(*module.split("."))
    stub = path.with_suffix(".pyi")
    text = (stub if stub.exists() else path.with_suffix(".py")).read_text()
    listed = re.search(r"^__all__ = \[([^]]*)\]", text, re.MULTILINE)
    return re.findall(r'"(\w+)"', listed[1]) if listed else re.findall(r"^class (\w+)", text, re.MULTILINE)


def constant_result(function: F) -> F:
    """`torch.compiler.assume_constant_result` without loading the compiler, which takes more than a second."""
    function._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
    return function
