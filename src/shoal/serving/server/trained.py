"""Serves a model from `shoal train`: raw values or ids in, logits and probabilities out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal import _core
from shoal.data.raw import InputMaker, Inputs
from shoal.errors import ConfigError, DataError, did_you_mean
from shoal.nn.feature_rows import FeatureRows, Pooling
from shoal.nn.read.combine import KINDS
from shoal.serving.export.features import IDS, LENGTHS, OUTPUTS, ServedFeatures
from shoal.serving.export.manifest import inside
from shoal.serving.export.program_file import load_exported
from shoal.serving.predict import PredictCall
from shoal.serving.server.batching import Joinable
from shoal.serving.server.moments import Fresh
from shoal.serving.server.net.card import Card
from shoal.serving.server.net.native import NativeNet
from shoal.serving.server.net.placement import ON_CPU, Placement
from shoal.serving.server.net.predictor import NativePredictor, ReadFeature
from shoal.serving.server.net.row_plan import NotNative, Op, PlanBuilder, Value
from shoal.serving.server.program import Program, library_of, placed_net, runs_on, source_of
from shoal.serving.server.servable import Signature, TableView, Tensors, dtype_of
from shoal.serving.status import invalid_argument
from shoal.serving.tensors import MAX_TENSOR_BYTES, TensorHead
from shoal.table.config.optim import Sgd
from shoal.table.table import HashTable

log = logging.getLogger(__name__)

BATCH = "inputs"
"""The key of the converted inputs in a batch."""
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32")
_DTYPES = ("string", *_INTEGERS, "float", "double")


@dataclass(frozen=True)
class MadeInputs(Joinable):
    """Converted inputs of some rows, which can be joined and split by rows."""

    made: Inputs
    ndim = 2
    dtype = torch.float32

    def __len__(self) -> int:
        return self.made.dense.shape[0]

    @property
    def ids(self) -> torch.Tensor:
        return self.made.ids

    @property
    def offsets(self) -> torch.Tensor | None:
        return self.made.offsets

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.made.dense.shape)

    @classmethod
    def cat(cls, parts: Sequence[MadeInputs]) -> MadeInputs:
        offsets = None
        if parts[0].offsets is not None:
            lengths = torch.cat([one.offsets.diff() for one in parts if one.offsets is not None])
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        dense, ids = (torch.cat(each) for each in zip(*((one.made.dense, one.ids) for one in parts), strict=True))
        return MadeInputs(Inputs(dense=dense, ids=ids, offsets=offsets))

    def __getitem__(self, rows: slice) -> MadeInputs:
        begin, end, _ = rows.indices(len(self))
        made = self.made
        if made.offsets is None:
            return MadeInputs(Inputs(dense=made.dense[rows], ids=made.ids[rows], offsets=None))
        features = (made.offsets.shape[0] - 1) // max(1, len(self))
        offsets = made.offsets[begin * features : end * features + 1]
        ids = made.ids[int(offsets[0]) : int(offsets[-1])]
        return MadeInputs(Inputs(dense=made.dense[rows], ids=ids, offsets=offsets - offsets[0]))


class TrainedProgram(Program):
    """A model from `shoal train`: looks rows up, pools them and runs the net.

    Args:
        net: called with two keyword arguments: the numbers and the rows.
        names: the names of these arguments.
        tables: name -> table.
        pooling: how the rows of each feature are pooled, in order.
        log_odds: added to each logit, to correct for negatives that training left out.
    """

    def __init__(
        self,
        net: Callable[..., Any],
        names: tuple[str, str],
        tables: Mapping[str, HashTable],
        pooling: Mapping[str, Pooling],
        *,
        ragged: bool,
        log_odds: float = 0.0,
        card: Card | None = None,
    ) -> None:
        super().__init__(net, {}, list(OUTPUTS), lambda wanted, fresh: {}, card)
        self._log_odds = log_odds
        self._names, self._tables, self._pooling, self._ragged = names, dict(tables), dict(pooling), ragged
        self._rows = self._module(self._tables)

    def _module(self, tables: Mapping[str, HashTable]) -> FeatureRows:
        return FeatureRows(tables, self._pooling, ragged=self._ragged).eval()

    def __call__(self, inputs: Tensors) -> Tensors:
        batch: MadeInputs = inputs[BATCH]
        if self._card is not None:
            return self._card.run(lambda: self._logits(batch))
        with torch.inference_mode():
            return self._logits(batch)

    def _logits(self, batch: MadeInputs) -> Tensors:
        dense, rows = self._names
        moment = self.moments.enter()
        try:
            found = self._fresh_rows(batch, moment.fresh) if moment.fresh else self._rows(batch)
        finally:
            moment.readers.pop()
        logit = moment.net(**{dense: batch.made.dense.to(found.device, non_blocking=True), rows: found})
        if self._log_odds:
            logit = logit + self._log_odds
        return dict(zip(OUTPUTS, (logit, logit.sigmoid()), strict=True))

    def _fresh_rows(self, batch: MadeInputs, fresh: Mapping[tuple[str, int], Fresh]) -> torch.Tensor:
        """The rows of a batch, including pushed rows that are not written to the tables yet."""
        ((name, table), *others) = self._tables.items()
        if self._rows.single is None or others:
            rows = self._module(self._overlaid(batch, fresh))(batch)
            return rows if self._card is None else rows.to(self._card.device)
        ids = batch.ids.reshape(-1).to(table.device)
        rows = table.lookup(ids)
        if (name, 0) in fresh:
            fresh[name, 0].onto(ids, rows)
        return rows.view(*batch.ids.shape, table.dim_size)

    def _overlaid(self, batch: MadeInputs, fresh: Mapping[tuple[str, int], Fresh]) -> dict[str, HashTable]:
        """Small tables with the batch's rows, including pushed rows that are not written to the tables yet."""
        ids = batch.ids.reshape(-1).unique()
        tables = {}
        for name, table in self._tables.items():
            rows = table.lookup(ids.to(table.device)).cpu()
            if (name, 0) in fresh:
                fresh[name, 0].onto(ids, rows)
            tables[name] = HashTable(table.dim_size, optimizer=Sgd(), initializer="zeros", name=name)
            tables[name].assign(ids, rows)
        return tables


@dataclass(slots=True)
class FeatureSignature(Signature):
    """A signature that converts a request's inputs natively, with the feature definitions used in training."""

    maker: InputMaker | None = None
    reader: Any = None
    """Reads several requests at once; None: each is read separately."""
    pins: bool = False
    """Whether inputs are created in pinned memory for a GPU."""

    def __post_init__(self) -> None:
        self.reader = None if self.maker is None else request_reader(self.maker, self.spec.inputs)

    def check(self, where: str, inputs: Tensors) -> None:
        """Raise INVALID_ARGUMENT for unknown inputs, and for dtypes or shapes that the model does not accept."""
        assert self.maker is not None
        known, rows = self.spec.inputs, {}
        lists = {self.maker.columns[name] + LENGTHS for name in self.maker.listed}
        for alias, value in inputs.items():
            if alias not in known and alias not in lists:
                hint = did_you_mean(alias, known)
                raise invalid_argument(f"{where}: there is no input {alias!r}{hint}; inputs are {sorted(known)}")
            if isinstance(value, list):
                rows[alias] = len(value)
                continue
            got = value.dtype if isinstance(value, TensorHead) else dtype_of(value)
            accepted = _INTEGERS if alias in lists else self._dtypes_of(alias)
            if got not in accepted:
                raise invalid_argument(f"{where}: input {alias!r} must be one of {', '.join(accepted)}, got {got}")
            shape = tuple(value.shape)
            most = 2 if alias + LENGTHS in lists else 1
            if not (len(shape) in (1, most) or (len(shape) == 2 and shape[1] == 1)):
                forms = "[rows] or [rows, values]" if most == 2 else "[rows]"
                raise invalid_argument(f"{where}: input {alias!r} must have shape {forms}, got {list(shape)}")
            rows[alias] = shape[0]
        if len(set(rows.values())) > 1:
            raise invalid_argument(f"{where}: inputs must have one row per sample each, got different numbers: {rows}")
        if not rows:
            raise invalid_argument(f"{where}: a request must have at least one input; inputs are {sorted(known)}")
        if lone := [
            alias for alias in inputs if alias in lists - known.keys() and alias.removesuffix(LENGTHS) not in inputs
        ]:
            raise invalid_argument(f"{where}: input {lone[0]!r} must come with {lone[0].removesuffix(LENGTHS)!r}")
        width = len(self.maker.schema.sparse) + len(self.maker.schema.dense)
        if (n := next(iter(rows.values()))) > (most := MAX_TENSOR_BYTES // 8 // max(1, width)):
            raise invalid_argument(f"{where}: a request must have at most {most} rows, got {n}")

    def _dtypes_of(self, alias: str) -> tuple[str, ...]:
        assert self.maker is not None
        if self.maker.ready and alias in self.maker.columns.values():
            return _INTEGERS
        only_number = alias not in self.maker.columns.values()
        return _DTYPES[1:] if only_number else _DTYPES

    def convert(self, inputs: Tensors) -> Tensors:
        """Convert tensors or JSON lists to the model's inputs; raises INVALID_ARGUMENT for bad values."""
        assert self.maker is not None
        lengths = {alias.removesuffix(LENGTHS): one for alias, one in inputs.items() if alias.endswith(LENGTHS)}
        lengths = {alias: one for alias, one in lengths.items() if alias + LENGTHS not in self.spec.inputs}
        columns = {
            alias: _column(value, lengths.get(alias), alias)
            for alias, value in inputs.items()
            if alias.removesuffix(LENGTHS) not in lengths or not alias.endswith(LENGTHS)
        }
        try:
            return {BATCH: MadeInputs(self.maker(columns))}
        except ConfigError as error:
            raise invalid_argument(str(error)) from None

    def join(self, where: str, calls: Sequence[PredictCall]) -> tuple[Tensors, list[int]] | None:
        """The natively converted inputs of all valid requests; the others count as -1 rows."""
        if self.reader is None:
            return None
        assert self.maker is not None
        made = self.reader.read([call.data for call in calls])
        return {BATCH: MadeInputs(made_inputs(made, self.maker, pin=self.pins))}, made.rows


def made_inputs(made: Any, maker: InputMaker, *, pin: bool = False) -> Inputs:
    """Inputs read by a native reader, as tensors; pinned for a GPU."""
    schema, total = maker.schema, made.total
    dense = torch.empty(total, len(schema.dense), device="cpu", pin_memory=pin)
    ids = torch.empty(made.ids, dtype=torch.int64, device="cpu", pin_memory=pin)
    offsets = None
    if maker.rules.listed:
        offsets = torch.empty(made.lengths + 1, dtype=torch.int64, device="cpu")
    made.copy(dense.data_ptr(), ids.data_ptr(), 0 if offsets is None else offsets.data_ptr())
    if offsets is None:
        ids = ids.view(total, len(schema.sparse))
    return Inputs(dense=dense, ids=ids, offsets=offsets)


def request_reader(maker: InputMaker, known: Collection[str]) -> Any:
    """A native reader of serialised requests, which converts them as ``maker`` converts their columns.

    It leaves invalid or unusual requests to `FeatureSignature.convert`. None if an input's name could also be the name
    of a list's lengths.
    """
    schema = maker.schema
    lists = {maker.columns[name] for name in maker.listed}
    names = [*known, *(name + LENGTHS for name in lists)]
    if len(set(names)) < len(names):
        return None
    places = {name: place for place, name in enumerate(names)}
    inputs = []
    for name in names:
        if name not in known:
            inputs.append((name, [], [], places[name.removesuffix(LENGTHS)], False, False, False, True))
            continue
        features = [place for place, one in enumerate(schema.sparse) if maker.columns[one] == name]
        numbers = [place for place, one in enumerate(schema.dense) if schema.column(one) == name]
        raw = not (maker.ready and features)
        inputs.append(
            (name, features, numbers, places.get(name + LENGTHS, -1), name in lists, raw and bool(features), raw, False)
        )
    return _core.RequestReader(maker.rules, inputs, maker.ready)


def _column(value: Any, lengths: Any, alias: str) -> Any:
    """Convert an input to the form that `InputMaker` accepts: of a list, only the values present in each row.

    Rows are padded to equal length with empty strings or NaN, or ``lengths`` has the number of values in each.
    """
    if isinstance(value, list):
        return value
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if value.ndim == 2 and value.shape[1] == 1 and lengths is None:
        value = value[:, 0]
    if value.ndim == 1:
        if lengths is not None:
            raise invalid_argument(f"input {alias + LENGTHS!r} must come with values of shape [rows, values]")
        return list(value) if value.dtype == object else value
    if lengths is None and not value.shape[1]:
        counts = [0] * len(value)
    elif lengths is None:
        present = value != b"" if value.dtype == object else ~np.isnan(value) if value.dtype.kind == "f" else None
        if present is None:
            return value
        counts = value.shape[1] - np.argmax(present[:, ::-1], 1)
        counts = np.where(present.any(1), counts, 0)
    else:
        counts = lengths.numpy()
        if len(counts) and (counts.min() < 0 or counts.max() > value.shape[1]):
            raise invalid_argument(f"input {alias + LENGTHS!r} must be 0 to {value.shape[1]}, got {counts.tolist()}")
    return [row[:count].tolist() for row, count in zip(value, counts, strict=True)]


def load_trained(
    directory: Path, manifest: Any, views: Mapping[str, TableView], placement: Placement = ON_CPU
) -> tuple[dict[str, Signature], None, TrainedProgram]:
    """The two signatures of a `shoal train` export, for raw values and for ids; and its program."""
    features = ServedFeatures.read(manifest.features, directory)
    makers = features.makers()
    try:
        dense, rows = map(str, manifest.program["net_inputs"])
        file = inside(directory, directory / manifest.program["file"])
        specs = {name: manifest.signatures[name] for name in makers}
        tables = {name: view.table for name, view in views.items()}
        if missing := {one.table for one in features.pooling.values()} - tables.keys():
            raise KeyError(*sorted(missing))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{directory}: the manifest's program is malformed: {error!r}") from None
    exported = load_exported(file)
    library = library_of(directory, manifest.program, exported, placement)
    net, card = placed_net(exported, placement, library, graphs=all(bool(spec.row_wise) for spec in specs.values()))
    program = TrainedProgram(
        net, (dense, rows), tables, features.pooling, ragged=makers[IDS].rules.listed,
        log_odds=features.schema.log_odds, card=card,
    )  # fmt: skip
    program.runs = runs_on(placement, library)
    signatures = {
        name: FeatureSignature(
            specs[name], program, batch=bool(specs[name].row_wise), samples=True, maker=maker,
            pins=placement.torch_device.type == "cuda",
        )
        for name, maker in makers.items()
    }  # fmt: skip
    if placement.native:
        _add_native(exported, program, signatures, (dense, rows), features, views)
    return dict(signatures), None, program


def _add_native(
    exported: torch.export.ExportedProgram, program: TrainedProgram, signatures: Mapping[str, FeatureSignature],
    names: tuple[str, str], features: ServedFeatures, views: Mapping[str, TableView],
) -> None:  # fmt: skip
    """Make the signatures answer without the interpreter, if possible."""
    log_odds = features.schema.log_odds

    def finish(plan: PlanBuilder, found: list[Value]) -> list[Value]:
        if len(found) != 1 or found[0].sizes:
            raise NotNative("the net does not return one logit per row")
        logit = plan.map(Op.add, found[0], plan.number(log_odds)) if log_odds else found[0]
        return [logit, plan.map(Op.sigmoid, logit)]

    try:
        net = NativeNet(exported, finish, OUTPUTS)
        read, column = {}, 0
        for name, one in features.pooling.items():
            length = one.max_length if one.combiner == "firstn" else 1
            read[name] = ReadFeature(
                source=one.table, combiner=KINDS[one.combiner], length=length, input=names[1], column=column
            )
            column += length * one.dim
        sources = {one.table: source_of(one.table, views) for one in features.pooling.values()}
        for signature in signatures.values():
            if signature.batch and signature.reader is not None:
                native = NativePredictor(net, sources, read, OUTPUTS, reader=signature.reader, numbers=names[0])
                signature.native = native
                program.moments.followers.append(native.prepare)
        program.runs = "native"
    except NotNative as error:
        program.runs = f"{program.runs}, since {error}"
        log.info("the net is run by %s", program.runs)
