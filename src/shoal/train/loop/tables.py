"""The table of a run, wherever its rows live, and the module that looks batches up in it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor, nn

from shoal.data.samples import Samples
from shoal.errors import ConfigError, DeadlineError, UnsupportedError
from shoal.nn import HashEmbedding, HashEmbeddingBag
from shoal.nn.slot import TableSlot, slot_of
from shoal.table.table import HashTable
from shoal.train.loop.config import Config, TableConfig
from shoal.train.loop.ranks import Ranks

_AT_ONCE = timedelta(seconds=5)


class Rows(nn.Module):
    """Samples to ``[B, F, D]``: the rows of their ids in one lookup for all features; backward updates them.

    The table is in this process, over all ranks (every rank looks up and updates together), or on parameter servers.
    """

    def __init__(self, config: Config, ranks: Ranks, note: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        given = config.table
        arguments: dict[str, Any] = {**given.arguments(), "seed": config.train.seed}
        self.features = len(config.data.schema().sparse)
        self.dim = given.dim
        self.client: Any = None
        if config.train.ps:
            from shoal.sharded import PsClient, ps_table

            deadline = timedelta(seconds=config.train.ps_deadline_s)
            self.client = PsClient(config.train.ps, deadline=deadline)
            try:
                self._greet(note)
                self.table: Any = ps_table(self.client, given.dim, filter=given.filter(), **arguments)
            except BaseException:
                self.client.close()
                raise
        elif ranks.world > 1:
            from shoal.sharded import AllToAllHashTable

            self.table = AllToAllHashTable(given.dim, hash_filter=_filter(given), **arguments)
        else:
            self.table = HashTable(given.dim, hash_filter=_filter(given), **arguments)
        self.together = ranks.world > 1 and self.client is None
        self.single = HashEmbedding(self.table, fused=True)
        self.bags = HashEmbeddingBag(self.table, combiner=given.combiner, fused=True)
        self.now_s = 0
        """What rows are stamped with."""
        self.slot.clock = lambda: self.now_s

    def _greet(self, note: Callable[[str], None]) -> None:
        """Says who is waited for, where servers do not answer at once."""
        try:
            self.client.info(min(_AT_ONCE, self.client.deadline))
        except DeadlineError as error:
            if self.client.deadline > _AT_ONCE:
                note(f"{str(error).partition(';')[0]}; waiting for it, up to {self.client.deadline}")

    @property
    def slot(self) -> TableSlot:
        return slot_of(self.table)

    @property
    def local(self) -> HashTable | None:
        """The rows of this process; None where they are on servers."""
        if self.client is not None:
            return None
        return self.table.table if self.together else self.table

    def forward(self, samples: Samples) -> Tensor:
        if samples.offsets is None:
            return self.single(samples.ids)
        return self.bags(samples.ids, samples.offsets).view(len(samples), self.features, self.dim)

    def nothing(self, *, learn: bool) -> None:
        """The part of a rank without samples in a step of all ranks."""
        import torch

        if self.together:
            ids = torch.empty(0, dtype=torch.int64, device="cpu")
            self.table.lookup(ids, insert_missing=learn)
            if learn:
                step, self.slot.global_step = self.slot.global_step, self.slot.global_step + 1
                self.table.apply_gradients(ids, torch.empty(0, self.dim, device="cpu"), step, req_time=self.now_s)

    def size(self) -> int | None:
        """Rows of all ranks or servers, which all ranks ask together."""
        return self.table.size() if hasattr(self.table, "size") else None

    def memory_bytes(self) -> int:
        """Of this process's part."""
        local = self.local
        return 0 if local is None else local.memory_bytes()

    def keep_on_servers(self, name: str, others: list[str]) -> str | None:
        """Has the servers keep the rows of now under a name, beside those of other names; None if they cannot."""
        self.client.flush()
        try:
            self.client.checkpoint(keep_as=name, others=others)
        except UnsupportedError:  # a server without a directory
            return None
        return name

    def restore_on_servers(self, name: str) -> None:
        """Brings the rows on the servers back to those that were kept under a name."""
        try:
            self.client.restore(self.table.name, name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; start the servers with the --dir that they had, or use the rows that they hold with "
                "--set train.ps_restore=false"
            ) from None
        self.client.checkpoint()  # so that what they come back with after a crash does not depend on the kept one

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def _filter(given: TableConfig) -> Any:
    from shoal.sharded.ps.server.table_spec import build_filter

    return build_filter(given.filter(), given.name)
