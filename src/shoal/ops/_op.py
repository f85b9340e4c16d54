"""`Op`: the schema, checks, CPU kernel, plain-torch reference, fake kernel and gradient of one op."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal.errors import UnsupportedError

_LIBRARY = torch.library.Library("shoal", "FRAGMENT")

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


class Op:
    """A `torch.library` op of the namespace ``shoal``.

    A plain eager call that needs no gradient skips the dispatcher, which would cost more than a small op itself.

    Args:
        schema: name, arguments and results, as for `torch.library.define`.
        cpu: the native implementation.
        reference: the same in plain torch, used on every other device.
        fake: computes only shapes and dtypes, while torch traces.
        check: raises on arguments that do not fit together; runs before every implementation.
        cuda: ``"module:function"`` in `shoal.ops.cuda`, imported on the first call, so that `import shoal` does not
            load Triton.
        host: indices of the arguments that stay on the CPU; the others are moved to the CUDA device.
        sums: the kernel sums with atomics; the reference is used instead if `torch.use_deterministic_algorithms` is on
            (not ``warn_only``).
        backward: the op is the gradient of another one, and raises if it is differentiated.
    """

    all: ClassVar[dict[str, Op]] = {}
    """Every op by name."""

    def __init__(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        check: Callable[..., None] | None = None,
        cuda: str | None = None,
        host: Sequence[int] = (),
        sums: bool = False,
        backward: bool = False,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.reference = reference
        self.differentiable = False
        self.check = check
        self._cpu = _checked(check, cpu)
        self._cuda = cuda
        self._host = frozenset(host)
        self._sums = sums
        Op.all[self.name] = self
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, lambda *args: self._cpu(*args), "CPU")
        _LIBRARY.impl(self.name, _checked(check, reference), "CompositeExplicitAutograd")
        if cuda is not None:
            _LIBRARY.impl(self.name, self._run_cuda, "CUDA")
        torch.library.register_fake(f"shoal::{self.name}", fake, lib=_LIBRARY)
        self.overload = getattr(torch.ops.shoal, self.name).default
        if backward:
            torch.library.register_autograd(f"shoal::{self.name}", self._no_second_derivative, lib=_LIBRARY)

    def register_gradient(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Connect the op to autograd; both functions are as for `torch.library.register_autograd`."""
        self.differentiable = True
        torch.library.register_autograd(f"shoal::{self.name}", backward, setup_context=setup_context, lib=_LIBRARY)

    def _no_second_derivative(self, ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(f"shoal::{self.name} is a gradient; second derivatives are not supported")

    @cached_property
    def kernel(self) -> Callable[..., Any]:
        """The CUDA implementation, without the checks; the reference if Triton is not installed."""
        if self._cuda is None or importlib.util.find_spec("triton") is None:
            return self.reference
        module, _, function = self._cuda.partition(":")
        return getattr(importlib.import_module(f"shoal.ops.cuda.{module}"), function)

    def run_kernel(self, *args: Any) -> Any:
        """Run the checks and `kernel` on tensors of any device; tests use Triton's interpreter."""
        if self.check is not None:
            self.check(*args)
        return self.kernel(*args)

    def _run_cuda(self, *args: Any) -> Any:
        if self.check is not None:
            self.check(*args)
        device = next(t.device for t in _tensors(args) if t.is_cuda)
        args = tuple(arg if i in self._host else _move(arg, device) for i, arg in enumerate(args))
        strict = torch.are_deterministic_algorithms_enabled()
        strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
        kernel = self.reference if self._sums and strict else self.kernel
        if device.index == torch.cuda.current_device():
            return kernel(*args)
        with torch.cuda.device(device):
            return kernel(*args)

    def __call__(self, *args: Any) -> Any:
        plain = 0 if _is_compiling() else _plain_device(args)
        if plain == _CPU:
            return self._cpu(*args)
        if plain == _CUDA and self._cuda is not None:
            return self._run_cuda(*args)
        return self.overload(*args)


def _checked(check: Callable[..., None] | None, implementation: Callable[..., Any]) -> Callable[..., Any]:
    if check is None:
        return implementation

    def run(*args: Any) -> Any:
        check(*args)
        return implementation(*args)

    return run


_CPU, _CUDA = 1, 2


def _plain_device(args: Sequence[Any]) -> int:
    """The device of the tensors, if all are plain and neither traced nor differentiated, else 0."""
    if _dispatch_modes():
        return 0
    grad = torch.is_grad_enabled()
    found = _CPU
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if grad and arg.requires_grad:
                return 0
            if not arg.is_cpu:
                if not arg.is_cuda:
                    return 0
                found = _CUDA
        elif kind is list:
            for item in arg:
                kind = type(item)
                if kind is Tensor or kind is Parameter:
                    if grad and item.requires_grad:
                        return 0
                    if not item.is_cpu:
                        if not item.is_cuda:
                            return 0
                        found = _CUDA
                elif isinstance(item, Tensor):
                    return 0
                else:
                    break  # the elements of a list have one type
        elif isinstance(arg, Tensor):
            return 0
    return found


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (item for item in arg if isinstance(item, Tensor))


def _move(arg: Any, device: torch.device) -> Any:
    if isinstance(arg, Tensor):
        return arg.to(device) if arg.is_cpu else arg
    if isinstance(arg, list) and any(isinstance(item, Tensor) and item.is_cpu for item in arg):
        return [item.to(device) if isinstance(item, Tensor) else item for item in arg]
    return arg


def new_size() -> Any:
    """A data-dependent size, inside a fake kernel."""
    return torch.library.get_ctx().new_dynamic_size()
