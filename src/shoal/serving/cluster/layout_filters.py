"""Filters that select the sub-graphs of its layout that a container of a unified cluster serves."""

import re
from collections.abc import Sequence

from shoal.serving.cluster.expressions import Condition

MAX_DIGITS = 1000  # Python refuses to convert numbers of more than 4,300 digits


def normalize_regex(pattern: str) -> str:
    r"""Rewrites each ``{x}`` to the named group ``(?P<x>\d+)``; an unclosed brace stays text."""
    return re.sub(r"\{([^{}]*)\}", lambda found: rf"(?P<{found.group(1).strip()}>\d+)", pattern)


class LayoutFilters:
    """Filters ``"<pattern>;<condition>"``, for example ``"ps_{i};i % 3 == 2"``. Without filters, all names pass.

    Raises:
        ValueError: a filter has no ``;``, an unsupported condition, or an invalid pattern.
    """

    def __init__(self, filters: Sequence[str] | str | None, shard_id: int = 0, shard_num: int = 1) -> None:
        values = {"shard_id": max(0, shard_id), "shard_num": max(1, shard_num)}
        filters = [filters] if isinstance(filters, str) else list(filters or ())
        self._filters = [self._build(text, values) for text in filters]

    def accepts(self, sub_graph: str) -> bool:
        """Whether any filter matches the entire name and its condition holds."""
        if not self._filters:
            return True
        for pattern, condition in self._filters:
            found = pattern.fullmatch(sub_graph)
            if found is None:
                continue
            texts = {name: found[name] or "" for name in condition.names}
            # Groups that the filter's author wrote may match nothing or other text than digits.
            if all(text.isdecimal() and len(text) <= MAX_DIGITS for text in texts.values()) and condition(
                {name: int(text) for name, text in texts.items()}
            ):
                return True
        return False

    @staticmethod
    def _build(text: str, values: dict[str, int]) -> tuple[re.Pattern[str], Condition]:
        for name, value in values.items():
            text = text.replace(f"${{{name}}}", str(value))
        pattern, semicolon, condition = text.partition(";")
        if not semicolon:
            raise ValueError(f"a layout filter must be '<pattern>;<condition>', got {text!r}")
        try:
            compiled = re.compile(normalize_regex(pattern.strip()))
        except re.error as error:
            raise ValueError(f"layout filter {text!r}: invalid pattern: {error}") from None
        checked = Condition(condition.strip())
        if unknown := checked.names - set(compiled.groupindex):
            raise ValueError(
                f"layout filter {text!r}: the condition must use only the names of the pattern's groups, "
                f"got {', '.join(sorted(unknown))}"
            )
        return compiled, checked
