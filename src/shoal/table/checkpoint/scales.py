"""The quantization scales of one_bit segments, in a small file next to the records, which have no field for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import torch

from shoal.durable import FileDigest, Saved, StrPath, digest_file, find_saved, write_whole
from shoal.errors import DataError
from shoal.table.config.messages import EmbeddingHashTableConfig, EntryConfig

Scales = dict[str, list[float]]

_MAX = torch.finfo(torch.float32).max


def has_scales(config: EmbeddingHashTableConfig) -> bool:
    """Whether the table's lookups depend on a scale that training changes."""
    entry = config.entry_config
    return entry.entry_type == EntryConfig.TRAINING and any(s.comp_config.HasField("one_bit") for s in entry.segments)


def scales_path(basename: StrPath) -> str:
    return f"{os.fspath(basename)}.scale.json"


def save_scales(path: StrPath, scales: Mapping[str, Sequence[float]]) -> FileDigest:
    """Writes table name -> scale per segment."""
    content = {"format": "shoal.scales", "version": 1, "scales": {name: list(s) for name, s in scales.items()}}
    write_whole(path, json.dumps(content))
    return digest_file(path)


def load_scales(basename: StrPath, saved: Saved | None = None) -> Scales:
    """Table name -> scale per segment; empty if the checkpoint has none, such as one from another system.

    Args:
        basename: the basename of the table's files.
        saved: the manifest that lists them; by default the one next to them.

    Raises:
        DataError: the file exists but is damaged, or is not a file of scales.
    """
    path = scales_path(basename)
    saved = saved or find_saved(basename)
    if saved is None:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return {}
    else:
        name = os.path.relpath(path, saved.folder or ".")
        if name not in saved.files:
            return {}
        data = saved.read(name)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:  # also for integers of thousands of digits
        raise DataError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != "shoal.scales" or content.get("version") != 1:
        raise DataError(f"{path} is not a file of scales of version 1")
    return check_scales(content.get("scales"), path)


def check_scales(scales: object, where: str) -> Scales:
    """Checks scales read from a file: table name -> finite numbers."""
    good = isinstance(scales, dict) and all(
        isinstance(of_table, list)
        and all(isinstance(s, float | int) and not isinstance(s, bool) and abs(s) <= _MAX for s in of_table)
        for of_table in scales.values()
    )
    if not good:
        raise DataError(f"{where}: scales must map table names to lists of numbers")
    return {name: [float(s) for s in of_table] for name, of_table in scales.items()}  # type: ignore[union-attr]
