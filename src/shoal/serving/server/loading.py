"""The life cycle of versions: choosing, loading, switching and unloading them, and changes of configuration."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError
from shoal.observe import audit
from shoal.proto.serving.tf_serving_pb2 import ModelConfig, ModelServerConfig
from shoal.serving.export.whole import whole_versions
from shoal.serving.server.hand_over import hand_over
from shoal.serving.server.loader import load_servable
from shoal.serving.server.models import AVAILABLE, Model, ServedModels, State, Version, generation, root_of
from shoal.serving.server.servable import Servable
from shoal.serving.status import Code, StatusError, unavailable

log = logging.getLogger(__name__)

MAX_LOAD_RETRIES = 5
RETRY_SECS = 60.0
UNLOAD_SECS = 60.0
"""How long unloading waits for requests that use the version."""
LINGER_SECS = 60.0
"""How long a version is kept after an entry last requested it."""


def wanted_versions(config: ModelConfig, present: list[int], held: list[int]) -> list[int]:
    """The versions to serve, given those on disk and those already loaded.

    >>> from shoal.serving import gen_model_config
    >>> wanted_versions(gen_model_config("m", "/m", "latest", 2), [3, 7, 9], [])
    [7, 9]
    """
    policy = config.model_version_policy
    kind = policy.WhichOneof("policy_choice") or "latest"
    present = sorted(present)
    if kind == "all":
        return present
    if kind == "specific":
        return [version for version in policy.specific.versions if version in present]
    if kind == "latest_once":
        return sorted(held) if held else present[-max(1, policy.latest_once.num_versions) :]
    return present[-max(1, policy.latest.num_versions) :]


def on_disk(model: Model) -> list[int]:
    """Complete versions under the base path."""
    return [] if model.base is None else whole_versions(model.base)


def refresh(model: Model, at_once: bool = False) -> None:
    """Load wanted versions that are missing, then unload those no longer wanted.

    ``at_once``: do not wait until the sub-graphs that a version calls are available.
    """
    if model.base is None:
        return
    with model.lock:
        held = [v.number for v in model.versions.values() if v.state in (State.AVAILABLE, State.LOADING)]
    wanted = wanted_versions(model.config, on_disk(model), held)
    for number in wanted:
        _load(model, number, at_once)
    with model.lock:
        ready = [number for number in wanted if model.versions[number].state == State.AVAILABLE]
        surplus = [v for v in model.versions.values() if v.state == AVAILABLE and v.number not in wanted]
        waiting = [v for v in model.versions.values() if v.state == State.LOADING and v.number not in wanted]
    for version in waiting:
        _unload(model, version)
    if ready:  # the old version keeps answering until a wanted one does, also for entries that have not switched yet
        horizon = time.monotonic() - LINGER_SECS
        for version in surplus:
            if version.asked_at < horizon:
                _unload(model, version)


def _load(model: Model, number: int, at_once: bool) -> None:
    with model.lock:
        version = model.versions.setdefault(number, Version(number))
        if version.state == State.AVAILABLE:
            return
        if version.tries > MAX_LOAD_RETRIES or time.monotonic() < version.retry_at:
            return
        version.state = State.LOADING
        version.tries += 1
    try:
        assert model.base is not None
        assert model.root is not None
        servable = version.servable or load_servable(model.base / str(number), model.root, model.placement)
        old = model.current()
        if old is not None and not at_once and (reason := servable.missing()):
            _wait(model, version, servable, reason)
            return
        if old is not None and old.servable is not None:
            hand_over(old.servable, servable)
        if servable.warm_up is not None:
            servable.warm_up()
    except Exception as error:
        log.exception("model %s: could not load version %d", model.name, number)
        with model.lock:
            version.state, version.servable = State.END, None
            version.error = StatusError(Code.INTERNAL, f"could not load version {number}: {error}")
            version.retry_at = time.monotonic() + RETRY_SECS
        return
    with model.lock:
        version.servable, version.state, version.error = servable, State.AVAILABLE, None
        version.tries = 0
    generation.next()
    log.info("model %s: version %d is available", model.name, number)
    audit.record("load", model=model.name, version=number, path=model.base / str(number))


def _wait(model: Model, version: Version, servable: Servable, reason: str) -> None:
    """Keep a loaded version until the next check; the old one answers until the other servers have this one."""
    text = f"version {version.number} is waiting: {reason}"
    if version.error is None or version.error.message != text:
        log.info("model %s: %s", model.name, text)
    with model.lock:
        version.servable, version.error = servable, unavailable(text)
        version.tries = 0


def _unload(model: Model, version: Version) -> None:
    with model.lock:
        version.state = State.UNLOADING
        generation.next()
        model.lock.wait_for(lambda: version.users == 0, UNLOAD_SECS)
        version.state = State.END
        servable, version.servable = version.servable, None
        version.batchers, version.paces = {}, {}
    if servable is not None:
        servable.close()
    log.info("model %s: version %d is unloaded", model.name, version.number)


def unload_all(model: Model) -> None:
    for version in list(model.versions.values()):
        if version.state in (State.AVAILABLE, State.LOADING):
            _unload(model, version)


class LoadedModels(ServedModels):
    """Models loaded from directories, which are watched for new versions, and models in memory."""

    def reload(self, config: ModelServerConfig) -> None:
        """Serve exactly the models in ``config`` (and live tables); versions that stay are not reloaded.

        A model whose base path changes is served from the old path until a version in the new one is available.
        """
        with self._loading:
            self._configure(config)
            self._refresh()

    def _configure(self, config: ModelServerConfig) -> None:
        given = list(config.model_config_list.config)
        names = [each.name for each in given]
        if len(set(names)) != len(names) or not all(names):
            raise ConfigError(f"model names must be distinct and not empty, got {names}")
        for each in given:
            if not each.base_path:
                raise ConfigError(f"model {each.name!r}: base_path must not be empty")
            if self._model_root is not None:
                check_base_path(each.base_path, [self._model_root])
        gone: list[Model | None] = []
        with self._lock:
            for name in [name for name, model in self._models.items() if model.base is not None and name not in names]:
                gone.append(self._models[name].replacement)
                gone.append(self._models.pop(name))
            for each in given:
                known = self._models.get(each.name)
                if known is None:
                    self._models[each.name] = Model(each, self._model_root, self.placement)
                    continue
                if known.config.base_path == each.base_path:
                    known.config = each
                    gone.append(known.replacement)
                    known.replacement = None
                elif known.replacement is not None and known.replacement.config.base_path == each.base_path:
                    known.replacement.config = each
                else:
                    gone.append(known.replacement)
                    known.replacement = Model(each, self._model_root, self.placement)
            self._known_roots |= {root_of(Path(each.base_path)) for each in given}
        generation.next()
        for model in gone:
            if model is not None:
                unload_all(model)

    def _roots(self) -> list[Path]:
        """Allowed folders of base paths received over the network: the model root, else all that were configured."""
        with self._lock:
            return sorted(self._known_roots) if self._model_root is None else [self._model_root]

    def refresh(self) -> None:
        """Check for new versions now and switch to them."""
        with self._loading:
            self._refresh()

    def _refresh(self, at_once: bool = False) -> None:
        for model in self.models():
            follower = model.replacement
            if follower is None:
                refresh(model, at_once)
                continue
            refresh(follower)
            if follower.current() is None and model.current() is not None:
                continue  # the old one keeps answering
            with self._lock:
                self._models[model.name] = follower
            generation.next()
            unload_all(model)


def check_base_path(path: str, roots: Sequence[Path]) -> None:
    """Raise ConfigError unless a base path is inside one of the roots."""
    if not any(Path(path).resolve().is_relative_to(root.resolve()) for root in roots):
        inside = ", ".join(map(str, roots)) or "none; set the server's model_root"
        raise ConfigError(f"base_path must be inside the server's model roots ({inside}), got {path!r}")
