"""A net's program on disk, read without unpickling anything but plain tensors."""

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

# Records of an archive that torch.export.save writes, below its root folder. Nothing else is let through: torch would
# run compiled libraries and unpickle objects that an archive brings along.
_RECORDS = re.compile(
    r"archive_format|archive_version|version|byteorder|\.data/\w+|\.format_version|\.storage_alignment"
    r"|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(model\.pt|weight_\d+|model_weights_config\.json)"
    r"|data/constants/(model\.pt|tensor_\d+|model_constants_config\.json)"
)
_PLAIN = ("weight_", "tensor_")
_one_at_a_time = threading.Lock()  # torch's reader of programs keeps its state in a global and refuses a second one


def prepare_to_load() -> None:
    """Imports what `load_exported` needs of torch, which are some seconds of CPU time."""
    with contextlib.suppress(ImportError):  # in a version of torch that has them elsewhere the first load imports them
        importlib.import_module("torch._export.serde.serialize")
        importlib.import_module("torch._functorch.aot_autograd")


def load_exported(file: Path) -> torch.export.ExportedProgram:
    """The program that ``torch.export.save`` wrote to a file.

    ``torch.export.load`` unpickles what its safe reader refuses, so the safe reader is tried here first, and records
    that hold objects are refused.

    Raises:
        DataError: the file is missing, broken, or holds more than a graph and its tensors.
    """
    try:
        with open(file, "rb") as opened:
            _check(file, opened)
            opened.seek(0)
            with _one_at_a_time, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # torch 2.11's own
                return torch.export.load(opened)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch raises many kinds for a broken archive
        raise DataError(f"{file} is not a program that torch.export wrote: {error}") from error


def _check(file: Path, opened: IO[bytes]) -> None:
    with zipfile.ZipFile(opened) as archive:
        seen: set[str] = set()
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if _RECORDS.fullmatch(name) is None or name in seen or info.compress_type != zipfile.ZIP_STORED:
                raise DataError(f"{file} has a record {info.filename!r} that the program of a net does not have")
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
        raise DataError(f"{file}: record {name!r} is damaged or holds more than tensors: {error}") from None


def _check_config(file: Path, name: str, content: Any) -> None:
    for key, each in content["config"].items():
        if each["use_pickle"] or not each["path_name"].startswith(_PLAIN):
            raise DataError(
                f"{file}: {key!r} in {name!r} is a pickled object; a net is served if its parameters, buffers and "
                "constants are plain tensors"
            )
