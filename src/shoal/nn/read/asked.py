"""`Asked`: a forward's request before it reads rows; `Located`: one whose rows have been located."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.nn.read.ops import Request, find_ahead, read, read_ahead
from shoal.nn.read.refusal import notify_ranks
from shoal.table.protocol import Missing


class Asked(NamedTuple):
    """A forward in two parts: the request, and the function that computes the result from the rows."""

    request: Request | None
    """None: nothing is read."""
    finish: Callable[[list[Tensor]], Any]
    """Computes the result of the forward from that of `read`."""

    def result(self) -> Any:
        """Return the result of the forward."""
        return self.finish([] if self.request is None else read(self.request))


class Located:
    """Ids that a module located before its forward, which takes this object instead of the ids and reads the current
    rows. It can be used several times, for example when a forward is recomputed.

    Over ranks, `TableModule.locate` is a collective call, as a forward is.
    """

    def __init__(self, module: Any, asked: Asked) -> None:
        self._module = module
        request = asked.request
        if request is not None:
            request = request._replace(ahead=find_ahead(request))
        self._asked = Asked(request, asked.finish)

    def read(self) -> Located:
        """Read the rows now; the forward uses these and does not see later updates."""
        if self._asked.request is not None:
            read_ahead(self._asked.request)
        return self

    def fits(self, module: Any) -> bool:
        """Whether a forward of the module, in its current mode, can take this."""
        request = self._asked.request
        return module is self._module and (request is None or request.missing == module.missing())

    def result(self, module: Any) -> Any:
        """Return the result of the module's forward."""
        if module is not self._module:
            raise ConfigError(
                f"{type(module).__name__}.forward must get the result of its own locate(), got that of another module"
            )
        if not self.fits(module):
            raise ConfigError(
                f"{type(module).__name__} located these ids in {'evaluation' if module.training else 'training'} mode; "
                "locate them again after train() or eval()"
            )
        return self._asked.result()

    def tensors(self) -> Sequence[Tensor]:
        """Return all tensors that it holds, to record them on CUDA streams."""
        request = self._asked.request
        if request is None:
            return []
        held = [*request.ids, *request.offsets, *request.weights]
        if request.ahead is not None:
            held += [one for found in request.ahead.founds for one in found]
            held += request.ahead.outputs or []
        return [one for one in held if isinstance(one, torch.Tensor)]


def located(module: Any, ask: Callable[[], Asked], missing: Missing | None = None) -> Located:
    """Locate the ids of a module's request; on failure notify the other ranks.

    ``missing``: how the forward will answer ids without a row, if not as in the module's current mode.
    """
    try:
        asked = ask()
        if missing is not None and asked.request is not None:
            asked = asked._replace(request=asked.request._replace(missing=missing))
        return Located(module, asked)
    except Exception as error:
        notify_ranks(module.groups(), error)
        raise
