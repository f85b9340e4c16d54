"""Loads a net's program from disk without unpickling anything but plain tensors."""

import contextlib
import importlib
import io
import json
import re
import threading
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from shoal.errors import DataError

# Records of an archive that torch.export.save writes, below its root folder. Others are rejected, because torch would
# run compiled libraries and unpickle objects in them.
_RECORDS = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/\w+|\.format_version|\.storage_alignment"
    r"|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(model\.pt|weight_\d+|model_weights_config\.json)"
    r"|data/constants/(model\.pt|tensor_\d+|model_constants_config\.json)"
)
_PLAIN = ("weight_", "tensor_")
_one_at_a_time = threading.Lock()  # torch's program reader keeps its state in a global and rejects a second reader


def prepare_to_load() -> None:
    """Import the parts of torch that `load_exported` needs, which takes a few seconds of CPU time."""
    with contextlib.suppress(ImportError):  # if another torch version has them elsewhere, the first load imports them
        importlib.import_module("torch._export.serde.serialize")
        importlib.import_module("torch._functorch.aot_autograd")


def load_exported(file: Path) -> torch.export.ExportedProgram:
    """Load a program that ``torch.export.save`` wrote.

    ``torch.export.load`` unpickles anything that its safe reader rejects. So the safe reader is tried here first, and
    records that hold objects are rejected.

    Raises:
        DataError: the file is missing, damaged, or contains more than a graph and its tensors.
    """
    try:
        with open(file, "rb") as opened:
            _check(file, opened)
            opened.seek(0)
            with _one_at_a_time, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # by torch 2.11
                return torch.export.load(opened)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from None
    except Exception as error:  # torch raises many kinds for a broken archive
        raise DataError(f"{file} is not a program written by torch.export: {error}") from error


def _check(file: Path, opened: IO[bytes]) -> None:
    with zipfile.ZipFile(opened) as archive:
        seen: set[str] = set()
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if _RECORDS.fullmatch(name) is None or name in seen or info.compress_type != zipfile.ZIP_STORED:
                raise DataError(f"{file} has a record {info.filename!r}, which does not belong in a net's program")
            seen.add(name)
            if name.endswith(".pt"):
                _check_tensors(file, info.filename, archive.read(info))
            elif name.endswith("_config.json"):
                _check_config(file, info.filename, json.loads(archive.read(info)))


def _check_tensors(file: Path, name: str, data: bytes) -> None:
    if not data:
        return
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise DataError(f"{file}: record {name!r} is damaged or contains more than tensors: {error}") from None


def _check_config(file: Path, name: str, content: Any) -> None:
    for key, each in content["config"].items():
        if each["use_pickle"] or not each["path_name"].startswith(_PLAIN):
            raise DataError(
                f"{file}: {key!r} in {name!r} is a pickled object; parameters, buffers and constants of a served net "
                "must be plain tensors"
            )
