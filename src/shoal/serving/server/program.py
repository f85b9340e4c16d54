"""The dense program of an entry or standalone export: looks rows up, pools them and runs the net."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ConfigError, DataError
from shoal.serving.client.remote_rows import RemoteRows
from shoal.serving.client.sub_graphs import SubGraphs
from shoal.serving.export.compiled import CompiledNet
from shoal.serving.export.manifest import SignatureSpec, inside
from shoal.serving.export.program_file import load_exported
from shoal.serving.server.moments import Fresh, Moments
from shoal.serving.server.net.card import Card, CardNet
from shoal.serving.server.net.exported import direct_call, named_outputs
from shoal.serving.server.net.native import NativeNet
from shoal.serving.server.net.placement import ON_CPU, Placement
from shoal.serving.server.net.predictor import NativePredictor, ReadFeature, Source
from shoal.serving.server.net.row_plan import NotNative
from shoal.serving.server.servable import Signature, TableView, Tensors
from shoal.serving.tensors import dtype_code, torch_dtype
from shoal.table.pooling import pool_equal
from shoal.table.protocol import MEAN, SUM

log = logging.getLogger(__name__)

COMBINERS = ("sum", "mean", "none")
REMOTE_NET = "gpu_remote_call"
"""The signature with which ``dense_0`` answers an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A sparse input of the net: int64 ids ``[B, L]`` whose rows come from ``slot`` and are pooled.

    ``combiner``: sum or mean over L (``[B, D]``), or none (``[B, L, D]``). ``padding``: an id without a row; with it,
        the rows of a REST request may have different numbers of ids.
    """

    slot: str
    combiner: str = "sum"
    padding: int | None = None

    def __post_init__(self) -> None:
        if self.combiner not in COMBINERS:
            raise ConfigError(f"feature of {self.slot!r}: combiner must be one of {COMBINERS}, got {self.combiner!r}")


def pool(feature: Feature, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Pool ``rows``, the rows of ``ids.flatten()``: ``[B, D]``, or ``[B, L, D]`` for ``none``."""
    if feature.combiner != "none":
        return pool_equal(rows, ids, MEAN if feature.combiner == "mean" else SUM, padding=feature.padding)
    rows = rows.reshape(*ids.shape, rows.shape[-1])
    return rows if feature.padding is None else rows * (ids != feature.padding).unsqueeze(-1)


FreshRows = Mapping[tuple[str, int], Fresh]
Lookup = Callable[[dict[str, torch.Tensor], FreshRows], dict[str, torch.Tensor]]
"""(slot -> ids, rows that overlay the tables) -> (slot -> rows)."""


def local_lookup(views: Mapping[str, TableView], shards: int) -> Lookup:
    """Look rows up in this process's tables; with shards, table ``<name>_<shard>`` holds the ids of its shard."""
    places: dict[str, list[tuple[tuple[str, int], Callable[[torch.Tensor], torch.Tensor]]]] = {}
    dims: dict[str, int] = {}
    for view in views.values():
        for alias, sub in view.slots.items():
            number = view.sub_tables.index(sub)
            places.setdefault(alias, []).append(((view.name, number), view.reads[number]))
            dims[alias] = view.dims[number]

    def lookup(wanted: dict[str, torch.Tensor], fresh: FreshRows) -> dict[str, torch.Tensor]:
        found = {}
        for slot, ids in wanted.items():
            parts = places[slot]
            if len(parts) == 1:
                place, part = parts[0]
                rows = found[slot] = part(ids)
                if place in fresh:
                    fresh[place].onto(ids, rows)
                continue
            rows = found[slot] = torch.empty(len(ids), dims[slot], device=ids.device)
            owner = torch.remainder(ids, shards)
            for shard, (place, part) in enumerate(parts):
                chosen = owner == shard
                own = part(ids[chosen])
                if place in fresh:
                    fresh[place].onto(ids[chosen], own)
                rows[chosen] = own
        return found

    return lookup


def remote_lookup(graphs: SubGraphs, num_ps: int, dims: Mapping[str, int]) -> Lookup:
    """Look rows up in the embedding shards, concurrently: distinct ids go to shard ``id mod num_ps``."""
    slots = sorted(dims)
    kinds = [torch.float32] * len(slots)
    no_ids = torch.empty(0, dtype=torch.int64, device="cpu")
    native = RemoteRows(graphs, num_ps, dims)

    def lookup(wanted: dict[str, torch.Tensor], fresh: FreshRows) -> dict[str, torch.Tensor]:
        if (rows := native.lookup(wanted)) is not None:
            return rows
        asked: dict[str, dict[str, torch.Tensor]] = {}
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for slot in slots:
            ids, inverse = torch.unique(wanted.get(slot, no_ids), return_inverse=True)
            owner = torch.remainder(ids, num_ps)
            order = owner.argsort(stable=True)  # the ids of each shard, one shard after the other
            counts = torch.bincount(owner, minlength=num_ps).tolist()
            for shard, own in enumerate(ids[order].split(counts)):
                asked.setdefault(f"ps_{shard}", {})[slot] = own
            found[slot] = order, inverse
        needed = {name: inputs for name, inputs in asked.items() if any(len(ids) for ids in inputs.values())}
        answers = graphs.call_all(needed, "lookup", slots, kinds)
        rows = {}
        for place, slot in enumerate(slots):
            if slot not in wanted:
                continue
            order, inverse = found[slot]
            parts = [answer[place].reshape(len(needed[name][slot]), dims[slot]) for name, answer in answers.items()]
            in_order = torch.cat(parts) if parts else torch.zeros(0, dims[slot], device="cpu")
            distinct = torch.empty(len(order), dims[slot], device="cpu")
            distinct[order] = in_order
            rows[slot] = distinct[inverse]
        return rows

    return lookup


def remote_net(graphs: SubGraphs, kinds: Mapping[str, torch.dtype | None]) -> Callable[..., Any]:
    """The net of ``dense_0``; its keyword arguments are pooled rows and dense values. ``kinds``: output -> dtype."""

    def call(**inputs: torch.Tensor) -> Tensors:
        answers = graphs.call("dense_0", REMOTE_NET, inputs, list(kinds), list(kinds.values()))
        return dict(zip(kinds, answers, strict=True))

    return call


class Program:
    """A net with its features: ``{alias: tensor}`` in, ``{alias: tensor}`` out, both in host memory.

    Args:
        lookup: returns rows on the net's device, or in host memory if ``remote``.
        card: the GPU that the net is on; None: it is on the CPU.
        remote: rows come from other servers.
    """

    def __init__(
        self,
        net: Callable[..., Any],
        features: Mapping[str, Feature],
        outputs: list[str],
        lookup: Lookup,
        card: Card | None = None,
        *,
        remote: bool = False,
    ) -> None:
        self._features, self._outputs, self._lookup = dict(features), outputs, lookup
        self._card, self._remote = card, remote
        self.runs = "torch"
        """A description of what runs the net."""
        self.moments = Moments(net)
        """The current net and the pushed rows that overlay the tables."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """name -> parameter or buffer of the net; empty if the net runs on another server."""
        return getattr(self.moments.net, "weights", {})

    def bound(self, weights: Mapping[str, torch.Tensor]) -> Callable[..., Any]:
        """A copy of the net with other weights; raises DataError if they do not fit."""
        wanted = {name: (value.dtype, tuple(value.shape)) for name, value in self.weights.items()}
        given = {name: (value.dtype, tuple(value.shape)) for name, value in weights.items()}
        if wanted != given or not wanted:
            wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
            first = "; ".join(f"{name}: got {given.get(name)}, expected {wanted.get(name)}" for name in wrong[:4])
            raise DataError(f"{len(wrong)} of the net's {len(wanted)} weights do not fit ({first})")
        return self.moments.net.with_weights(weights)  # pyrefly: ignore

    def __call__(self, inputs: Tensors) -> Tensors:
        card = self._card
        if card is None:
            with torch.inference_mode():
                return self._answer(*self._arguments(inputs))
        if self._remote:  # look rows up before the GPU is locked, so that batches wait for servers concurrently
            with torch.inference_mode():
                net, arguments = self._arguments(inputs)
            return card.run(lambda: self._answer(net, card.bring(arguments)))
        return card.run(lambda: self._answer(*self._arguments(card.bring(inputs))))

    def _answer(self, net: Callable[..., Any], arguments: Tensors) -> Tensors:
        return named_outputs(net(**arguments), self._outputs)

    def _arguments(self, inputs: Tensors) -> tuple[Callable[..., Any], Tensors]:
        """The net and its arguments: the features' pooled rows and the other inputs."""
        arguments = dict(inputs)
        wanted: dict[str, list[torch.Tensor]] = {}
        for alias, feature in self._features.items():
            wanted.setdefault(feature.slot, []).append(inputs[alias].reshape(-1))
        moment = self.moments.enter()
        try:
            asked = {slot: ids[0] if len(ids) == 1 else torch.cat(ids) for slot, ids in wanted.items()}
            rows = self._lookup(asked, moment.fresh)
        finally:
            moment.readers.pop()
        at = dict.fromkeys(wanted, 0)
        for alias, feature in self._features.items():
            ids = inputs[alias]
            begin = at[feature.slot]
            at[feature.slot] = end = begin + ids.numel()
            arguments[alias] = pool(feature, ids, rows[feature.slot][begin:end])
        return moment.net, arguments


def native_predictor(
    exported: torch.export.ExportedProgram, program: Program, spec: SignatureSpec, features: Mapping[str, Feature],
    views: Mapping[str, TableView], placement: Placement,
) -> NativePredictor | None:  # fmt: skip
    """A predictor that answers the program's requests without the interpreter; None if that is impossible."""
    if not placement.native:
        return None
    try:
        net = NativeNet(exported)
        sources, read = {}, {}
        for alias, feature in features.items():
            sources[feature.slot] = source_of(feature.slot, views)
            unpooled = feature.combiner == "none"
            read[alias] = ReadFeature(
                source=feature.slot, combiner=MEAN if feature.combiner == "mean" else SUM, padding=feature.padding,
                length=net.sizes[alias][0] if unpooled else 1, unpooled=unpooled, input=alias,
            )  # fmt: skip
        made = NativePredictor(net, sources, read, list(spec.outputs), inputs=spec.inputs)
    except NotNative as error:
        program.runs = f"{program.runs}, since {error}"
        log.info("the net is run by %s", program.runs)
        return None
    program.runs = "native"
    program.moments.followers.append(made.prepare)
    return made


def _native_moments(exported: torch.export.ExportedProgram, program: Program) -> tuple[Moments, str]:
    """The moments of an entry whose rows come from other servers; its net is native if possible."""
    try:
        return Moments(NativeNet(exported)), "native"
    except NotNative as error:
        return program.moments, f"{program.runs}, since {error}"


def placed_net(
    exported: torch.export.ExportedProgram, placement: Placement, library: CompiledNet | None, *, graphs: bool
) -> tuple[Callable[..., Any], Card | None]:
    """The net on its device, and the `Card` that enqueues it; None for a net on the CPU."""
    if placement.on_gpu:
        net = CardNet(exported, placement, graphs=graphs, library=library)
        return net, Card(net.device)
    if library is not None:
        return library, None
    if placement.precision == "fp32":
        return direct_call(exported), None
    return CardNet(exported, placement, graphs=False), None


def library_of(
    directory: Path, program: Mapping[str, Any], exported: torch.export.ExportedProgram, placement: Placement
) -> CompiledNet | None:
    """The net compiled at export, if there is one, it is allowed, and it can run here."""
    listed = program.get("compiled")
    kind = "cuda" if placement.on_gpu else "cpu"
    if not placement.compiled or placement.precision != "fp32" or not isinstance(listed, dict) or kind not in listed:
        return None
    file = inside(directory, directory / str(listed[kind]))
    try:
        return CompiledNet(file, direct_call(exported), placement.torch_device)
    except Exception as error:  # compiled for another machine or torch; torch raises many kinds
        log.warning("not using %s, because it cannot be loaded here: %s", file, error)
        return None


def runs_on(placement: Placement, library: CompiledNet | None) -> str:
    """A description of what runs a net."""
    how = "torch" if library is None else "compiled"
    where = how if not placement.on_gpu else f"{how} on {placement.device}"
    return where if placement.precision == "fp32" else f"{where}, {placement.precision}"


def source_of(slot: str, views: Mapping[str, TableView]) -> Source:
    """The native tables that have the rows of a slot; raises NotNative if there are none."""
    found = [
        (view, view.sub_tables.index(view.slots[slot])) for view in views.values() if slot in view.slots
    ]  # fmt: skip
    tables = tuple(view.native(number) for view, number in found)
    if None in tables or not tables:
        raise NotNative(f"the rows of {slot!r} are not in native tables")
    return Source(
        places=tuple((view.name, number) for view, number in found), tables=tables, dim=found[0][0].dims[found[0][1]]
    )


def load_program(
    directory: Path, manifest: Any, views: Mapping[str, TableView], placement: Placement = ON_CPU
) -> tuple[dict[str, Signature], SubGraphs | None, Program]:
    """``serving_default`` of an exported directory, or ``gpu_remote_call`` if it holds only the net.

    Also returns the sub-graphs that it calls, if any, and the program itself.
    """
    given = manifest.program
    name = REMOTE_NET if manifest.sub_graph.startswith("dense") else "serving_default"
    try:
        features = {alias: Feature(**each) for alias, each in given["features"].items()}
        spec = manifest.signatures[name]
        outputs, num_ps = list(given["outputs"]), int(given.get("num_ps", 0))
        deadline = float(given.get("max_rpc_deadline_millis", 30000))
        dims = {slot: int(dim) for slot, dim in given.get("dims", {}).items()}
        net_elsewhere, remote = bool(given.get("remote_net")), bool(given.get("remote"))
        file = None if net_elsewhere else inside(directory, directory / given["file"])
        shards = given.get("shard_version")
        versions = dict.fromkeys((f"ps_{shard}" for shard in range(num_ps)), None if shards is None else int(shards))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{directory}: the manifest's program is malformed: {error!r}") from None
    if net_elsewhere:
        versions["dense_0"] = manifest.version if "shard_version" in given else None
    graphs = SubGraphs(manifest.model_name, versions, deadline)
    exported: Any = None
    card = library = None
    if file is None:
        kinds = {alias: torch_dtype(dtype_code(each.dtype)) for alias, each in spec.outputs.items()}
        net = remote_net(graphs, kinds)
    else:
        exported = load_exported(file)
        library = library_of(directory, given, exported, placement)
        net, card = placed_net(exported, placement, library, graphs=bool(spec.row_wise))
    if remote:
        lookup = remote_lookup(graphs, num_ps, dims)
    else:
        lookup = local_lookup(views, max(1, num_ps))
    program = Program(net, features, outputs, lookup, card, remote=remote)
    program.runs = "another server" if file is None else runs_on(placement, library)
    # Requests of an entry wait for its shards, so they run concurrently instead of being joined.
    joined = not remote and bool(spec.row_wise)
    signature = SignatureSpec(dict(spec.inputs), dict(spec.outputs), spec.row_wise)
    native = None
    if remote and file is not None and library is None and placement.native:
        program.moments, program.runs = _native_moments(exported, program)
    if joined and file is not None:
        native = native_predictor(exported, program, signature, features, views, placement)
    made = {name: Signature(signature, program, batch=joined, waits=remote, samples=True, native=native)}
    return made, graphs if remote else None, program
