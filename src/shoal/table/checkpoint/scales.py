"""The quantisation scales of one_bit segments, in a small file beside the records, which have no room for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence

from shoal.errors import DataError
from shoal.table.checkpoint.naming import StrPath, write_whole
from shoal.table.messages import EmbeddingHashTableConfig, EntryConfig

Scales = dict[str, list[float]]


def has_scales(config: EmbeddingHashTableConfig) -> bool:
    """Whether lookups of the table depend on a scale that training moves."""
    entry = config.entry_config
    return entry.entry_type == EntryConfig.TRAINING and any(s.comp_config.HasField("one_bit") for s in entry.segments)


def scales_path(basename: StrPath) -> str:
    return f"{os.fspath(basename)}.scale.json"


def save_scales(basename: StrPath, scales: Mapping[str, Sequence[float]]) -> None:
    """Writes table name -> scale per segment; without any, removes what an earlier save left."""
    path = scales_path(basename)
    if scales:
        content = {"format": "shoal.scales", "version": 1, "scales": {name: list(s) for name, s in scales.items()}}
        write_whole(path, json.dumps(content))
    elif os.path.exists(path):
        os.unlink(path)


def load_scales(basename: StrPath) -> Scales:
    """Table name -> scale per segment; empty when the checkpoint has none, as one of another system.

    Raises:
        DataError: the file is there but is none of ours.
    """
    path = scales_path(basename)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != "shoal.scales" or content.get("version") != 1:
        raise DataError(f"{path}: not a file of scales, version 1")
    return check_scales(content.get("scales"), path)


def check_scales(scales: object, where: str) -> Scales:
    """Checks what came out of a file: table name -> finite numbers."""
    good = isinstance(scales, dict) and all(
        isinstance(of_table, list)
        and all(isinstance(s, float | int) and not isinstance(s, bool) and math.isfinite(s) for s in of_table)
        for of_table in scales.values()
    )
    if not good:
        raise DataError(f"{where}: scales must map table names to lists of numbers")
    return {name: [float(s) for s in of_table] for name, of_table in scales.items()}  # type: ignore[union-attr]
