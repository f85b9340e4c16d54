"""Flags of a command from a dataclass, by tyro; wrong ones end with exit code 2."""

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from shoal.errors import did_you_mean, missing_extra

T = TypeVar("T")
Verbs = Mapping[str, tuple[type, Callable[[Any], int], tuple[str, ...]]]
"""Verb -> (its options, what it does, the options that are given without a flag)."""

_WORDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}


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
    ``repeated`` with one flag for each value. Other lists take any number of values behind a flag, which may come
    again.
    """
    try:
        import tyro
    except ImportError:
        raise missing_extra("tyro", "cli") from None
    hints = _hints(options)
    positional = (positional,) if isinstance(positional, str) else positional
    for field in dataclasses.fields(options):  # pyrefly: ignore[bad-argument-type]
        kind = _optional(hints[field.name], field.default) or hints[field.name]
        if field.name in positional:
            kind = tyro.conf.Positional[kind]
        elif field.name in repeated:
            kind = tyro.conf.UseAppendAction[kind]
        options.__annotations__[field.name] = kind
    lists = {f"--{name.replace('_', '-')}" for name in hints if name not in repeated and _is_list(hints[name])}
    try:
        config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
        args = merge_lists(argv, lists)
        return tyro.cli(options, args=args, prog=f"shoal {prog}", description=description, config=config)
    except SystemExit as stop:
        return exit_code(stop.code)


@functools.cache
def _hints(options: type) -> dict[str, Any]:
    """The types of the fields as they were written, before `parse` changed them."""
    return typing.get_type_hints(options, include_extras=True)


def _optional(hint: Any, default: Any) -> Any:
    """The type of a setting that may be left out, without its None; None for other types."""
    import tyro

    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if default is not None or typing.get_origin(hint) not in (types.UnionType, typing.Union) or len(kinds) != 1:
        return None
    kind: Any = kinds[0]
    if kind in _WORDS:
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar=kind.__name__.upper(), instance_from_str=lambda texts: _one(kind, texts[0]),
            is_instance=lambda value: value is None or isinstance(value, kind), str_from_instance=lambda v: [str(v)],
        )  # fmt: skip
    elif kind == tuple[str, ...]:
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs="*", metavar="[STR [STR ...]]", instance_from_str=lambda texts: tuple(texts),
            is_instance=lambda value: value is None or isinstance(value, tuple),
            str_from_instance=lambda value: list(value or ()),
        )  # fmt: skip
    else:
        return None
    return Annotated[hint, spec, tyro.conf.arg(help_behavior_hint="")]


def _one(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"it must be {_WORDS[kind]}, got {text!r}") from None


def _is_list(hint: Any) -> bool:
    kinds = (hint, *typing.get_args(hint))
    return any(typing.get_origin(kind) is tuple and typing.get_args(kind)[-1:] == (...,) for kind in kinds)


def merge_lists(argv: list[str], flags: set[str]) -> list[str]:
    """``argv`` with the values of a list that is given in several places brought together at the first.

    >>> merge_lists(["--set", "a", "b", "--json", "--set=c"], {"--set"})
    ['--set', 'a', 'b', 'c', '--json']
    """
    out: list[str] = []
    ends: dict[str, int] = {}  # where the next value of a list goes
    current = ""
    for word in argv:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            current = flag if flag in flags else ""
            if not current:
                out.append(word)
                continue
            if current not in ends:
                out.append(flag)
                ends[current] = len(out)
            if not equals:
                continue
            word = value
        if not current:
            out.append(word)
            continue
        at = ends[current]
        out.insert(at, word)
        ends = {name: end + (end >= at) for name, end in ends.items()}
    return out


def run_verb(prog: str, about: str, verbs: Verbs, argv: list[str], repeated: tuple[str, ...] = ()) -> int:
    """Runs ``argv[0]`` of ``verbs`` with its own flags; without one it shows what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print(verbs_usage(prog, about, verbs))
        return 0 if argv else 2
    if argv[0] not in verbs:
        hint = did_you_mean(argv[0], verbs)
        print(f"shoal {prog}: there is no {argv[0]!r}{hint}\n\n{verbs_usage(prog, about, verbs)}", file=sys.stderr)
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
