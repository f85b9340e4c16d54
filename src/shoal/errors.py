"""The exceptions that Shoal raises; each also derives from the built-in that a caller would expect."""


class ShoalError(Exception):
    """Base of every exception that Shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """A setting or an argument has a value that is not allowed; nothing was changed."""


class DataError(ShoalError, ValueError):
    """A file or a message is truncated, corrupt or of another kind; nothing was changed."""


class UnsupportedError(ShoalError, RuntimeError):
    """The object exists but cannot do this, as a serving table cannot take gradients."""


class DeadlineError(ShoalError, TimeoutError):
    """A wait ended without its event; the message says who waited how long for whom."""


class CancelledError(ShoalError, RuntimeError):
    """Another thread cancelled the work; it left nothing behind."""


class PeerError(ShoalError, ConnectionError):
    """Another process died, disconnected or answered with an error."""


class MissingExtraError(ShoalError, ImportError):
    """An optional package is needed; the message holds the exact ``pip install`` line."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """The error for an optional ``package`` that is not installed."""
    return MissingExtraError(f'{package} is not installed; install it with: pip install "shoal[{extra}]"')
