"""Rollouts by operators: declare exports, map them to layouts, copy side-loaded models."""

import fnmatch
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from shoal.durable import move_folder
from shoal.errors import ConfigError
from shoal.metrics import emit_store
from shoal.serving.cluster.records import SavedModel, SavedModelDeployConfig
from shoal.serving.export.manifest import Manifest
from shoal.serving.export.whole import whole_versions

log = logging.getLogger(__name__)


def newest_version(directory: str | os.PathLike) -> int | None:
    """The numerically highest complete version in a sub-graph's directory."""
    return max(whole_versions(directory), default=None)


def newest_everywhere(base: str | os.PathLike, num_ps: int) -> int | None:
    """The highest version that every embedding shard of an export base has; None if there is none."""
    found = [set(whole_versions(Path(base) / f"ps_{shard}")) for shard in range(num_ps)]
    return max(set.intersection(*found), default=None) if found else None


def declare_saved_model(
    backend: Any,
    export_base: str | os.PathLike,
    model_name: str | None = None,
    overwrite: bool = False,
    arch: str = "entry_ps",
) -> str:
    """Declare every sub-directory of an export base as a sub-graph of a model; returns the model's name.

    The entry follows the latest version; embedding shards load once. ``model_name`` defaults to the name recorded in
    the newest entry export.

    Raises:
        ValueError: the model is already declared and ``overwrite`` is False, or there is nothing to declare.
    """
    if arch != "entry_ps":
        raise ConfigError(f"arch must be entry_ps, got {arch!r}")
    base = Path(export_base)
    sub_graphs = sorted(
        each.name for each in (base.iterdir() if base.is_dir() else ()) if each.is_dir() and each.name[0] != "."
    )
    if not sub_graphs:
        raise ConfigError(f"{base} has no exported sub-graphs to declare")
    if model_name is None:
        version = newest_version(base / "entry")
        if version is None:
            raise ConfigError(f"{base}/entry has no version that names the model; pass model_name")
        model_name = Manifest.read(base / "entry" / str(version)).model_name
    if not overwrite and backend.list_saved_models(model_name):
        raise ConfigError(f"model {model_name!r} is already declared; pass overwrite=True to declare it again")
    for sub_graph in sub_graphs:
        policy = "latest" if sub_graph == "entry" else "latest_once"
        deploy = SavedModelDeployConfig(model_base_path=str(base / sub_graph), version_policy=policy)
        backend.decl_saved_model(SavedModel(model_name, sub_graph), deploy)
    return model_name


def map_model_to_layout(backend: Any, model_pattern: str, layout: str, action: str) -> list[SavedModel]:
    """Add declared sub-graphs that match ``"<model>:<glob>"`` to a layout (``pub``), or remove them (``unpub``)."""
    model, colon, pattern = model_pattern.partition(":")
    if not colon or not model or not pattern:
        raise ConfigError(f"a model pattern must be '<model>:<glob>', got {model_pattern!r}")
    if action not in ("pub", "unpub"):
        raise ConfigError(f"action must be pub or unpub, got {action!r}")
    chosen = [each for each in backend.list_saved_models(model) if fnmatch.fnmatchcase(each.sub_graph, pattern)]
    change = backend.add_to_layout if action == "pub" else backend.remove_from_layout
    for each in sorted(chosen, key=str):
        change(layout, each)
    return chosen


class ModelManager:
    """Copies side-loaded models from the delivery folder to the serving folder.

    A source directory ``<model>@<version>`` is complete when ``<model>@<version>.write.done`` exists. The newest one is
    copied to ``<receive>/<model>/<sub>/<version>`` through ``-temp`` names and renamed, all sub-graphs or none. While a
    source is read, ``<model>@<version>.read.lock`` exists.

    Args:
        model_name: the model; None disables the manager.
        source_path: where deliveries arrive.
        receive_path: where copies go.
        use_metrics: emit the served version.
    """

    keep_versions = 5
    interval_secs = 30.0
    wait_secs = 1200.0

    def __init__(
        self,
        model_name: str | None,
        source_path: str | os.PathLike,
        receive_path: str | os.PathLike,
        use_metrics: bool = True,
    ) -> None:
        self.model_name = model_name
        self._source = Path(source_path) if source_path else Path()
        self._receive = Path(receive_path) if receive_path else Path()
        self._use_metrics = use_metrics
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Copy the newest model, waiting for the first one, then keep copying; False if none arrived in time."""
        if self.model_name is None:
            return True
        self._remove_read_locks()
        end = time.monotonic() + self.wait_secs
        while True:
            self.run_once()
            if self.received_versions():
                break
            if time.monotonic() >= end:
                log.error("no model %s arrived in %s within %.0f s", self.model_name, self._source, self.wait_secs)
                return False
            if self._stop.wait(min(self.interval_secs, max(0.0, end - time.monotonic()))):
                return False
        self._thread = threading.Thread(target=self._loop, name="shoal-model-manager", daemon=True)
        self._thread.start()
        return True

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _loop(self) -> None:
        while not self._stop.wait(self.interval_secs):
            self.run_once()

    def run_once(self) -> None:
        """Check once: copy a newer model if there is one, and delete old copies. Errors are logged."""
        try:
            self.copy_newest()
            self.delete_old()
            if self._use_metrics and (versions := self.received_versions()):
                emit_store("model_manager.latest_version", versions[-1], f"model_name={self.model_name}")
        except Exception:
            log.exception("could not copy model %s", self.model_name)

    def source_versions(self) -> list[int]:
        """Versions that were delivered completely, ascending."""
        prefix, suffix = f"{self.model_name}@", ".write.done"
        if not self._source.is_dir():
            return []
        found = []
        for done in self._source.glob(f"{prefix}*{suffix}"):
            version = done.name[len(prefix) : -len(suffix)]
            if version.isdecimal() and (self._source / f"{prefix}{version}").is_dir():
                found.append(int(version))
        return sorted(found)

    def received_versions(self) -> list[int]:
        """Versions that every received sub-graph has, ascending."""
        base = self._receive / str(self.model_name)
        if not base.is_dir():
            return []
        sets = [
            {int(each.name) for each in sub.iterdir() if each.name.isdecimal()}
            for sub in base.iterdir()
            if sub.is_dir()
        ]
        return sorted(set.intersection(*sets)) if sets else []

    def copy_newest(self) -> int | None:
        """Copy the newest delivered version if it is newer than the existing copies; returns it."""
        delivered, received = self.source_versions(), self.received_versions()
        if not delivered or (received and received[-1] >= delivered[-1]):
            return None
        version = delivered[-1]
        name = f"{self.model_name}@{version}"
        lock = self._source / f"{name}.read.lock"
        lock.touch()
        try:
            self._copy(self._source / name, version)
        finally:
            lock.unlink(missing_ok=True)
        return version

    def _copy(self, source: Path, version: int) -> None:
        inner = source / str(self.model_name)
        base = inner if inner.is_dir() else source
        pairs = []
        for sub in sorted(each for each in base.iterdir() if each.is_dir()):
            from_dir = sub / str(version)
            final = self._receive / str(self.model_name) / sub.name / str(version)
            pairs.append((from_dir if from_dir.is_dir() else sub, final.with_name(f"{version}-temp"), final))
        done: list[Path] = []
        try:
            for from_dir, temporary, _ in pairs:
                shutil.rmtree(temporary, ignore_errors=True)
                shutil.copytree(from_dir, temporary)
            for _, temporary, final in pairs:
                if not final.exists():
                    move_folder(temporary, final)
                    done.append(final)
        except BaseException:
            for final in done:
                shutil.rmtree(final, ignore_errors=True)
            raise
        finally:
            for _, temporary, _ in pairs:
                shutil.rmtree(temporary, ignore_errors=True)

    def delete_old(self) -> None:
        """Keep only the newest versions of each sub-graph."""
        base = self._receive / str(self.model_name)
        for sub in [each for each in base.iterdir() if each.is_dir()] if base.is_dir() else ():
            versions = sorted(int(each.name) for each in sub.iterdir() if each.name.isdecimal())
            for version in versions[: -self.keep_versions]:
                shutil.rmtree(sub / str(version), ignore_errors=True)

    def _remove_read_locks(self) -> None:
        for lock in self._source.glob(f"{self.model_name}@*.read.lock") if self._source.is_dir() else ():
            lock.unlink(missing_ok=True)
