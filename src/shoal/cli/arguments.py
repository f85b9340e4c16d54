"""Flags of a command from a dataclass, by tyro; wrong ones end with exit code 2."""

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal.errors import missing_extra

T = TypeVar("T")
Verbs = Mapping[str, tuple[type, Callable[[Any], int], tuple[str, ...]]]
"""Verb -> (its options, what it does, the options that are given without a flag)."""


def parse(
    options: type[T],
    argv: list[str],
    prog: str,
    description: str,
    positional: str | tuple[str, ...] = (),
    repeated: tuple[str, ...] = (),
) -> T | int:
    """The options, or an exit code where ``argv`` asked for help or was wrong.

    Groups of options lose their prefix; the fields named ``positional`` are given without a flag, those named
    ``repeated`` with one flag for each value.
    """
    try:
        import tyro
    except ImportError:
        raise missing_extra("tyro", "cli") from None
    for name in (positional,) if isinstance(positional, str) else positional:
        kind = typing.get_type_hints(options)[name]
        options.__annotations__[name] = tyro.conf.Positional[kind]
    for name in repeated:
        if name in options.__annotations__:
            kind = typing.get_type_hints(options)[name]
            options.__annotations__[name] = tyro.conf.UseAppendAction[kind]
    try:
        config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
        return tyro.cli(options, args=argv, prog=f"shoal {prog}", description=description, config=config)
    except SystemExit as stop:
        return exit_code(stop.code)


def run_verb(prog: str, about: str, verbs: Verbs, argv: list[str], repeated: tuple[str, ...] = ()) -> int:
    """Runs ``argv[0]`` of ``verbs`` with its own flags; without one it shows what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print(verbs_usage(prog, about, verbs))
        return 0 if argv else 2
    if argv[0] not in verbs:
        print(f"shoal {prog}: there is no {argv[0]!r}\n\n{verbs_usage(prog, about, verbs)}", file=sys.stderr)
        return 2
    options, call, positional = verbs[argv[0]]
    about = inspect.cleandoc(options.__doc__ or "")
    parsed = parse(options, argv[1:], f"{prog} {argv[0]}", about, positional, repeated)
    return parsed if isinstance(parsed, int) else call(parsed)


def verbs_usage(prog: str, about: str, verbs: Verbs) -> str:
    width = max(map(len, verbs))
    lines = [f"  {name:<{width}}  {(kind.__doc__ or '').splitlines()[0]}" for name, (kind, *_) in verbs.items()]
    return "\n".join(
        [f"usage: shoal {prog} VERB [options]", "", *lines, "", about, "", f"`shoal {prog} VERB --help` explains one."]
    )


def exit_code(code: Any) -> int:
    """What a ``SystemExit`` means to a shell."""
    return code if isinstance(code, int) else 0 if code is None else 2
