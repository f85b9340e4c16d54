"""Records the exports of a sub-graph and deletes old ones."""

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import text_format

from shoal.durable import write_whole
from shoal.errors import DataError
from shoal.metrics import emit_store
from shoal.proto.serving.export_pb2 import ServingModelState

log = logging.getLogger(__name__)

STATE_FILE = "ExportSaverListenerState"


def get_global_step(checkpoint_path: str | os.PathLike) -> int:
    """The number after the final ``model.ckpt-`` in a checkpoint's path; raises AssertionError for any other path."""
    found = re.fullmatch(r".*model\.ckpt-(\d+)", os.fspath(checkpoint_path), re.DOTALL)
    if found is None:
        raise AssertionError(f"{os.fspath(checkpoint_path)!r} must end in model.ckpt-<step>")
    return int(found.group(1))


def get_export_saver_listener_state(export_dir_base: str | os.PathLike) -> ServingModelState:
    """The state of a sub-graph's directory; a missing file reads as empty."""
    file = Path(export_dir_base) / STATE_FILE
    state = ServingModelState()
    try:
        text_format.Parse(file.read_text(), state)
    except FileNotFoundError:
        pass
    except text_format.ParseError as error:
        raise DataError(f"{file} is not a ServingModelState: {error}") from None
    return state


def overwrite_export_saver_listener_state(export_dir_base: str | os.PathLike, state: ServingModelState) -> None:
    """Write the state atomically."""
    base = Path(export_dir_base)
    base.mkdir(parents=True, exist_ok=True)
    write_whole(base / STATE_FILE, text_format.MessageToString(state))


def add_export(export_dir_base: str | os.PathLike, export_dir: str | os.PathLike, global_step: int) -> None:
    """Append an export to the state."""
    state = get_export_saver_listener_state(export_dir_base)
    state.entries.add(export_dir=os.fspath(export_dir), global_step=global_step)
    overwrite_export_saver_listener_state(export_dir_base, state)
    version = Path(export_dir).name
    if version.isdecimal():
        emit_store("export_models.latest_version", int(version), f"export_dir={os.fspath(export_dir_base)}")


def delete_old_exports(
    export_dir_base: str | os.PathLike,
    existing_steps: Iterable[int],
    exempt_checkpoint_paths: Iterable[str | os.PathLike] = (),
) -> list[str]:
    """Delete the exports whose step is neither a checkpoint's nor exempt; returns their ``export_dir`` values.

    A directory that is already gone is not an error.
    """
    kept_steps = set(existing_steps) | {get_global_step(path) for path in exempt_checkpoint_paths}
    state = get_export_saver_listener_state(export_dir_base)
    kept, deleted = ServingModelState(), []
    for entry in state.entries:
        if entry.global_step in kept_steps:
            kept.entries.add().CopyFrom(entry)
            continue
        deleted.append(entry.export_dir)
        try:
            shutil.rmtree(entry.export_dir)
        except FileNotFoundError:
            log.info("export %s was already gone", entry.export_dir)
    if deleted:
        overwrite_export_saver_listener_state(export_dir_base, kept)
    return deleted
