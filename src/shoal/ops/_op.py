"""One op, one place: its schema, checks, CPU kernel, plain-torch reference, fake kernel and gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_LIBRARY = torch.library.Library("shoal", "FRAGMENT")

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_compiling = torch.compiler.is_compiling


class Op:
    """A `torch.library` op of the namespace ``shoal``.

    ``check(*args)`` raises on arguments that do not fit together and runs before either implementation. ``cpu(*args)``
    is the native path; ``reference(*args)`` has the same meaning in plain torch, and serves every other device.
    A plain eager call that needs no gradient skips the dispatcher, which would cost more than a small op itself.
    """

    def __init__(
        self,
        schema: str,
        *,
        cpu: Callable[..., Any],
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        check: Callable[..., None] | None = None,
    ) -> None:
        self.name = schema.partition("(")[0]
        self.reference = reference
        self.differentiable = False
        self._cpu = _checked(check, cpu)
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, self._cpu, "CPU")
        _LIBRARY.impl(self.name, _checked(check, reference), "CompositeExplicitAutograd")
        torch.library.register_fake(f"shoal::{self.name}", fake, lib=_LIBRARY)
        self.overload = getattr(torch.ops.shoal, self.name).default

    def register_gradient(self, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
        """Connects the op to autograd; both functions are as for `torch.library.register_autograd`."""
        self.differentiable = True
        torch.library.register_autograd(f"shoal::{self.name}", backward, setup_context=setup_context, lib=_LIBRARY)

    def register_cuda(self, kernel: Callable[..., Any]) -> None:
        """Puts a kernel in the reference's place for CUDA tensors."""
        _LIBRARY.impl(self.name, kernel, "CUDA")

    def __call__(self, *args: Any) -> Any:
        if _is_compiling() or not _is_plain(args):
            return self.overload(*args)
        return self._cpu(*args)


def _checked(check: Callable[..., None] | None, implementation: Callable[..., Any]) -> Callable[..., Any]:
    if check is None:
        return implementation

    def run(*args: Any) -> Any:
        check(*args)
        return implementation(*args)

    return run


def _is_plain(args: Sequence[Any]) -> bool:
    """True when all tensors are ordinary CPU tensors that nobody traces or differentiates."""
    if _dispatch_modes():
        return False
    grad = torch.is_grad_enabled()
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if not arg.is_cpu or (grad and arg.requires_grad):
                return False
        elif kind is list:
            for item in arg:
                kind = type(item)
                if kind is Tensor or kind is Parameter:
                    if not item.is_cpu or (grad and item.requires_grad):
                        return False
                elif isinstance(item, Tensor):
                    return False
                else:
                    break  # a list holds one kind of thing
        elif isinstance(arg, Tensor):
            return False
    return True


def new_size() -> Any:
    """Inside a fake kernel: a size that only the data can tell."""
    return torch.library.get_ctx().new_dynamic_size()
