"""A net compiled by AOTInductor at export, next to its program; one library per kind of device."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

log = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
_CONFIGS = {"always_keep_tensor_constants": True}  # small weights would become part of the code, not to be replaced


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would use, None where there is none."""
    return next((found for each in (os.environ.get("CXX"), *COMPILERS) if each and (found := shutil.which(each))), None)


def compile_net(
    load: Callable[[], torch.export.ExportedProgram], folder: Path, check: Callable[[Any], None]
) -> dict[str, str]:
    """Compiles a program for the CPU, and for the GPU where there is one; device -> name of the file in ``folder``.

    What cannot be compiled is logged and left out: torch runs the program then.

    Args:
        load: gives the program anew.
        check: raises where the library for the CPU gives other results than the net.
    """
    if compiler() is None:
        log.warning("the net is not compiled, since there is no C++ compiler here (%s)", ", ".join(COMPILERS))
        return {}
    made = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        file = folder / f"compiled_{device}.pt2"
        try:
            program = load()
            if device != "cpu":
                program = move_to_device_pass(program, device)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own
                torch._inductor.aoti_compile_and_package(  # pyrefly: ignore
                    program, package_path=str(file), inductor_configs=_CONFIGS
                )
            if device == "cpu":
                check(load_compiled(file))
        except Exception as error:  # torch raises many kinds
            file.unlink(missing_ok=True)
            log.warning("the net is not compiled for %s, since that failed: %s", device, str(error)[:2000])
            continue
        made[device] = file.name
    return made


def load_compiled(file: Path) -> Any:
    """The compiled net as a call with keywords. It is machine code: load only what you trust.

    Raises:
        RuntimeError: it was compiled for another machine or another torch.
    """
    return torch._inductor.aoti_load_package(str(file))  # pyrefly: ignore


class CompiledNet:
    """A compiled net, called with keywords as the others are; its weights are replaceable as a whole.

    Args:
        file: what `compile_net` wrote.
        plain: the program that it was made of, as torch runs it.
        device: where it runs.
    """

    def __init__(self, file: Path, plain: Any, device: torch.device) -> None:
        self._file, self._plain, self._device = file, plain, device
        self._call = load_compiled(file)
        self.weights: Mapping[str, torch.Tensor] = dict(plain.weights)

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self._call(**inputs)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """The same net with all of its weights replaced, as torch runs it if need be; this one stays as it is."""
        return self.replaced(weights) or self._plain.with_weights(weights)

    def replaced(self, weights: Mapping[str, torch.Tensor]) -> CompiledNet | None:
        """The same library with other weights; None where some of them are part of its code."""
        other = CompiledNet(self._file, self._plain, self._device)
        if fixed := weights.keys() - set(other._call.get_constant_fqns()):
            log.info("torch runs the net from now on, since weights of the library cannot be replaced: %s", fixed)
            return None
        other._call.load_constants(
            {name: value.detach().to(self._device) for name, value in weights.items()}, check_full_update=False
        )
        other.weights = dict(weights)
        return other
