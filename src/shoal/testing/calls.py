"""Packs a function call into bytes that another process can run, whatever its import path."""

import importlib
import importlib.util
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from shoal.errors import ConfigError


def pack_call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    """Pack a call of ``fn``, a module-level function; a test module outside the import path is found by its file."""
    if "<locals>" in fn.__qualname__ or fn.__name__ == "<lambda>":
        raise ConfigError(f"run_ranks: {fn.__qualname__} is local; other processes can only call a module's function")
    file = getattr(sys.modules.get(fn.__module__), "__file__", None)
    return pickle.dumps((fn.__module__, fn.__qualname__, file, pickle.dumps((args, kwargs))))


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    module_name, qualname, file, arguments = pickle.loads(data)
    fn = attrgetter(qualname)(_module(module_name, qualname, file))
    args, kwargs = pickle.loads(arguments)
    return fn, args, kwargs


def _module(name: str, qualname: str, file: str | None) -> Any:
    if name != "__main__":
        try:
            module = importlib.import_module(name)
            if hasattr(module, qualname.partition(".")[0]):
                return module
        except ImportError:
            pass
    if file is None:
        raise ImportError(f"run_ranks: module {name} of {qualname} has no file that another process could load")
    alias = "__shoal_main__" if name == "__main__" else name
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"run_ranks: {file} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module


def outcome(call: Callable[[], Any]) -> bytes:
    """Run ``call`` and pack its outcome: ``(result, exception, traceback, when it was raised)``."""
    try:
        return pickle.dumps((call(), None, "", 0.0))
    except BaseException as error:
        when, text = time.monotonic(), traceback.format_exc()  # one clock for all processes of a machine
        try:
            data = pickle.dumps((None, error, text, when))
            pickle.loads(data)
        except Exception:  # an exception that cannot be pickled; its traceback can
            data = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text, when))
        return data
