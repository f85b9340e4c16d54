"""The exceptions that Shoal raises; each also derives from the built-in that a caller would expect."""

from collections.abc import Iterable
from typing import Any


class ShoalError(Exception):
    """Base class of all exceptions that Shoal raises."""


class DistributedError(ShoalError, RuntimeError):
    """Base class of the errors of communication and distributed training; pickles and copies keep all attributes."""

    def __reduce__(self) -> tuple:
        return _unpickled, (type(self), self.args, vars(self))


def _unpickled(kind: type[DistributedError], args: tuple, attributes: dict[str, Any]) -> DistributedError:
    error = kind.__new__(kind, *args)  # without a constructor, whose arguments need not be ``args``
    vars(error).update(attributes)
    return error


class ConfigError(DistributedError, ValueError):
    """A setting or an argument has a value that is not allowed; nothing was changed."""


class ContractError(ConfigError, AssertionError):
    """A `ConfigError` from functions that are specified to raise an ``AssertionError``."""


class UsageError(ConfigError):
    """A command was called without a required argument, or with arguments that exclude each other."""


class ShapeError(DistributedError, ValueError):
    """The shapes, dtypes or devices of tensors do not match."""


class DataError(ShoalError, ValueError):
    """A file or a message is truncated, corrupt or of the wrong kind; nothing was changed."""


class UnsupportedError(ShoalError, RuntimeError):
    """The object does not support this operation; for example, a serving table cannot take gradients."""


class CapacityError(ShoalError, MemoryError):
    """The device does not have enough memory for the request; nothing was changed."""


class DeadlineError(ShoalError, TimeoutError):
    """A wait timed out; the message says who waited how long for whom, and ``ranks`` has the missing ranks."""

    def __init__(self, *args: object, ranks: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.ranks = tuple(ranks)


class CancelledError(ShoalError, RuntimeError):
    """Another thread cancelled the work; it left nothing behind."""


class PeerError(ShoalError, ConnectionError):
    """Another process died, disconnected or answered with an error; ``ranks`` has the ranks, if known."""

    def __init__(self, *args: object, ranks: Iterable[int] = ()) -> None:
        super().__init__(*args)
        self.ranks = tuple(ranks)


class MissingExtraError(ShoalError, ImportError):
    """An optional package is needed; the message holds the exact ``pip install`` line."""


class TransportError(DistributedError):
    """A message or a barrier failed; ``kind`` says how and ``peer`` (a rank, or None) with whom."""

    KINDS = ("closed", "timeout", "peer_lost", "bad_rank", "protocol", "too_large")

    def __init__(self, message: str = "", *, kind: str, peer: int | None = None) -> None:
        if kind not in self.KINDS:
            raise ValueError(f"TransportError: kind must be one of {', '.join(self.KINDS)}, got {kind!r}")
        super().__init__(message or kind)
        self.kind = kind
        self.peer = peer


class SerializationError(DistributedError, DataError):
    """Tensors cannot be serialized, or bytes are not valid serialized tensors."""


class CompressionError(DistributedError, ValueError):
    """A gradient cannot be compressed, or a compressed one is inconsistent."""


class AggregationError(DistributedError):
    """The ranks disagree on the tensors to reduce, or these cannot be reduced."""


class StepAborted(DistributedError):
    """No rank applied this step because ``failed_ranks`` (ascending) failed in it."""

    def __init__(self, failed_ranks: Iterable[int]) -> None:
        self.failed_ranks = sorted(failed_ranks)
        super().__init__(self.failed_ranks)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.failed_ranks))
        return f"step aborted, no rank applied it: rank(s) {ranks} failed; see their logs"


class PipelineError(DistributedError):
    """A pipeline step could not be run, or a stage failed in it; the message names the stage."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """The error for an optional ``package`` that is not installed."""
    return MissingExtraError(f'{package} is not installed; install it with: pip install "shoal[{extra}]"')


_EXTRAS = {
    "grpc": ("grpcio", "server"), "zmq": ("pyzmq", "server"), "prometheus_client": ("prometheus-client", "server"),
    "rich": ("rich", "cli"), "tyro": ("tyro", "cli"), "matplotlib": ("matplotlib", "cli"),
    "pyarrow": ("pyarrow", "train"), "safetensors": ("safetensors", "train"),
}  # fmt: skip


def as_missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error to raise instead of ``error`` if an extra has the missing module; None if none has it."""
    found = _EXTRAS.get((error.name or "").partition(".")[0])
    return None if found is None else missing_extra(*found)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'epochs'?)`` for a name that is close to a known one, else an empty string.

    >>> did_you_mean("epoch", ["epochs", "lr"]), did_you_mean("x", ["epochs", "lr"])
    (" (did you mean 'epochs'?)", '')
    """
    import difflib

    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.65)
    return f" (did you mean {close[0]!r}?)" if close else ""
