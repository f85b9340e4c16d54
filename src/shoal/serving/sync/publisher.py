"""The publisher: one source's changes to every live replica of a model, in rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.serving.security import ClientSecurity
from shoal.serving.sync.publication import Source
from shoal.stamps import Stamp


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """How far one replica is."""

    target: str
    version: int | None = None
    complete: Stamp | None = None
    """Up to which stamp it has everything."""
    waiting: int = 0
    """Ids that it does not have yet."""
    freshness: float | None = None
    """Seconds from the oldest change of the last round that it took to its being servable."""
    error: str = ""
    """Why its last round failed, "" where it did not."""


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """How far a publisher is; `Publisher.status` makes it."""

    source: str
    rounds: int = 0
    """Rounds that were sent."""
    stamp: Stamp | None = None
    """Of the last round."""
    unacknowledged: int = 0
    """Ids that not every live replica has."""
    targets: list[TargetStatus] = field(default_factory=list)


class Publisher:
    """Sends what changes at a source to every live replica; a thread of its own does the sending.

    Args:
        source: who learns.
        targets: the addresses ``host:port`` of the live replicas, or a function that tells them; it is asked before
            each round.
        model: the name that the replicas serve the model by.
        signature: of row pushes, "" = what the export of the source's tables has.
        history: ids kept for replicas that start late or were out of reach; beyond, they are sent every row.
    """

    def __init__(
        self,
        source: Source,
        targets: Sequence[str] | Callable[[], Sequence[str]],
        *,
        model: str,
        signature: str = "",
        security: ClientSecurity | None = None,
        history: int = 8 * 1024 * 1024,
        timeout_s: float = 60.0,
    ) -> None:
        raise NotImplementedError

    def round(self) -> bool:
        """Copies what changed and hands it to the thread; False where that is still busy: changes then accumulate.

        A trainer calls it between two steps, so that rows and weights are of one step.
        """
        raise NotImplementedError

    def flush(self, timeout_s: float = 60.0) -> None:
        """Rounds until every live replica has everything up to now; call it between two steps.

        Raises:
            TimeoutError: names the replicas that do not have it, and why.
        """
        raise NotImplementedError

    def exported(self, version: int, stamp: Stamp) -> None:
        """An export with everything up to ``stamp`` is there: replicas that start from now on start with it."""
        raise NotImplementedError

    def status(self) -> PublisherStatus:
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the round that it is sending."""
        raise NotImplementedError
