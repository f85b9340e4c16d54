"""The versions of a served model: which are wanted, how they come and go, and who is using them."""

import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError
from shoal.proto.serving.tf_serving_pb2 import ModelConfig, ModelSpec, ModelVersionStatus
from shoal.serving.export.manifest import FILE
from shoal.serving.server.batching import Batcher, Pace
from shoal.serving.server.hand_over import hand_over
from shoal.serving.server.loader import load_servable
from shoal.serving.server.servable import Servable, Signature
from shoal.serving.status import Code, StatusError, not_found, unavailable

log = logging.getLogger(__name__)

State = ModelVersionStatus.State
AVAILABLE = State.AVAILABLE  # looked up once: the enum's attributes are slow
MAX_LOAD_RETRIES = 5
RETRY_SECS = 60.0
LINGER_SECS = 60.0
"""How long a version that entries ask for is kept after they last did."""


def wanted_versions(config: ModelConfig, present: list[int], held: list[int]) -> list[int]:
    """Which versions should be served, given those on disk and those that are held already.

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


@dataclass(eq=False)
class Version:
    """One version and the requests that are inside it."""

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
    """When an entry of this version last asked for it, in monotonic seconds."""
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
    """A model by name. Thread-safe; loading happens on the caller of :meth:`refresh`, answering on any thread."""

    def __init__(self, config: ModelConfig, root: Path | None = None) -> None:
        self.name = config.name
        self.config = config
        self.base = Path(config.base_path) if config.base_path else None
        self.root = root if root is not None else root_of(self.base) if self.base is not None else None
        self.versions: dict[int, Version] = {}
        self.replacement: Model | None = None
        """The model of the same name with another base path, until it can take over."""
        self._lock = threading.Condition()

    # --- answering --------------------------------------------------------------------------------------------------

    def acquire(self, spec: ModelSpec, one_version: bool = False) -> Version:
        """The version that a request asks for, kept until :meth:`release`, with ``one_version`` a while longer."""
        with self._lock:
            version = self._find(spec)
            version.users += 1
            if one_version:
                version.asked_at = time.monotonic()
            return version

    def release(self, version: Version) -> None:
        with self._lock:
            version.users -= 1
            if not version.users:
                self._lock.notify_all()

    def _find(self, spec: ModelSpec) -> Version:
        choice = spec.WhichOneof("version_choice")
        available = [v for v in self.versions.values() if v.state == AVAILABLE]
        if choice is None:
            if not available:
                states = {v.number: State.Name(v.state) for v in self.versions.values()}
                raise unavailable(f"model {self.name!r} has no available version; its versions are {states or 'none'}")
            return max(available, key=lambda version: version.number)
        if choice == "version_label":
            labels = dict(self.config.version_labels)
            if spec.version_label not in labels:
                raise not_found(
                    f"model {self.name!r} has no version label {spec.version_label!r}; it has {sorted(labels)}"
                )
            number = labels[spec.version_label]
        else:
            number = spec.version.value
        for version in available:
            if version.number == number:
                return version
        raise not_found(
            f"model {self.name!r} has no available version {number}; "
            f"available are {sorted(v.number for v in available)}"
        )

    def statuses(self) -> list[ModelVersionStatus]:
        """All versions, newest first."""
        with self._lock:
            return [version.status() for version in sorted(self.versions.values(), key=lambda v: -v.number)]

    def current(self) -> Version | None:
        with self._lock:
            available = [v for v in self.versions.values() if v.state == AVAILABLE]
            return max(available, key=lambda version: version.number) if available else None

    # --- coming and going -------------------------------------------------------------------------------------------

    def publish(self, servable: Servable, version: int) -> None:
        """Makes a servable that is already in memory the available version."""
        with self._lock:
            fresh = Version(version, State.AVAILABLE, servable=servable)
            self.versions[version] = fresh

    def on_disk(self) -> list[int]:
        """Complete versions under the base path."""
        if self.base is None or not self.base.is_dir():
            return []
        return sorted(
            int(path.name) for path in self.base.iterdir() if path.name.isdecimal() and (path / FILE).is_file()
        )

    def refresh(self, at_once: bool = False) -> None:
        """Loads wanted versions that are missing, then unloads those that are not wanted any more.

        ``at_once``: a version does not wait until the sub-graphs that it calls are there, too.
        """
        if self.base is None:
            return
        with self._lock:
            held = [v.number for v in self.versions.values() if v.state in (State.AVAILABLE, State.LOADING)]
        wanted = wanted_versions(self.config, self.on_disk(), held)
        for number in wanted:
            self._load(number, at_once)
        with self._lock:
            ready = [number for number in wanted if self.versions[number].state == State.AVAILABLE]
            surplus = [v for v in self.versions.values() if v.state == AVAILABLE and v.number not in wanted]
            waiting = [v for v in self.versions.values() if v.state == State.LOADING and v.number not in wanted]
        for version in waiting:
            self._unload(version)
        if ready:  # until a wanted version answers, the old one goes on, also for entries that have not switched yet
            horizon = time.monotonic() - LINGER_SECS
            for version in surplus:
                if version.asked_at < horizon:
                    self._unload(version)

    def _load(self, number: int, at_once: bool) -> None:
        with self._lock:
            version = self.versions.setdefault(number, Version(number))
            if version.state == State.AVAILABLE:
                return
            if version.tries > MAX_LOAD_RETRIES or time.monotonic() < version.retry_at:
                return
            version.state = State.LOADING
            version.tries += 1
        try:
            assert self.base is not None
            assert self.root is not None
            servable = version.servable or load_servable(self.base / str(number), self.root)
            old = self.current()
            if old is not None and not at_once and (reason := servable.missing()):
                self._wait(version, servable, reason)
                return
            if old is not None and old.servable is not None:
                hand_over(old.servable, servable)
        except Exception as error:
            log.exception("model %s: version %d could not be loaded", self.name, number)
            with self._lock:
                version.state, version.servable = State.END, None
                version.error = StatusError(Code.INTERNAL, f"version {number} could not be loaded: {error}")
                version.retry_at = time.monotonic() + RETRY_SECS
            return
        with self._lock:
            version.servable, version.state, version.error = servable, State.AVAILABLE, None
            version.tries = 0
        log.info("model %s: version %d is available", self.name, number)

    def _wait(self, version: Version, servable: Servable, reason: str) -> None:
        """Keeps a loaded version for the next look; the old one answers until the others have this one."""
        text = f"version {version.number} waits: {reason}"
        if version.error is None or version.error.message != text:
            log.info("model %s: %s", self.name, text)
        with self._lock:
            version.servable, version.error = servable, unavailable(text)
            version.tries = 0

    def _unload(self, version: Version, timeout: float = 60.0) -> None:
        with self._lock:
            version.state = State.UNLOADING
            self._lock.wait_for(lambda: version.users == 0, timeout)
            version.state = State.END
            servable, version.servable = version.servable, None
            version.batchers, version.paces = {}, {}
        if servable is not None:
            servable.close()
        log.info("model %s: version %d is unloaded", self.name, version.number)

    def unload_all(self) -> None:
        for version in list(self.versions.values()):
            if version.state in (State.AVAILABLE, State.LOADING):
                self._unload(version)

    def rows_are_pushed(self, polls: bool) -> bool:
        """Whether its rows are kept fresh by pushes and do not follow exports, which are looked for if ``polls``."""
        current = self.current()
        if current is None or current.servable is None:
            return False
        once = not polls or self.config.model_version_policy.WhichOneof("policy_choice") == "latest_once"
        pushed = any(view.pushes for view in current.servable.tables.values())
        return self.base is None or (once and pushed)


def root_of(base: Path) -> Path:
    """A model's files may lie in its model directory, the parent of ``exported_models``, else under its base path."""
    for parent in (base, *base.parents):
        if parent.name == "exported_models":
            return parent.parent
    return base


def find_signature(version: Version, name: str, where: str) -> Signature:
    """A signature of a version in use; raises invalid argument where there is none of that name."""
    servable = version.servable
    assert servable is not None
    signature = servable.signatures.get(name)
    if signature is None:
        raise StatusError(
            Code.INVALID_ARGUMENT, f"{where} has no signature {name!r}; it has {sorted(servable.signatures)}"
        )
    return signature


def check_base_path(path: str, roots: Sequence[Path]) -> None:
    """Raises ConfigError unless a base path is inside one of the roots."""
    if not any(Path(path).resolve().is_relative_to(root.resolve()) for root in roots):
        inside = ", ".join(map(str, roots)) or "none; give the server a model_root"
        raise ConfigError(f"base_path {path!r} is outside of the server's model roots ({inside})")
