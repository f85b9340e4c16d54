"""`DcOptimizer`: delay compensation around another optimizer, called directly on one row's weights."""

from typing import Any

import numpy as np
import torch

from shoal.errors import ConfigError
from shoal.table.config.messages import OptimizerDump
from shoal.table.config.optimizer import as_optimizer_config
from shoal.table.config.validate import validate_optimizer
from shoal.table.reference.optimizers import State, reference_optimizer
from shoal.table.reference.quantizers import stochastic_round_float16


class DcOptimizer:
    """Corrects a gradient that was computed at older weights before the wrapped optimizer uses it.

    ``optimize_with_latest_value`` steps with ``g + lambda_ * g^2 * (w - latest)``, where ``latest`` holds the weights
    that the gradient was computed at; ``optimize`` is the wrapped optimizer alone. Both change ``state`` and the
    float32 tensor ``w`` in place; ``g`` and ``latest`` are only read. ``lrs`` is the learning rate, a number or a
    vector with one element.

    >>> dc = DcOptimizer(0.5, SgdOptimizer(), dim_size=2)
    >>> w = torch.tensor([0.5, -0.25])
    >>> dc.optimize_with_latest_value(dc.init(), w, torch.tensor([2.0, -1.0]), [0.1], torch.tensor([0.3, 0.1]))
    """

    def __init__(self, lambda_: float, optimizer: Any, dim_size: int) -> None:
        if dim_size < 1:
            raise ConfigError(f"DcOptimizer: dim_size must be above 0, got {dim_size}")
        config = as_optimizer_config(optimizer)
        if config.WhichOneof("type") == "dc":
            raise ConfigError("DcOptimizer: optimizer must not be another dc optimizer")
        validate_optimizer(config, dim_size, "DcOptimizer: ")
        self.lambda_ = float(lambda_)
        self.dim_size = int(dim_size)
        self._optimizer = reference_optimizer(config)
        self._rounding = config.stochastic_rounding_float16
        self._random = np.random.default_rng()

    def init(self) -> State:
        """A fresh state of the wrapped optimizer."""
        return self._optimizer.init(self.dim_size)

    def dump(self, state: State) -> OptimizerDump:
        """The state in the form that checkpoints store."""
        single = self._optimizer.dump(state)
        return OptimizerDump(dump=[] if single is None else [single])

    def optimize(self, state: State, w: torch.Tensor, g: torch.Tensor, lrs: Any, global_step: int = 0) -> None:
        """One step of the wrapped optimizer."""
        self._step(state, w, self._vector("g", g), lrs, global_step)

    def optimize_with_latest_value(
        self, state: State, w: torch.Tensor, g: torch.Tensor, lrs: Any, latest: torch.Tensor, global_step: int = 0
    ) -> None:
        """One step with the compensated gradient."""
        old, grad, seen = self._vector("w", w), self._vector("g", g), self._vector("latest", latest)
        self._step(state, w, grad + np.float32(self.lambda_) * grad * grad * (old - seen), lrs, global_step)

    def _step(self, state: State, w: torch.Tensor, g: np.ndarray, lrs: Any, global_step: int) -> None:
        rates = torch.as_tensor(lrs, dtype=torch.float32, device="cpu").reshape(-1)
        if rates.numel() != 1:
            raise ConfigError(f"DcOptimizer: lrs must hold one learning rate, got {rates.numel()}")
        old = self._vector("w", w)
        new = self._optimizer.step(state, old, g, np.float32(rates.item()), int(global_step))
        if self._rounding:
            new = stochastic_round_float16(new, self._random.random(self.dim_size, np.float32))
        with torch.no_grad():
            w.copy_(torch.from_numpy(new).reshape(w.shape))

    def _vector(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        if tensor.dtype != torch.float32 or tensor.numel() != self.dim_size:
            got = f"{tensor.dtype} with {tensor.numel()} elements"
            raise ConfigError(f"DcOptimizer: {name} must be float32 with {self.dim_size} elements, got {got}")
        return tensor.detach().cpu().numpy().reshape(-1)
