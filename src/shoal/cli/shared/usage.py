"""The text that lists a command's words: subcommands, verbs or benchmarks."""

from collections.abc import Mapping


def usage_text(call: str, words: Mapping[str, str], *notes: str) -> str:
    """Return ``usage: shoal <call> [options]``, a line for each word with its help, and the notes."""
    width = max(map(len, words))
    lines = "\n".join(f"  {word:<{width}}  {text}" for word, text in words.items())
    return "\n\n".join([f"usage: shoal {call} [options]", lines, *notes])
