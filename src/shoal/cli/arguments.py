"""Flags of a command from a dataclass, by tyro; wrong ones end with exit code 2."""

import typing
from typing import Any, TypeVar

from shoal.errors import missing_extra

T = TypeVar("T")


def parse(options: type[T], argv: list[str], prog: str, description: str, positional: str = "") -> T | int:
    """The options, or an exit code where ``argv`` asked for help or was wrong.

    Groups of options lose their prefix; the field named ``positional`` is given without a flag.
    """
    try:
        import tyro
    except ImportError:
        raise missing_extra("tyro", "cli") from None
    if positional:
        kind = typing.get_type_hints(options)[positional]
        options.__annotations__[positional] = tyro.conf.Positional[kind]
    try:
        config = (tyro.conf.OmitArgPrefixes,)
        return tyro.cli(options, args=argv, prog=f"shoal {prog}", description=description, config=config)
    except SystemExit as stop:
        return _code(stop.code)


def _code(code: Any) -> int:
    return code if isinstance(code, int) else 0 if code is None else 2
