"""The models that a server has, by name, and the versions that requests use."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import _core
from shoal.proto.serving.tensor_pb2 import SignatureDef
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelStatusResponse,
    ModelConfig,
    ModelSpec,
    ModelVersionStatus,
    SignatureDefMap,
)
from shoal.serving.predict import BY_ROW
from shoal.serving.server.batching import Batcher, Pace
from shoal.serving.server.net.placement import ON_CPU, Placement
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.server.table_signatures import live_servable
from shoal.serving.status import StatusError, invalid_argument, not_found, unavailable
from shoal.serving.tensors import dtype_code

generation = _core.Generation()
"""Counts changes in this process of the version that answers a request. After each, native code asks Python again."""

State = ModelVersionStatus.State
AVAILABLE = State.AVAILABLE  # looked up once: the enum's attributes are slow


@dataclass(eq=False)
class Version:
    """One version and the requests that are using it."""

    number: int
    state: int = State.START
    error: StatusError | None = None
    servable: Servable | None = None
    batchers: dict[str, Batcher] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)
    tries: int = 0
    retry_at: float = 0.0
    users: int = 0
    asked_at: float = -math.inf
    """When an entry of the same version last asked for it, in monotonic seconds."""
    _resolved: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def resolved(self, name: str, signature: str) -> bytes:
        """The serialised ``ModelSpec`` of an answer."""
        spec = self._resolved.get((name, signature))
        if spec is None:
            message = ModelSpec(name=name, signature_name=signature)
            message.version.value = self.number
            spec = self._resolved[name, signature] = message.SerializeToString()
        return spec

    def status(self) -> ModelVersionStatus:
        status = ModelVersionStatus(version=self.number, state=self.state)  # pyrefly: ignore
        status.status.error_code = self.error.code if self.error else 0
        if self.error:
            status.status.error_message = self.error.message
        return status


class Model:
    """A named model and its versions. Thread-safe; `shoal.serving.server.loading` loads and unloads them."""

    def __init__(self, config: ModelConfig, root: Path | None = None, placement: Placement = ON_CPU) -> None:
        self.name = config.name
        self.placement = placement
        self.config = config
        self.base = Path(config.base_path) if config.base_path else None
        self.root = root if root is not None else root_of(self.base) if self.base is not None else None
        self.versions: dict[int, Version] = {}
        self.replacement: Model | None = None
        """The model of the same name with another base path, until it can take over."""
        self.lock = threading.Condition()
        """Guards the versions; notified when one is no longer in use."""

    # --- answering --------------------------------------------------------------------------------------------------

    def acquire(self, spec: ModelSpec, one_version: bool = False) -> Version:
        """The version that a request asks for, kept until :meth:`release`; with ``one_version``, a while longer."""
        with self.lock:
            version = self._find(spec)
            version.users += 1
            if one_version:
                version.asked_at = time.monotonic()
            return version

    def release(self, version: Version) -> None:
        with self.lock:
            version.users -= 1
            if not version.users:
                self.lock.notify_all()

    def _find(self, spec: ModelSpec) -> Version:
        available = [v for v in self.versions.values() if v.state == AVAILABLE]
        number = self.number_of(spec)
        if number is None:
            if not available:
                states = {v.number: State.Name(v.state) for v in self.versions.values()}
                raise unavailable(f"model {self.name!r} has no available version; its versions are {states or 'none'}")
            return max(available, key=lambda version: version.number)
        for version in available:
            if version.number == number:
                return version
        raise not_found(
            f"model {self.name!r} has no available version {number}; "
            f"available versions are {sorted(v.number for v in available)}"
        )

    def number_of(self, spec: ModelSpec) -> int | None:
        """The version that a request names by number or label; None if it names none."""
        if not spec.HasField("version_label"):
            return spec.version.value if spec.HasField("version") else None
        labels = dict(self.config.version_labels)
        if spec.version_label not in labels:
            raise not_found(f"model {self.name!r} has no version label {spec.version_label!r}; it has {sorted(labels)}")
        return labels[spec.version_label]

    def statuses(self) -> list[ModelVersionStatus]:
        """All versions, newest first."""
        with self.lock:
            return [version.status() for version in sorted(self.versions.values(), key=lambda v: -v.number)]

    def current(self) -> Version | None:
        with self.lock:
            available = [v for v in self.versions.values() if v.state == AVAILABLE]
            return max(available, key=lambda version: version.number) if available else None

    def publish(self, servable: Servable, version: int) -> None:
        """Make a servable that is already in memory the available version."""
        servable.version = version
        with self.lock:
            fresh = Version(version, State.AVAILABLE, servable=servable)
            self.versions[version] = fresh
        generation.next()

    def rows_are_pushed(self, polls: bool) -> bool:
        """Whether its rows are updated by pushes, not by exports; ``polls``: whether the server checks for exports."""
        current = self.current()
        if current is None or current.servable is None:
            return False
        once = not polls or self.config.model_version_policy.WhichOneof("policy_choice") == "latest_once"
        pushed = any(view.pushes for view in current.servable.tables.values())
        return self.base is None or (once and pushed)


class ServedModels:
    """Models and their aliases. Thread-safe.

    Args:
        model_root: base paths must be inside this folder; None = any path, except that paths received over the network
            must be where models are or were served from.
        placement: where versions are loaded.
    """

    polls = False
    """Whether the server checks for new versions."""

    def __init__(self, model_root: str | Path | None = None, placement: Placement = ON_CPU) -> None:
        self.placement = placement
        self._model_root = Path(model_root) if model_root is not None else None
        self._models: dict[str, Model] = {}
        self._known_roots: set[Path] = set()
        self._aliases: dict[str, str] = {}
        self._lock = threading.RLock()
        self._loading = threading.Lock()

    def models(self) -> list[Model]:
        with self._lock:
            return list(self._models.values())

    def alias(self, name: str, model_name: str) -> None:
        """Requests for ``name`` are answered by ``model_name``."""
        with self._lock:
            self._aliases[name] = model_name
        generation.next()

    def model(self, name: str) -> Model:
        with self._lock:
            name = self._aliases.get(name, name)
            if name not in self._models:
                raise not_found(f"there is no model {name!r}; this server has {sorted(self._models) or 'none'}")
            return self._models[name]

    @contextlib.contextmanager
    def use(self, spec: ModelSpec, one_version: bool = False) -> Iterator[Version]:
        """The version that a request asks for, kept alive until the block ends."""
        model, version = self._acquire(spec, one_version)
        try:
            yield version
        finally:
            model.release(version)

    def _acquire(self, spec: ModelSpec, one_version: bool) -> tuple[Model, Version]:
        while True:
            model = self.model(spec.name)
            try:
                return model, model.acquire(spec, one_version)
            except StatusError:
                if self.model(spec.name) is model:  # otherwise another one has just taken over
                    raise

    def serve_tables(self, model_name: str, tables: Any, version: int = 1) -> None:
        """Publishes live tables of this process under the signatures of an embedding shard.

        ``tables``: a ``HashTable`` or ``MultiHashTable``, several of them, or ``{alias: table}``.
        """
        self.publish(model_name, live_servable(tables), version)

    def publish(self, model_name: str, servable: Servable, version: int = 1) -> None:
        """Make a servable in memory a version of a model; the model is created if it is new."""
        with self._lock:
            model = self._models.setdefault(model_name, Model(ModelConfig(name=model_name)))
        model.publish(servable, version)

    def status(self, spec: ModelSpec) -> GetModelStatusResponse:
        model = self.model(spec.name)
        statuses = model.statuses()
        if model.replacement is not None:
            known = {each.version for each in statuses}
            statuses += [each for each in model.replacement.statuses() if each.version not in known]
        number = model.number_of(spec)
        if number is not None:
            statuses = [each for each in statuses if each.version == number]
            if not statuses:
                raise not_found(f"model {spec.name!r} has no version {number}")
        return GetModelStatusResponse(model_version_status=statuses)

    def metadata(self, spec: ModelSpec, one_version: bool = False) -> tuple[ModelSpec, SignatureDefMap]:
        """(the resolved model spec, the signatures of that version)."""
        with self.use(spec, one_version) as version:
            assert version.servable is not None
            result = SignatureDefMap()
            for name, signature in version.servable.signatures.items():
                _describe(signature, result.signature_def[name])
            resolved = ModelSpec(name=spec.name)
            resolved.version.value = version.number
            return resolved, result


def _describe(signature: Signature, into: SignatureDef) -> None:
    into.method_name = "tensorflow/serving/predict"
    hints = dict(signature.hints or {})
    if signature.batch:
        hints |= dict.fromkeys(signature.spec.outputs, BY_ROW)
    for infos, specs in ((into.inputs, signature.spec.inputs), (into.outputs, signature.spec.outputs)):
        for alias, each in specs.items():
            info = infos[alias]
            hint = hints.get(alias)
            info.name = f"{alias}:0|{hint}" if hint else f"{alias}:0"
            info.dtype = dtype_code(each.dtype)  # pyrefly: ignore
            if each.shape is None:
                info.tensor_shape.unknown_rank = True
                continue
            info.tensor_shape.SetInParent()
            for size in each.shape:
                info.tensor_shape.dim.add(size=-1 if size is None else size)


def find_signature(version: Version, name: str, where: str) -> Signature:
    """A signature of a version in use; raises INVALID_ARGUMENT if it has none with that name."""
    servable = version.servable
    assert servable is not None
    signature = servable.signatures.get(name)
    if signature is None and servable.rounds is not None:
        signature = servable.rounds.signatures.get(name)
    if signature is None:
        raise invalid_argument(f"{where} has no signature {name!r}; it has {sorted(servable.signatures)}")
    return signature


def root_of(base: Path) -> Path:
    """The folder that a model's files must be in: the parent of ``exported_models``, else its base path."""
    for parent in (base, *base.parents):
        if parent.name == "exported_models":
            return parent.parent
    return base
