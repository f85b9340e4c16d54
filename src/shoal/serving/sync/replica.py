"""What a publisher knows of each replica, and what it reports of it."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from shoal.serving.sync.history import Ids
from shoal.serving.sync.target import Session, Wire
from shoal.stamps import Stamp

TELL_SECS = 60.0


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What one replica has of a source."""

    target: str
    version: int | None = None
    complete: Stamp | None = None
    """The replica has every change up to this stamp."""
    waiting: int = 0
    """Ids that it does not have yet."""
    freshness: float | None = None
    """Seconds from the oldest change in its last round until that change was served."""
    error: str = ""
    """Why its last round failed; "" if it succeeded."""
    plain: bool = False
    """Whether it takes plain pushes only, as an older version or another server does: rows without weights."""


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """The state of a publisher, as `Publisher.status` returns it."""

    source: str
    rounds: int = 0
    """Rounds that were sent."""
    stamp: Stamp | None = None
    """Of the last round."""
    unacknowledged: int = 0
    """Ids that not every live replica has."""
    targets: list[TargetStatus] = field(default_factory=list)
    asked: bool = False
    """Whether it is known which replicas are live."""


class Replica:
    """What the publisher knows of one target. While a worker serves the target, only that worker may use it."""

    def __init__(self, target: Wire) -> None:
        self.target = target
        self.session: Session | None = None
        self.since = Stamp(0, 0)
        """It has every change up to this stamp, except the backlog."""
        self.backlog: Ids = {}
        self.backlog_since = 0.0
        """Unix time of the oldest change in the backlog; 0 where that is not known."""
        self.complete: Stamp | None = None
        self.digest = ""
        self.freshness: float | None = None
        self.error = "it has not been asked yet"
        self.checked = float("-inf")
        self.greeted = 0
        """The run in which it was last asked what it has."""
        self._told = ("", float("-inf"))
        self.work: Future[None] | None = None
        """The call that a thread makes for it now; it gets no round until that ends."""

    def tell(self, error: str, now: float) -> bool:
        """Whether to log an error: one that is the same in every round is logged once in a while."""
        tell = error != self._told[0] or now - self._told[1] > TELL_SECS
        if tell:
            self._told = (error, now)
        return tell

    @property
    def busy(self) -> bool:
        return self.work is not None and not self.work.done()
