"""A publisher's state for each replica, and its status report."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from shoal.serving.sync.history import Ids
from shoal.serving.sync.target import Session, Wire
from shoal.stamps import Stamp

REPEAT_SECS = 60.0


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """The state of one replica with respect to a source."""

    target: str
    version: int | None = None
    complete: Stamp | None = None
    """The replica has every change up to this stamp."""
    waiting: int = 0
    """Number of ids that it does not have yet."""
    freshness: float | None = None
    """Seconds from the oldest change in its last round until that change was served."""
    error: str = ""
    """Why its last round failed; "" if it succeeded."""
    plain: bool = False
    """Whether it accepts only plain pushes (rows without weights), like older versions and other servers."""


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """The state of a publisher, as `Publisher.status` returns it."""

    source: str
    rounds: int = 0
    """Rounds that were sent."""
    stamp: Stamp | None = None
    """The stamp of the last round."""
    unacknowledged: int = 0
    """Number of ids that not every live replica has."""
    targets: list[TargetStatus] = field(default_factory=list)
    asked: bool = False
    """Whether the list of live replicas is known."""


class Replica:
    """A publisher's state for one target. While a worker serves the target, only that worker may use it."""

    def __init__(self, target: Wire) -> None:
        self.target = target
        self.session: Session | None = None
        self.since = Stamp(0, 0)
        """It has every change up to this stamp, except the backlog."""
        self.backlog: Ids = {}
        self.backlog_since = 0.0
        """Unix time of the oldest change in the backlog; 0 if unknown."""
        self.complete: Stamp | None = None
        self.digest = ""
        self.freshness: float | None = None
        self.error = "it has not been contacted yet"
        self.checked = float("-inf")
        self.greeted = 0
        """The run in which it last reported which changes it has."""
        self._last_logged = ("", float("-inf"))
        self.work: Future[None] | None = None
        """The call that a thread is making for it; the next round waits until it ends."""

    def tell(self, error: str, now: float) -> bool:
        """Whether to log an error; an error that repeats in every round is logged only occasionally."""
        tell = error != self._last_logged[0] or now - self._last_logged[1] > REPEAT_SECS
        if tell:
            self._last_logged = (error, now)
        return tell

    @property
    def busy(self) -> bool:
        return self.work is not None and not self.work.done()
