"""What a push says of itself besides its rows. It travels as gRPC metadata, which peers that do not know it ignore."""

import contextvars
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TOUCHED_AT = "shoal-touched-at-ms"
"""Unix milliseconds of the oldest gradient in a push, from which a replica tells its lag."""

READ_AT = "shoal-read-at-ms"
"""Unix milliseconds by which the trainer's rows had been read. Rows of an export that was begun later are newer."""

CODEC = "shoal-codec"
"""Which codecs the values are encoded with (`shoal.serving.sync.quantise.fingerprint`); absent for plain floats."""

INSTANCE = "shoal-instance"
"""Trailing metadata of an answer to a push: the process that took it."""

_MAX_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PushInfo:
    """The metadata of one push; times are Unix seconds, 0 where the sender did not say."""

    touched_at: float = 0.0
    read_at: float = 0.0
    codec: str = ""

    def metadata(self) -> list[tuple[str, str]]:
        """As gRPC sends it."""
        said = {TOUCHED_AT: math.floor(self.touched_at * 1000), READ_AT: math.ceil(self.read_at * 1000)}
        return [(key, str(value)) for key, value in said.items() if value > 0] + (
            [(CODEC, self.codec)] if self.codec else []
        )

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, Any]]) -> "PushInfo":
        """What a request's metadata says; values that are malformed count as absent."""
        said = {key: value for key, value in metadata if isinstance(value, str)}
        return cls(touched_at=_seconds(said.get(TOUCHED_AT)), read_at=_seconds(said.get(READ_AT)),
                   codec=said.get(CODEC, ""))  # fmt: skip


def _seconds(text: str | None) -> float:
    return int(text) / 1000 if text and text.isdecimal() and len(text) <= _MAX_DIGITS else 0.0


push_info: contextvars.ContextVar[PushInfo] = contextvars.ContextVar("shoal_push_info", default=PushInfo())  # noqa: B039  (it is frozen)
"""Of the push that is being applied."""
