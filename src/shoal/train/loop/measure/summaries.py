"""TensorBoard summaries: metrics of the run, and how ids spread over the ranks."""

from __future__ import annotations

from typing import Any

from shoal.comm.ranks.ranks import Ranks
from shoal.errors import missing_extra
from shoal.train.loop.rows.rows import Rows

_TAGS = (
    "auc",
    "window_auc",
    "logloss",
    "calibration",
    "samples_per_s",
    "rows",
    "table_bytes",
    "bad_rows",
    "lag_records",
    "lag_s",
)


class Summaries:
    """Writes summaries on the first rank, if a folder is given. All ranks must call its methods together."""

    def __init__(self, folder: str | None, ranks: Ranks) -> None:
        self._on = folder is not None
        self._writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise missing_extra("tensorboard", "tensorboard") from None
        if ranks.first:
            self._writer = SummaryWriter(folder)

    def progress(self, values: dict[str, Any], rows: Rows) -> None:
        """Write the numbers of a report, and how the last batch spread over the ranks."""
        if not self._on:
            return
        step = values["step"]
        if self._writer is not None:
            for tag in _TAGS:
                if values.get(tag) is not None:
                    self._writer.add_scalar(f"train/{tag}", values[tag], step)
            for name, one in values["tables"].items() if len(values["tables"]) > 1 else ():
                for tag, value in one.items():
                    if value is not None:
                        self._writer.add_scalar(f"train/{tag}/{name}", value, step)
        if rows.together:
            from shoal.sharded import set_alltoall_writer

            set_alltoall_writer(self._writer)
            for table in rows.tables.values():
                table.write_spread(step)

    def evaluated(self, step: int, values: dict[str, Any]) -> None:
        if self._writer is not None:
            for tag in ("auc", "pr_auc", "gauc", "ndcg", "logloss", "calibration"):
                if tag in values:
                    self._writer.add_scalar(f"eval/{tag}", values[tag], step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
