"""The exceptions of a gather, and the reasons for skipping a peer, with the party at fault."""

from collections.abc import Iterable, Mapping

from shoal.errors import DistributedError


class GatherError(DistributedError):
    """Base class of all errors of a gather."""


class PayloadRejected(GatherError):
    """A payload breaks a rule; ``reason`` is the rule's fixed name, ``detail`` one line about this payload."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class StoreError(GatherError):
    """A store could not answer. ``permanent`` means that a retry is useless (no permission, no bucket)."""

    def __init__(self, message: str = "", *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class ObjectChanged(StoreError):
    """The object was replaced between two reads; a reader starts again once."""


class PlanMismatch(GatherError):
    """Ranks, reports or files have different windows, versions or gradient specs."""


class GatherDivergence(GatherError):
    """Ranks computed different results from the same reports; nothing must be applied."""


class RankFailure(GatherError):
    """Ranks did not answer in time; ``ranks`` are their numbers, ascending. Nothing was applied."""

    def __init__(self, ranks: Iterable[int] = (), detail: str = "") -> None:
        self.ranks = sorted(ranks)
        names = ", ".join(map(str, self.ranks)) or "unknown"
        super().__init__(f"rank(s) {names} did not answer in the gather{': ' + detail if detail else ''}")


class PayloadsUnreadable(GatherError):
    """Ranks cannot read payloads that they had accepted, or these have changed.

    ``unready`` maps these ranks to the reason; the error is the same on all ranks, and nothing was applied.
    """

    def __init__(self, unready: Mapping[int, str]) -> None:
        self.unready = dict(unready)
        super().__init__("; ".join(f"rank {rank}: {reason}" for rank, reason in self.unready.items()))


class UpdateInterrupted(GatherError):
    """The outer update stopped midway; restore a snapshot. ``applied_params`` were already stepped."""

    def __init__(self, applied_params: Iterable[str] = (), detail: str = "") -> None:
        self.applied_params = list(applied_params)
        super().__init__(
            f"the outer update stopped after {len(self.applied_params)} parameter(s)"
            f"{': ' + detail if detail else ''}; restore the model from a snapshot"
        )


class AlreadyApplied(GatherError):
    """According to the ledger, this window or a later one was applied before."""


class BudgetTooSmall(GatherError, ValueError):
    """``budget_bytes`` cannot hold one chunk; ``needed`` is the smallest budget that works."""

    def __init__(self, needed: int, detail: str = "") -> None:
        self.needed = int(needed)
        super().__init__(f"budget_bytes is too small{': ' + detail if detail else ''}; use at least {self.needed}")


_PEER = frozenset([
    "corrupt_container", "unsafe_container", "not_a_mapping", "empty_payload", "bad_global_step", "window_mismatch",
    "unknown_param", "missing_param", "incomplete_param", "bad_value_dtype", "empty_values", "bad_value_shape",
    "bad_topk", "missing_quant_params", "bad_quant_params", "bad_index_dtype", "bad_index_length",
    "index_out_of_range", "duplicate_index", "nonfinite_values", "value_too_large", "too_early", "too_late", "oversize",
])  # fmt: skip
_UNKNOWN = frozenset({"not_found", "timeout"})
_LOCAL = frozenset({"store_error", "local_error", "changed_during_read", "rank_failed"})
REASONS = _PEER | _UNKNOWN | _LOCAL
FAULT_ORDER = ("peer", "unknown", "local")  # a UID with several reasons keeps the first of these


def fault(reason: str) -> str:
    """Return who caused a skip: ``"peer"``, ``"unknown"`` (never seen) or ``"local"`` (exclude it from peer scores)."""
    if reason in _PEER:
        return "peer"
    if reason in _UNKNOWN:
        return "unknown"
    if reason in _LOCAL:
        return "local"
    raise ValueError(f"reason must be one of {', '.join(sorted(REASONS))}, got {reason!r}")
