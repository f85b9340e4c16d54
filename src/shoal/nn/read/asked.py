"""What a forward asks of the tables, before it reads: `Asked`, and `Located`, which looked for the rows already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.read.ops import Request, find_ahead, read, read_ahead
from shoal.nn.read.refusal import tell_ranks
from shoal.table.protocol import Missing


class Asked(NamedTuple):
    """A forward in two halves: what it reads, and what becomes of that."""

    request: Request | None
    """None: nothing is read."""
    finish: Callable[[list[Tensor]], Any]
    """What the forward returns, from what `read` does."""

    def result(self) -> Any:
        """What the forward returns."""
        return self.finish([] if self.request is None else read(self.request))


class Located:
    """Ids that a module located before its forward, which takes this in place of them and reads the rows as they are
    then. It is not used up: a forward that is computed again takes it again.

    Over ranks, `TableModule.locate` is a call that all of them make together, as a forward is.
    """

    def __init__(self, module: Any, asked: Asked) -> None:
        self._module = module
        request = asked.request
        if request is not None:
            request = request._replace(ahead=find_ahead(request))
        self._asked = Asked(request, asked.finish)

    def read(self) -> Located:
        """Reads the rows now, for the forward to take: it does not see updates that come between."""
        if self._asked.request is not None:
            read_ahead(self._asked.request)
        return self

    def fits(self, module: Any) -> bool:
        """Whether a forward of the module, as it is now, may take this."""
        request = self._asked.request
        return module is self._module and (request is None or request.missing == module.missing())

    def result(self, module: Any) -> Any:
        """What the module's forward returns."""
        if module is not self._module:
            raise ConfigError(
                f"{type(module).__name__} got ids that another module has located; a module takes what its own "
                "locate() returned"
            )
        if not self.fits(module):
            raise ConfigError(
                f"{type(module).__name__} located these ids in {'evaluation' if module.training else 'training'} mode; "
                "locate them again after train() or eval()"
            )
        return self._asked.result()

    def tensors(self) -> Sequence[Tensor]:
        """All that it holds, for streams that have to know."""
        request = self._asked.request
        if request is None:
            return []
        held = [*request.ids, *request.offsets, *request.weights]
        if request.ahead is not None:
            held += [one for found in request.ahead.founds for one in found]
            held += request.ahead.outputs or []
        return [one for one in held if isinstance(one, torch.Tensor)]


def located(module: Any, ask: Callable[[], Asked], missing: Missing | None = None) -> Located:
    """What a module asks for, located. Where that fails, the other ranks are told.

    ``missing``: how the forward will answer ids without a row, where the module's mode of now may be another.
    """
    try:
        asked = ask()
        if missing is not None and asked.request is not None:
            asked = asked._replace(request=asked.request._replace(missing=missing))
        return Located(module, asked)
    except Exception as error:
        tell_ranks(module.groups(), error)
        raise
