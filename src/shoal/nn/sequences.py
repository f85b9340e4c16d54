"""`EmbeddingCollection`: the rows of several features over several tables, not pooled, read and updated together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.configs import Configured, EmbeddingConfig
from shoal.nn.embedding import HashEmbedding
from shoal.nn.keyed import is_torchrec, jagged_tensor
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.read.asked import Asked, Located
from shoal.nn.read.jagged import Jagged, as_jagged, as_joined, is_keyed, split_keys
from shoal.nn.read.ops import check_bags
from shoal.nn.read.plan import Feature
from shoal.nn.read.refusal import notifies_ranks


class EmbeddingCollection(HashEmbedding):
    """Looks up the ids of several features, each in its own table, and returns one row per id, in order.

    >>> import torch
    >>> from shoal.nn import EmbeddingCollection, EmbeddingConfig
    >>> item = EmbeddingConfig(num_embeddings=1000, embedding_dim=4, name="item", feature_names=["clicked", "shown"])
    >>> rows = EmbeddingCollection([item])({"clicked": [[7, 8], []], "shown": [[8], [9]]})
    >>> rows["clicked"].values.shape, rows["shown"].row_splits.tolist()
    (torch.Size([2, 4]), [0, 1, 2])

    It replaces TorchRec's ``EmbeddingCollection``: a ``KeyedJaggedTensor`` gives a dict of ``JaggedTensor``.
    Tables may differ in dim, optimizer, kind and device. For unknown ids and updates see `EmbeddingBagCollection`.

    Args:
        tables: tables by name, or a list of TorchRec's configurations or of `EmbeddingConfig`, for each of which a
            table is created.
        features: name of each feature -> name of its table; by default one feature per table, with the same name.
            Leave it out with configurations, which name their features.
        need_indices: give each ``JaggedTensor`` the ids of its rows as weights.
        device, optimizer, make_table: for tables made from configurations; see `EmbeddingBagCollection`, also for the
            other arguments.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingTable] | Sequence[Any],
        features: Mapping[str, str] | None = None,
        *,
        need_indices: bool = False,
        device: Any = None,
        optimizer: Any = None,
        make_table: Callable[..., Any] | None = None,
        padding_idx: int | None = None,
        insert_missing: bool = True,
        fused: bool | None = None,
    ) -> None:
        who = type(self).__name__
        made = Configured.of(who, tables, EmbeddingConfig, device=device, optimizer=optimizer, make_table=make_table)
        if made is not None:
            if features is not None:
                raise ConfigError(f"{who}: configurations must name features; leave the argument out")
            tables, features = made.tables, made.features
        if not isinstance(tables, Mapping):
            raise ConfigError(f"{who}: tables must be tables by name or configurations, got {tables!r:.60}")
        super().__init__(tables, padding_idx=padding_idx, insert_missing=insert_missing, fused=fused)
        own = self._tables
        named = {name: name for name in own.named} if features is None else features
        self._of_table = {str(feature): str(table) for feature, table in named.items()}
        if unknown := sorted(set(self._of_table.values()) - own.named.keys()):
            raise ConfigError(f"{who} has tables {list(own.named)}, but features name {unknown}")
        self._read_features({feature: Feature(own.number(table)) for feature, table in self._of_table.items()})
        self._configured = made
        self._need_indices = need_indices

    @notifies_ranks
    def forward(self, ids: Any) -> dict[str, Any]:  # pyrefly: ignore[bad-override]
        """Return the rows of each feature's ids, by feature: ``JaggedTensor`` for a ``KeyedJaggedTensor``, else a
        `Ragged` (or ``[*shape, D]`` for a tensor of ids).

        With configurations, a batch must have the keys that these name, and may have others. Without, it may have only
        some of the features.
        """
        return ids.result(self) if type(ids) is Located else self.ask(ids).result()

    def ask(self, ids: Any) -> Asked:  # pyrefly: ignore[bad-override]
        if not is_keyed(ids):
            raise ConfigError(
                f"{type(self).__name__} has features {list(self._tables.features)}; ids must come by key, "
                f"got {type(ids).__name__}"
            )
        parts: list[tuple[Any, Jagged]]
        if isinstance(ids, Mapping):
            keys, parts = list(ids), [(part, self.checked(as_jagged(part))) for part in ids.values()]
        else:
            keys, joined = as_joined(ids)
            check_bags(joined, "batch")
            parts = [(None, part) for part in split_keys(ids, keys, joined)]
        if self._configured is not None:
            parts = [parts[place] for place in self._configured.places(keys)]
            keys = self._tables.names
        for key in keys:
            self._check_key(str(key))

        def finish(rows: dict[str, Tensor]) -> dict[str, Any]:
            if not is_torchrec(ids):
                return {key: self.shaped(*part, rows[str(key)]) for key, part in zip(keys, parts, strict=True)}
            results = {}
            for key, (_, part) in zip(keys, parts, strict=True):
                assert part.offsets is not None
                results[key] = jagged_tensor(rows[str(key)], part.offsets, part.values if self._need_indices else None)
            return results

        return self.ask_rows({str(key): part for key, part in zip(keys, parts, strict=True)}, finish)

    def embedding_configs(self) -> list[Any]:
        """Return the configurations that the tables were made from or that describe them (a TorchRec method)."""
        if self._configured is not None:
            return self._configured.configs
        return [
            EmbeddingConfig(0, int(table.dim_size), name, feature_names=own)
            for (name, table), own in zip(self._tables.named.items(), self.embedding_names_by_table(), strict=True)
        ]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of each table's results; ``key@table`` for a key that several tables read."""
        if self._configured is not None:
            return self._configured.by_table
        return [[name for name, of in self._of_table.items() if of == table] for table in self._tables.named]

    def embedding_dim(self) -> int:
        """Return the dim of all tables.

        Raises:
            ConfigError: the tables' dims differ.
        """
        dims = {name: int(table.dim_size) for name, table in self._tables.named.items()}
        if len(set(dims.values())) > 1:
            raise ConfigError(f"{type(self).__name__}.embedding_dim: all tables must have the same dim, got {dims}")
        return next(iter(dims.values()))

    def need_indices(self) -> bool:
        """Whether results include the ids of their rows."""
        return self._need_indices
