"""`EmbeddingBagCollection`: the pooled rows of several features over several tables, read and updated together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.configs import Configured, EmbeddingBagConfig
from shoal.nn.keyed import is_torchrec, keyed_tensor
from shoal.nn.module import TableModule
from shoal.nn.protocol import EmbeddingTable
from shoal.nn.read.asked import Asked, Located
from shoal.nn.read.combine import combine, features_of
from shoal.nn.read.jagged import Jagged, as_joined, as_parts, is_keyed, join, split_keys
from shoal.nn.read.ops import Request, check_bags
from shoal.nn.read.plan import Plan
from shoal.nn.read.refusal import notifies_ranks
from shoal.table.protocol import MEAN, SUM


class EmbeddingBagCollection(TableModule):
    """Looks up bags of ids for several features, each in its own table, and pools the rows of each bag.

    >>> import shoal, torch
    >>> from shoal.nn import EmbeddingBagCollection
    >>> tables = {"user": shoal.HashTable(dim=2), "item": shoal.HashTable(dim=4)}
    >>> features = {"user": "user", "clicked": "item", "shown": "item"}
    >>> bags = EmbeddingBagCollection(tables, features, combiner={"user": "sum", "clicked": "mean", "shown": "max"})
    >>> batch = {"user": torch.tensor([[1], [2]]), "clicked": [[7, 8], []], "shown": [[8], [9]]}
    >>> bags(batch).shape
    torch.Size([2, 10])

    Tables may differ in dim, optimizer, kind and device. Those that can be called together form a group: a batch is
    found, pooled and updated in one call per group.

    A forward never writes: not rows, timestamps or counts. In training mode an unknown id gets the row that its table's
    initializer would create (zeros while the table's admission filter is active), in evaluation mode zeros; its first
    update creates the row. When ``backward`` ends, each table's own optimizer applies the gradients to the rows, one
    step per pass and id. Once a `SparseOptimizer` holds a table, its gradients wait for ``step`` instead.

    It replaces TorchRec's ``EmbeddingBagCollection``, also inside TorchRec's models: ``tables`` may be a list of
    TorchRec's configurations (or of `EmbeddingBagConfig`), and a ``KeyedJaggedTensor`` gives a ``KeyedTensor``. See
    docs/from_torchrec.md.

    Args:
        tables: tables by name, or a list of configurations, for each of which a table is created.
        features: name of each feature -> name of its table; by default one feature per table, with the same name.
            Leave it out with configurations, which name their features and pooling.
        combiner: for all features, or by feature: ``"sum"``; ``"mean"`` (over the number of ids); ``"sqrtn"`` (the sum
            divided by the square root of the number of ids); ``"max"``; ``"firstn"``, the first ``max_length`` rows as
            a sequence, padded with zeros; or a `Combiner`. A subclass of `Combiner` that overrides ``combine`` gets the
            rows of all ids, and autograd goes through it.
        output: ``"concat"``: side by side in the order of the features; a batch must hold every feature. If only some
            are sequences (firstn), or sequences differ in length, they are flattened. ``"dict"``: by feature; a batch
            may hold only some. ``"auto"``: a ``KeyedTensor`` for TorchRec's ``KeyedJaggedTensor``, side by side for
            everything else.
        padding_idx: an id to ignore: it is not counted and has no row and no gradient.
        include_last_offset: False if offsets are ``[B]``, without the end, the default of `torch.nn.EmbeddingBag`.
        insert_missing: False: an unknown id gives zeros in training mode, too.
        fused: True: rows are always updated in backward; a `SparseOptimizer` over the model leaves the tables out.
            False: gradients always wait for a `SparseOptimizer`. All modules of a table must agree.
        is_weighted: whether the weights of a batch multiply its rows. None: if the batch has weights; False with
            configurations.
        device: device of tables made from configurations: ``"cpu"``, ``"cuda"``, or ``"meta"``, which means cpu
            without calling an ``init_fn``.
        optimizer: optimizer of tables made from configurations, as for `shoal.HashTable`.
        make_table: creates the table of a configuration from a dim and keywords of `shoal.HashTable`, the default.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingTable] | Sequence[Any],
        features: Mapping[str, str] | None = None,
        *,
        is_weighted: bool | None = None,
        device: Any = None,
        optimizer: Any = None,
        make_table: Callable[..., Any] | None = None,
        combiner: Any = "sum",
        max_length: int | None = None,
        output: Literal["auto", "concat", "dict"] = "auto",
        padding_idx: int | None = None,
        include_last_offset: bool = True,
        insert_missing: bool = True,
        fused: bool | None = None,
    ) -> None:
        who = type(self).__name__
        if output not in ("auto", "concat", "dict"):
            raise ConfigError(f"{who}: output must be 'auto', 'concat' or 'dict', got {output!r}")
        made = Configured.of(who, tables, EmbeddingBagConfig, device=device, optimizer=optimizer, make_table=make_table)
        if made is not None:
            if features is not None or combiner != "sum":
                raise ConfigError(f"{who}: configurations must name features and pooling; leave the arguments out")
            tables, features, combiner = made.tables, made.features, made.combiners
            is_weighted = bool(is_weighted)
        super().__init__(
            tables,  # pyrefly: ignore[bad-argument-type]
            padding_idx=padding_idx,
            insert_missing=insert_missing,
            fused=fused,
        )
        own = self._tables
        named = {name: name for name in own.named} if features is None else features
        named = {str(feature): str(table) for feature, table in named.items()}
        if not named:
            raise ConfigError(f"{who}: features must name at least one feature")
        unknown = sorted({table for table in named.values() if table not in own.named})
        if unknown:
            raise ConfigError(f"{who} has tables {list(own.named)}, but features name {unknown}")
        numbers = {feature: own.number(table) for feature, table in named.items()}
        self._read_features(features_of(who, numbers, combiner, max_length))
        self.output = output
        self.combiner = combiner
        self.include_last_offset = include_last_offset
        self._weighted = is_weighted
        self._configured = made
        self._of_table = named

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configurations that the tables were made from or that describe them (a TorchRec method)."""
        if self._configured is not None:
            return self._configured.configs
        words = {SUM: "SUM", MEAN: "MEAN"}
        found = []
        for name, table in self._tables.named.items():
            own = [feature for feature, of in self._of_table.items() if of == name]
            kinds = {self._tables.features[feature].kind for feature in own}
            pooling = words.get(kinds.pop(), "NONE") if len(kinds) == 1 else "NONE"
            found.append(EmbeddingBagConfig(0, int(table.dim_size), name, feature_names=own, pooling=pooling))
        return found

    def is_weighted(self) -> bool:
        """Whether a batch must have weights."""
        return bool(self._weighted)

    @notifies_ranks
    def forward(self, ids: Any, per_sample_weights: Any = None) -> Any:
        """Return the pooled rows of each bag: ``[B, total width]``, or a dict of them by feature.

        ``ids`` are a mapping of feature to ``(values, offsets)``, lists of lists, a `Ragged`, a ``torch.nested`` jagged
        tensor, a dense ``[B, L]`` tensor or an object shaped like a JaggedTensor; or one object shaped like a
        KeyedJaggedTensor. ``per_sample_weights``, by feature and shaped like the ids, multiply their rows and get
        gradients. Tables made from configurations read the keys that these name and ignore others.

        Raises:
            ConfigError: a feature is missing, or offsets do not rise from 0 to the number of ids. Offsets on a GPU are
                checked there, and a later call raises the error.
        """
        return ids.result(self) if type(ids) is Located else self.ask(ids, per_sample_weights).result()

    def ask(self, ids: Any, per_sample_weights: Any = None) -> Asked:
        if not is_keyed(ids):
            raise ConfigError(
                f"{type(self).__name__} has features {list(self._tables.features)}; ids must come by key, "
                f"got {type(ids).__name__}"
            )
        return self._by_key(ids, per_sample_weights)

    def _by_key(self, ids: Any, weights: Any) -> Asked:
        """Make the request for ids by key."""
        tables, one = self._tables, self._tables.one
        mapped = isinstance(ids, Mapping)
        if mapped:
            keys, joined = list(ids), None
            parts = as_parts(ids if self.include_last_offset else _with_ends(ids), weights)
        else:
            keys, joined = as_joined(ids, weights)
            parts = [joined]
        if self._weighted is not None and weights is None:
            parts = [self._weighed(part) for part in parts]
            joined = None if joined is None else parts[0]
        if self._configured is not None and not self._configured.reads_as_is(keys):
            if joined is not None:
                check_bags(joined, "batch")
                parts, joined = split_keys(ids, keys, joined), None
            parts = [parts[place] for place in self._configured.places(keys)]
            keys, mapped = tables.names, True
        names = tables.names if keys == tables.names else [str(key) for key in keys]
        if torch.compiler.is_compiling() or not tables.planned(names):
            self._check_keys(names)
        if not names:
            return Asked(None, lambda outputs: {})
        if mapped and not one and names != tables.names:  # one plan for all orders of the keys
            order = sorted(range(len(names)), key=lambda number: tables.place(names[number]))
            names, parts = [names[number] for number in order], [parts[number] for number in order]
        plan = tables.plan(len(names) if one else tuple(names), _want_gradients(parts))
        if joined is not None and plan.whole:
            sizes = [[0] * len(names)] if joined.offsets is None or joined.offsets.shape[0] == 1 else [[]]
            batch, trusted = [join([joined], plan.device)], False
        else:
            there = [part.offsets is not None and part.offsets.is_cuda for part in parts]
            checked = not torch.compiler.is_compiling()
            if checked:  # each part: once joined, a part that is too short hides one that is too long
                for name, part, on_gpu in zip(names, parts, there, strict=False):
                    if not on_gpu:  # `join` checks those
                        check_bags(part, name)
            if joined is not None:
                parts = split_keys(ids, names, joined)
            batch = [join([parts[place] for place in call.places], call.device) for call in plan.calls]
            sizes = [[parts[place].values.shape[0] for place in call.places] for call in plan.calls]
            trusted = checked and not any(there)

        def finish(out: Any, combined: dict[int, Tensor]) -> Any:
            if self.output != "dict":
                theirs = self.output == "auto" and is_torchrec(ids)
                joined = self._side_by_side(plan, out, combined, flat=theirs)
                return self._as_keyed_tensor(joined) if theirs else joined
            results = dict(zip(names, _by_place(plan, out, combined), strict=True))
            return {key: self._placed(results[str(key)]) for key in keys}

        return self._pooled(plan, batch, sizes, trusted, finish)

    def _pooled(
        self,
        plan: Plan,
        batch: list[Jagged],
        sizes: list[list[int]],
        trusted: bool,
        finish: Callable[[Any, dict[int, Tensor]], Any],
    ) -> Asked:
        """Request the pooled rows of features that groups pool, and the rows of every other call, which are combined
        here. ``finish`` gets the pooled rows, and the combined ones by the number of their call."""
        offsets: list[Any] = [part.offsets for part in batch]
        weights: list[Any] = [] if batch[0].weights is None or plan.by_rows else [part.weights for part in batch]
        bags = (offsets[0].shape[0] - 1) // len(plan.calls[0].places)
        ids = [part.values for part in batch]

        def combined(outputs: list[Tensor]) -> Any:
            others = {}
            if not plan.fused:
                for number, (call, part) in enumerate(zip(plan.calls, batch, strict=True)):
                    if not call.fused:
                        rows, padding = outputs[call.output], self.padding_idx
                        others[number] = combine(call.of, rows, part.values, offsets[number], part.weights, padding)
            return finish(outputs[0] if plan.width else None, others)

        return Asked(Request(plan, ids, sizes, offsets, weights, bags, self.missing(), trusted), combined)

    def _side_by_side(self, plan: Plan, out: Any, combined: dict[int, Tensor], flat: bool) -> Tensor:
        if plan.fused and (flat or not plan.sequences):
            return self._placed(out)
        if plan.fused and plan.sequence is not None:  # one copy instead of one per feature
            length, dim = plan.sequence
            every = out.view(out.shape[0], -1, length, dim)
            return self._placed(every.transpose(1, 2).reshape(out.shape[0], length, every.shape[1] * dim))
        parts = _by_place(plan, out, combined)
        parts = [self._placed(parts[number]) for number in plan.order]
        if flat or len({part.shape[1:-1] for part in parts}) > 1:
            parts = [part.flatten(1) for part in parts]
        return torch.cat(parts, dim=-1)

    def _as_keyed_tensor(self, values: Tensor) -> Any:
        """Convert results that are side by side to a ``KeyedTensor``."""
        dims = [keeper.dim for keeper in self._tables.distinct]
        features = self._tables.features.values()
        widths = [dims[feature.table] * max(1, feature.length) for feature in features]
        return keyed_tensor(self._tables.names, widths, values)

    def _weighed(self, part: Jagged) -> Jagged:
        """Return a batch with or without its weights, depending on ``is_weighted``."""
        if self._weighted and part.weights is None:
            raise ConfigError(f"{type(self).__name__} has is_weighted=True, so a batch must have weights; it has none")
        return part if self._weighted else part._replace(weights=None)

    def _check_keys(self, names: list[str]) -> None:
        """Refuse a batch without some feature if results are side by side: columns would be mixed up."""
        who, one, features = type(self).__name__, self._tables.one, self._tables.features
        for name in names:
            self._check_key(name)
        if self.output == "dict":
            return
        missing = [] if one else [name for name in features if name not in names]
        if missing:
            raise ConfigError(
                f"{who} puts {list(features)} side by side, but the batch has no {missing}; add empty bags for them, "
                "or use output='dict'"
            )
        if not names:
            raise ConfigError(f"{who}: a batch must have at least one key for output='concat', got none")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, combiner={self.combiner!r}"


def _want_gradients(parts: list[Jagged]) -> bool:
    return torch.is_grad_enabled() and any(part.weights is not None and part.weights.requires_grad for part in parts)


def _by_place(plan: Plan, out: Any, combined: dict[int, Tensor]) -> list[Tensor]:
    """Return the result of each feature, in batch order; those that groups pooled are views of one tensor."""
    columns = {}
    if out is not None:
        pooled = [number for number in plan.order if plan.places[number].call < 0]
        widths = [plan.places[number].width for number in pooled]
        columns = dict(zip(pooled, out.split(widths, 1), strict=True))
        columns = {number: plan.places[number].shaped(part) for number, part in columns.items()}
    parts = []
    for number, place in enumerate(plan.places):
        if place.call < 0:
            parts.append(columns[number])
        else:
            every, share = combined[place.call], len(plan.calls[place.call].places)
            parts.append(every.view(share, -1 if every.shape[0] else 0, *every.shape[1:])[place.index])
    return parts


def _with_ends(ids: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the end to offsets that come in pairs with values."""
    return {
        key: (part[0], with_end(part[0], part[1]), *part[2:]) if isinstance(part, tuple) and len(part) > 1 else part
        for key, part in ids.items()
    }


def with_end(ids: Any, offsets: Any) -> Tensor:
    """Convert offsets ``[B]`` to ``[B + 1]``."""
    offsets = torch.as_tensor(offsets, device=ids.device if isinstance(ids, Tensor) else "cpu")
    return torch.cat([offsets, offsets.new_full((1,), len(ids))])
