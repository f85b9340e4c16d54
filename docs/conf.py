"""Configuration of Sphinx for `make docs`: the reference comes from docstrings, and a warning is an error."""

from __future__ import annotations

import inspect
from typing import Any

import shoal

HOMES = {  # the packages that document names of these modules, if it is not the module's own package
    "shoal._core": "shoal",
    "shoal.proto.feature_configs": "shoal.ops",
    "shoal.ragged": "shoal",
    "shoal.table.config.optim": "shoal",
    "shoal.train.loop.config": "shoal.trainer",
    "shoal.train.loop.measure.metrics": "shoal.trainer",
    "shoal.train.loop.toml": "shoal.trainer",
    "shoal.train.loop.trainer": "shoal.trainer",
}
project = "Shoal"
author = "The Shoal authors"
copyright = "2026, the Shoal authors"
release = version = shoal.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nitpicky = False

default_role = "py:obj"  # single backticks in docstrings are names from Shoal, or plain code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # `Attributes:` of a class does not describe its fields a second time

html_theme = "furo"
html_title = f"Shoal {version}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def skip(app: Any, what: str, name: str, item: Any, skip: bool, options: Any) -> bool | None:
    """Describes a name that several packages export only once, and omits protobuf messages.

    These are described in the .proto files; their generated methods would bury the rest.
    """
    if hasattr(item, "DESCRIPTOR"):
        return True
    module = getattr(item, "__module__", None) or ""
    if what == "module" and module.startswith("shoal.") and not inspect.ismodule(item):
        home = HOMES.get(module, ".".join(module.split(".")[:2]))
        return True if home.replace(".", "_") != app.env.docname.removeprefix("reference/") else None
    return None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", skip)
