"""Parse a command's flags into a dataclass with tyro; wrong flags raise ``SystemExit(2)``."""

import dataclasses
import functools
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from shoal.cli.shared.usage import usage_text
from shoal.errors import did_you_mean, missing_extra

T = TypeVar("T")
Verbs = Mapping[str, tuple[type, Callable[[Any], int], tuple[str, ...]]]
"""Verb -> (dataclass of its options, function to call, names of positional options)."""

_WORDS: dict[type, str] = {int: "a whole number", float: "a number", str: "a text", Path: "a path"}
_HIDDEN_DEFAULTS = ("None", "False", "''", "()")


def parse(
    options: type[T],
    argv: list[str],
    prog: str,
    description: str,
    positional: str | tuple[str, ...] = (),
    repeated: tuple[str, ...] = (),
) -> T:
    """Parse ``argv``; raise ``SystemExit`` if it asks for help or is wrong.

    Fields of nested dataclasses become flags without a prefix. Fields in ``positional`` are given without a flag, those
    in ``repeated`` with one flag per value. Other lists take any number of values after a flag, which can be repeated.
    """
    try:
        import tyro
    except ImportError:
        raise missing_extra("tyro", "cli") from None
    positional = (positional,) if isinstance(positional, str) else positional
    args = merge_lists(argv, _annotate(options, positional, repeated))
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(options, args=args, prog=f"shoal {prog}", description=_paragraphs(description), config=config)


def _annotate(options: type, positional: tuple[str, ...] = (), repeated: tuple[str, ...] = ()) -> set[str]:
    """Annotate the fields for tyro; return the list flags that `merge_lists` merges."""
    import tyro

    lists: set[str] = set()
    hints, texts = _hints(options), _help_texts(options)
    for field in dataclasses.fields(options):  # pyrefly: ignore[bad-argument-type]
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            lists |= _annotate(hint)  # pyrefly: ignore[bad-argument-type]
            continue
        is_list = _is_list(hint) and name not in repeated
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        hide_default = repr(field.default) in _HIDDEN_DEFAULTS or (is_list and required)
        placeholder = name.upper() + " ..." * is_list
        shown = tyro.conf.arg(
            help=texts.get(name),
            help_behavior_hint="" if hide_default and name not in repeated else None,
            metavar=None if name not in positional else placeholder if required else f"[{placeholder}]",
        )
        kind: Any = Annotated[_kind(hint, field.default) or hint, shown]
        if name in positional:
            kind = tyro.conf.Positional[kind]
        elif name in repeated:
            kind = tyro.conf.UseAppendAction[kind]
        elif is_list:
            lists.add(f"--{name.replace('_', '-')}")
        options.__annotations__[name] = kind
    return lists


def _paragraphs(text: str) -> str:
    """Prepare a description for tyro, which only joins lines that start with a letter.

    Wrapped lines are joined, and blank lines before indented ones, which tyro would double, are removed.

    >>> _paragraphs("Read\\n--all.\\n\\nexamples:\\n\\n  one\\n\\n  two\\n\\nThe end.")
    'Read --all.\\n\\nexamples:\\n  one\\n  two\\n\\nThe end.'
    """
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    return re.sub(r"\n\n+(?= )", "\n", text)


@functools.cache
def _hints(options: type) -> dict[str, Any]:
    """Return the fields' declared types, before `parse` changed them."""
    return typing.get_type_hints(options, include_extras=True)


@functools.cache
def _help_texts(options: type) -> dict[str, str]:
    """Return the fields' docstrings, each as one line; tyro would keep the breaks before indented lines."""
    from docstring_parser import parse_from_object  # a dependency of tyro

    found = (one for kind in reversed(options.__mro__[:-1]) for one in parse_from_object(kind).params)
    return {one.arg_name: " ".join((one.description or "").split()) for one in found}


def _kind(hint: Any, default: Any) -> Any:
    """Return the annotated type of a number or of an optional setting, without None in its help; else None."""
    import tyro

    if hint in (int, float):
        return Annotated[hint, _word(hint)]
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    if default is not None or typing.get_origin(hint) not in (types.UnionType, typing.Union) or len(kinds) != 1:
        return None
    kind: Any = kinds[0]
    if kind in _WORDS:
        spec = _word(kind)
    elif kind == tuple[str, ...]:
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs="*", metavar="[STR [STR ...]]", instance_from_str=lambda texts: tuple(texts),
            is_instance=lambda value: value is None or isinstance(value, tuple),
            str_from_instance=lambda value: list(value or ()),
        )  # fmt: skip
    elif typing.get_origin(kind) is typing.Literal:
        spec = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1, metavar="{" + ",".join(typing.get_args(kind)) + "}", instance_from_str=lambda texts: texts[0],
            is_instance=lambda value: True, str_from_instance=lambda value: [str(value)], choices=typing.get_args(kind),
        )  # fmt: skip
    else:
        return None
    return Annotated[hint, spec]


def _word(kind: Any) -> Any:
    """Return how tyro reads one word of a flag."""
    import tyro

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar=kind.__name__.upper(), instance_from_str=lambda texts: _one(kind, texts[0]),
        is_instance=lambda value: value is None or isinstance(value, kind), str_from_instance=lambda v: [str(v)],
    )  # fmt: skip


def _one(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"must be {_WORDS[kind]}, got {text!r}") from None


def _is_list(hint: Any) -> bool:
    kinds = (hint, *typing.get_args(hint))
    return any(typing.get_origin(kind) is tuple and typing.get_args(kind)[-1:] == (...,) for kind in kinds)


def merge_lists(argv: list[str], flags: set[str]) -> list[str]:
    """Move all values of a repeated list flag to its first occurrence.

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


def names_verb(argv: list[str], verbs: Verbs) -> bool:
    """Whether the first word is a verb, or a misspelled one rather than a flag or a file."""
    word = argv[0] if argv else ""
    misspelled = word.isalpha() and not os.path.exists(word) and did_you_mean(word, verbs) != ""
    return word in verbs or misspelled


def run_verb(prog: str, about: str, verbs: Verbs, argv: list[str], repeated: tuple[str, ...] = ()) -> int:
    """Run the verb ``argv[0]`` with its flags; print the list of verbs if there is none."""
    lines = {name: (kind.__doc__ or "").splitlines()[0] for name, (kind, *_) in verbs.items()}
    usage = usage_text(f"{prog} VERB", lines, about, f"`shoal {prog} VERB --help` describes a verb.")
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] not in verbs:
        print(f"shoal {prog}: there is no verb {argv[0]!r}{did_you_mean(argv[0], verbs)}\n\n{usage}", file=sys.stderr)
        return 2
    options, call, positional = verbs[argv[0]]
    about = inspect.cleandoc(options.__doc__ or "")
    return call(parse(options, argv[1:], f"{prog} {argv[0]}", about, positional, repeated))
