"""Writes plain values as YAML without a library: dicts and lists as blocks, strings as JSON, which is valid YAML."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump(value: Any, indent: int = 0) -> str:
    """A document.

    >>> print(dump({"a": [1, {"b": "x: y"}], "c": {}}), end="")
    a:
      - 1
      -
        b: "x: y"
    c: {}
    """
    pad = " " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{pad}{_text(str(key))}:{_inner(each, indent)}" for key, each in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_inner(each, indent)}" for each in value)
    return f"{pad}{_scalar(value)}\n"


def _inner(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return f"\n{dump(value, indent + 2)}"
    if isinstance(value, str) and "\n" in value and value.strip() and not value.startswith((" ", "\n")):
        pad = " " * (indent + 2)
        lines = "".join(f"{pad}{line}\n" if line else "\n" for line in value.rstrip("\n").split("\n"))
        return f" |\n{lines}"
    return f" {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else json.dumps(value, ensure_ascii=False)
