"""Environment variables as switches: one syntax for the library, parsed anew at each use."""

import os
from collections.abc import Mapping

from shoal.errors import ConfigError

_WORDS = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}


def parse_switch(name: str, text: str) -> int:
    """The integer value of variable ``name``.

    ``true``, ``yes`` and ``on`` are 1; ``false``, ``no``, ``off`` and the empty string are 0; case does not matter.

    >>> [parse_switch("X", text) for text in ("1", "on", "False", "", "32")]
    [1, 1, 0, 0, 32]
    """
    word = text.lower()
    if not word or word in _WORDS:
        return _WORDS.get(word, 0)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name} must be an integer, true/yes/on or false/no/off, got {text!r}"
        ) from None


def switch(name: str, default: int, environ: Mapping[str, str] | None = None) -> int:
    """The value of a switch; ``default`` if it is not set, and 0 if it is empty."""
    text = (os.environ if environ is None else environ).get(name)
    return default if text is None else parse_switch(name, text)


def env_int(name: str, default: int) -> int:
    """The value of a number, parsed by `parse_switch`; ``default`` if the variable is not set or empty."""
    text = os.environ.get(name, "")
    return parse_switch(name, text) if text else default


def other_program_switch(name: str) -> bool:
    """Whether another program's switch is on; text that we cannot parse counts as off."""
    try:
        return switch(name, 0) != 0
    except ConfigError:
        return False
