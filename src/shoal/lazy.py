"""Public names of a package, imported on first use, so that importing the package is quick and needs no extras."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def exports(
    package: str, public: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        public: module -> the public names that are defined in it; a module's own path stands for the module itself.
            None reads them from the imports of the package's ``__init__.pyi``, where type checkers see them, too.

    >>> names, get, _ = exports("shoal.lazy", {"math": ["sqrt"]})
    >>> names, get("sqrt")(9.0)
    (['sqrt'], 3.0)
    """
    if public is None:
        where = _imports_of(Path(str(sys.modules[package].__file__)).with_suffix(".pyi"))
    else:
        where = {name: module for module, names in public.items() for name in names}

    def get(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(where[name])
        value = module if where[name].endswith(f".{name}") and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return list(where), get, lambda: sorted(where)


def _imports_of(stub: Path) -> dict[str, str]:
    """name -> module of every ``from module import name as name``; ``from shoal import nn as nn`` is ``shoal.nn``."""
    found = re.findall(r"^from (\S+) import (?:\(\s+)?(\w+) as \2\b", stub.read_text(), re.MULTILINE)
    return {name: f"shoal.{name}" if module == "shoal" else module for module, name in found}
