"""Nets compiled by AOTInductor at export, in addition to their programs: one library per kind of device."""

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
_CONFIGS = {"always_keep_tensor_constants": True}  # otherwise small weights are compiled into the code


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would use, or None."""
    return next((found for each in (os.environ.get("CXX"), *COMPILERS) if each and (found := shutil.which(each))), None)


def compile_net(
    load: Callable[[], torch.export.ExportedProgram], folder: Path, check: Callable[[Any], None]
) -> dict[str, str]:
    """Compile a program for the CPU, and for the GPU if there is one; device -> name of the file in ``folder``.

    A failure to compile is logged, and the device is omitted; torch then runs the program.

    Args:
        load: loads a fresh copy of the program.
        check: raises if the CPU library's results differ from the net's.
    """
    if compiler() is None:
        log.warning("the net is not compiled because this machine has no C++ compiler (%s)", ", ".join(COMPILERS))
        return {}
    made = {}
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        file = folder / f"compiled_{device}.pt2"
        try:
            program = load()
            if device != "cpu":
                program = move_to_device_pass(program, device)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # from torch itself
                torch._inductor.aoti_compile_and_package(  # pyrefly: ignore
                    program, package_path=str(file), inductor_configs=_CONFIGS
                )
            if device == "cpu":
                check(load_compiled(file))
        except Exception as error:  # torch raises many kinds
            file.unlink(missing_ok=True)
            log.warning("could not compile the net for %s: %s", device, str(error)[:2000])
            continue
        made[device] = file.name
    return made


def load_compiled(file: Path) -> Any:
    """The compiled net, called with keyword arguments. It is machine code: load only files that you trust.

    Raises:
        RuntimeError: it was compiled for another machine or another torch.
    """
    return torch._inductor.aoti_load_package(str(file))  # pyrefly: ignore


class CompiledNet:
    """A compiled net, called with keyword arguments; its weights can be replaced, all at once.

    Args:
        file: the file that `compile_net` wrote.
        plain: the original program, run by torch.
        device: where it runs.
    """

    def __init__(self, file: Path, plain: Any, device: torch.device) -> None:
        self._file, self._plain, self._device = file, plain, device
        self._call = load_compiled(file)
        self.weights: Mapping[str, torch.Tensor] = dict(plain.weights)

    def __call__(self, **inputs: torch.Tensor) -> Any:
        return self._call(**inputs)

    def with_weights(self, weights: Mapping[str, torch.Tensor]) -> Any:
        """A copy of the net with all of its weights replaced, run by torch if necessary."""
        return self.replaced(weights) or self._plain.with_weights(weights)

    def replaced(self, weights: Mapping[str, torch.Tensor]) -> CompiledNet | None:
        """A copy of the library with other weights; None if some weights are part of its code."""
        other = CompiledNet(self._file, self._plain, self._device)
        if fixed := weights.keys() - set(other._call.get_constant_fqns()):
            log.info(
                "torch runs the net from now on because the compiled library's weights cannot be replaced: %s", fixed
            )
            return None
        other._call.load_constants(
            {name: value.detach().to(self._device) for name, value in weights.items()}, check_full_update=False
        )
        other.weights = dict(weights)
        return other
