"""Command-line flags of synchronous training."""

import argparse
from collections.abc import Sequence
from typing import Any

DEFAULTS: dict[str, Any] = {
    "enable_sync_training": False,
    "enable_gpu_training": False,
    "num_ps": 0,
    "is_local": False,
    "enable_alltoall_metrics": False,
    "enable_alltoall_metrics_for_slot": None,
}


class Flags:
    """The flags' values: the defaults until ``parse`` or an assignment changes them."""

    enable_sync_training: bool
    enable_gpu_training: bool
    num_ps: int
    is_local: bool
    enable_alltoall_metrics: bool
    enable_alltoall_metrics_for_slot: str | None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset every flag to its default."""
        self.__dict__.clear()
        self.__dict__.update(DEFAULTS)

    def parse(self, argv: Sequence[str] | None = None) -> list[str]:
        """Parse these flags from ``argv`` (default: ``sys.argv[1:]``) and return the other arguments.

        Example:
            >>> FLAGS.parse(["--enable_sync_training", "--num_ps=2", "train.toml"])
            ['train.toml']
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name, default in DEFAULTS.items():
            if isinstance(default, bool):
                parser.add_argument(f"--{name}", nargs="?", const=True, type=_bool, default=argparse.SUPPRESS)
            else:
                parser.add_argument(
                    f"--{name}", type=int if isinstance(default, int) else str, default=argparse.SUPPRESS
                )
        known, rest = parser.parse_known_args(argv)
        self.__dict__.update(vars(known))
        return rest

    def __repr__(self) -> str:
        return f"Flags({', '.join(f'{k}={v!r}' for k, v in self.__dict__.items())})"


def _bool(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


FLAGS = Flags()
