"""The models that a server has, by name: from directories, or from memory."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.proto.serving.tensor_pb2 import SignatureDef
from shoal.proto.serving.tf_serving_pb2 import (
    GetModelStatusResponse,
    ModelConfig,
    ModelServerConfig,
    ModelSpec,
    SignatureDefMap,
)
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.server.table_signatures import live_servable
from shoal.serving.server.versions import Model, Version, check_base_path
from shoal.serving.status import StatusError, not_found
from shoal.serving.tensors import dtype_code


class ServedModels:
    """Models and their aliases. Safe to use from any thread.

    Args:
        model_root: base paths must be inside; None = any, but those that come over the network must be where models are
            served from already.
    """

    def __init__(self, model_root: str | Path | None = None) -> None:
        self._model_root = Path(model_root) if model_root is not None else None
        self._models: dict[str, Model] = {}
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
                if self.model(spec.name) is model:  # else another one has just taken over
                    raise

    def reload(self, config: ModelServerConfig) -> None:
        """Serves exactly the models of ``config`` (and live tables); versions that stay are not loaded again.

        A model whose base path changes is served from the old one until a version of the new one is available.
        """
        with self._loading:
            self._configure(config)
            self._refresh()

    def _configure(self, config: ModelServerConfig) -> None:
        given = list(config.model_config_list.config)
        names = [each.name for each in given]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError(f"model names must be distinct and not empty, got {names}")
        if self._model_root is not None:
            for each in given:
                check_base_path(each.base_path, [self._model_root])
        gone: list[Model | None] = []
        with self._lock:
            for name in [name for name, model in self._models.items() if model.base is not None and name not in names]:
                gone.append(self._models[name].replacement)
                gone.append(self._models.pop(name))
            for each in given:
                known = self._models.get(each.name)
                if known is None:
                    self._models[each.name] = Model(each, self._model_root)
                    continue
                if known.config.base_path == each.base_path:
                    known.config = each
                    gone.append(known.replacement)
                    known.replacement = None
                elif known.replacement is not None and known.replacement.config.base_path == each.base_path:
                    known.replacement.config = each
                else:
                    gone.append(known.replacement)
                    known.replacement = Model(each, self._model_root)
        for model in gone:
            if model is not None:
                model.unload_all()

    def _roots(self) -> list[Path]:
        """Where base paths that come over the network may be: the model root, else where models are served from."""
        if self._model_root is not None:
            return [self._model_root]
        return sorted({model.root for model in self.models() if model.root is not None})

    def serve_tables(self, model_name: str, tables: Any, version: int = 1) -> None:
        """Publishes live tables of this process under the signatures of an embedding shard.

        ``tables``: a ``HashTable`` or ``MultiHashTable``, several of them, or ``{alias: table}``.
        """
        self.publish(model_name, live_servable(tables), version)

    def publish(self, model_name: str, servable: Servable, version: int = 1) -> None:
        """Makes a servable that is in memory a version of a model, which is made if it is new."""
        with self._lock:
            model = self._models.setdefault(model_name, Model(ModelConfig(name=model_name)))
        model.publish(servable, version)

    def refresh(self) -> None:
        """Looks for new versions now and switches to them."""
        with self._loading:
            self._refresh()

    def _refresh(self, at_once: bool = False) -> None:
        for model in self.models():
            follower = model.replacement
            if follower is None:
                model.refresh(at_once)
                continue
            follower.refresh()
            if follower.current() is None and model.current() is not None:
                continue  # it goes on answering
            with self._lock:
                self._models[model.name] = follower
            model.unload_all()

    def status(self, spec: ModelSpec) -> GetModelStatusResponse:
        model = self.model(spec.name)
        statuses = model.statuses()
        if model.replacement is not None:
            known = {each.version for each in statuses}
            statuses += [each for each in model.replacement.statuses() if each.version not in known]
        if spec.HasField("version"):
            statuses = [each for each in statuses if each.version == spec.version.value]
            if not statuses:
                raise not_found(f"model {spec.name!r} has no version {spec.version.value}")
        return GetModelStatusResponse(model_version_status=statuses)

    def metadata(self, spec: ModelSpec, one_version: bool = False) -> tuple[ModelSpec, SignatureDefMap]:
        """(the model spec as it was resolved, the signatures of that version)."""
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
    for infos, specs in ((into.inputs, signature.spec.inputs), (into.outputs, signature.spec.outputs)):
        for alias, each in specs.items():
            info = infos[alias]
            hint = (signature.hints or {}).get(alias)
            info.name = f"{alias}:0|{hint}" if hint else f"{alias}:0"
            info.dtype = dtype_code(each.dtype)  # pyrefly: ignore
            if each.shape is None:
                info.tensor_shape.unknown_rank = True
                continue
            info.tensor_shape.SetInParent()
            for size in each.shape:
                info.tensor_shape.dim.add(size=-1 if size is None else size)
