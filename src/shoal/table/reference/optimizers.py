"""The reference row optimizers, one class each.

All arithmetic is float32 unless a class says otherwise. A state is a dict; ``step(state, w, g, lr, global_step)``
changes the state and returns the new weights, and never writes to ``w`` or ``g``. ``wd`` is the weight decay, which is
added to the gradient (``g + wd * w``) unless the class says otherwise.
"""

from typing import Any, ClassVar

import numpy as np

from shoal.errors import ConfigError
from shoal.table.config.messages import OptimizerConfig, SingleOptimizerDump

F = np.float32
State = dict[str, Any]
ONE = F(1)


class ReferenceOptimizer:
    """Base class. ``vectors`` of the state have one number per weight, ``scalars`` one per row; in the row's order."""

    kind: ClassVar[str]
    vectors: ClassVar[tuple[str, ...]] = ()
    scalars: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: Any) -> None:
        self.config = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__["config"].get(_SHORT.get(name, name))
        if value is None:
            raise AttributeError(name)
        return F(value) if isinstance(value, float) else value

    def init(self, dim: int) -> State:
        """The state of a fresh row."""
        return {name: np.full(dim, self.start(name), F) for name in self.vectors} | {
            name: self.start(name) for name in self.scalars
        }

    def start(self, name: str) -> Any:
        """The initial value of ``name`` in a state."""
        return F(0)

    def step(self, state: State, w: np.ndarray, g: np.ndarray, lr: F, global_step: int = 0) -> np.ndarray:
        raise NotImplementedError

    def dump(self, state: State) -> SingleOptimizerDump | None:
        """The state as it is saved in a checkpoint; None: nothing is saved."""
        dump = SingleOptimizerDump()
        message = getattr(dump, self.kind)
        message.SetInParent()
        for name in self.vectors:
            getattr(message, name).extend(state[name].tolist())
        for name in self.scalars:
            value = state[name]
            setattr(message, name, int(value) if isinstance(value, int | np.int64) else float(value))
        return dump

    def load(self, dump: SingleOptimizerDump) -> State:
        """The state from the result of `dump`."""
        message = getattr(dump, self.kind)
        return {name: np.array(getattr(message, name), F) for name in self.vectors} | {
            name: type(self.start(name))(getattr(message, name)) for name in self.scalars
        }


_SHORT = {
    "wd": "weight_decay_factor",
    "mu": "momentum",
    "eps": "epsilon",
    "l1": "l1_regularization_strength",
    "l2": "l2_regularization_strength",
    "initial": "initial_accumulator_value",
}


class Sgd(ReferenceOptimizer):
    kind = "sgd"

    def step(self, state, w, g, lr, global_step=0):
        return w - lr * g


class Adagrad(ReferenceOptimizer):
    """``epsilon``, 0 by default, is added to the root; a weight whose norm is 0 does not change."""

    kind = "adagrad"
    vectors = ("norm",)

    def start(self, name):
        return self.initial

    def step(self, state, w, g, lr, global_step=0):
        g = g + self.wd * w
        state["norm"] = norm = state["norm"] + g * g
        return w - self.rate(lr, norm) * g

    def rate(self, lr: F, norm: np.ndarray) -> np.ndarray:
        eps = F(self.config.get("epsilon", 0.0))
        return np.divide(lr, np.sqrt(norm) + eps, out=np.zeros_like(norm), where=norm != 0)


class DynamicWdAdagrad(Adagrad):
    """Adagrad; with ``decouple_weight_decay``, the weight decays instead of the gradient: ``- lr * wd * w``."""

    kind = "dynamic_wd_adagrad"
    scalars = ("last_update_step",)

    def start(self, name):
        return self.initial if name == "norm" else 0

    def step(self, state, w, g, lr, global_step=0):
        state["last_update_step"] = int(global_step)
        if not self.decouple_weight_decay:
            return super().step(state, w, g, lr, global_step)
        state["norm"] = norm = state["norm"] + g * g
        return w - (self.rate(lr, norm) * g + lr * self.wd * w)


class Adadelta(ReferenceOptimizer):
    kind = "adadelta"
    vectors = ("accum", "accum_update")

    def step(self, state, w, g, lr, global_step=0):
        rho = self.averaging_ratio
        g = g + self.wd * w
        a = state["accum"] * rho + g * g * (ONE - rho)
        u = np.sqrt(state["accum_update"] + self.eps) / np.sqrt(a + self.eps) * g
        state["accum_update"] = state["accum_update"] * rho + u * u * (ONE - rho)
        state["accum"] = a
        return w - u * lr


class Adam(ReferenceOptimizer):
    """The powers count the updates of the row; ``epsilon`` is added outside the root.

    With ``bias_corrected_epsilon`` it is added to the root of the bias-corrected second moment, as in torch.
    """

    kind = "adam"
    vectors = ("m", "v")
    scalars = ("beta1_power", "beta2_power")

    def start(self, name):
        return {"beta1_power": self.beta1, "beta2_power": self.beta2}.get(name, F(0))

    def step(self, state, w, g, lr, global_step=0):
        rate, eps = self.rate(state, lr), self.below(state)
        g = g + self.wd * w
        self.moments(state, g)
        direction = state["m"]
        if self.use_nesterov:
            direction = g * (ONE - self.beta1) + self.beta1 * state["m"]
        return w - rate * direction / (np.sqrt(self.second(state)) + eps)

    def rate(self, state: State, lr: F) -> F:
        return lr * np.sqrt(ONE - state["beta2_power"]) / (ONE - state["beta1_power"])

    def below(self, state: State) -> F:
        """The term added to the root of the second moment."""
        corrected = self.config.get("bias_corrected_epsilon", self.kind == "adamw")
        return self.eps * np.sqrt(ONE - state["beta2_power"]) if corrected else self.eps

    def moments(self, state: State, g: np.ndarray) -> None:
        state["m"] = state["m"] + (g - state["m"]) * (ONE - self.beta1)
        state["v"] = state["v"] + (g * g - state["v"]) * (ONE - self.beta2)
        state["beta1_power"] = state["beta1_power"] * self.beta1
        state["beta2_power"] = state["beta2_power"] * self.beta2

    def second(self, state: State) -> np.ndarray:
        return state["v"]


class Amsgrad(Adam):
    kind = "amsgrad"
    vectors = ("m", "v", "vhat")

    def second(self, state):
        state["vhat"] = np.maximum(state["vhat"], state["v"])
        return state["vhat"]


class AdamW(Adam):
    """Adam's formula without decay in the gradient; the weight before the step decays instead: ``- lr * wd * w``.

    ``epsilon`` is added to the root of the bias-corrected second moment.
    """

    kind = "adamw"

    def step(self, state, w, g, lr, global_step=0):
        rate, eps = self.rate(state, lr), self.below(state)
        self.moments(state, g)
        return w - rate * state["m"] / (np.sqrt(state["v"]) + eps) - lr * self.wd * w


class Lamb(Adam):
    """``u = mhat / (sqrt(vhat) + eps) + wd * w``, with the bias-corrected moments ``mhat = m / (1 - beta1_power)`` and
    ``vhat = v / (1 - beta2_power)`` (powers before their update); then ``w -= lr * ratio * u``, where ``ratio`` is
    ``|w| / |u|`` (Euclidean norms over the segment), or 1 if either norm is 0."""

    kind = "lamb"

    def step(self, state, w, g, lr, global_step=0):
        first, second = ONE - state["beta1_power"], ONE - state["beta2_power"]
        self.moments(state, g)
        u = (state["m"] / first) / (np.sqrt(state["v"] / second) + self.eps) + self.wd * w
        w_norm, u_norm = _norm(w), _norm(u)
        ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else ONE
        return w - lr * ratio * u


def _norm(x: np.ndarray) -> F:
    return np.sqrt(np.sum(x * x, dtype=F))


class Momentum(ReferenceOptimizer):
    kind = "momentum"
    vectors = ("n",)

    def step(self, state, w, g, lr, global_step=0):
        p = state["n"]
        state["n"] = n = self.mu * p - lr * (g + self.wd * w)
        return w + (-self.mu * p + (ONE + self.mu) * n if self.use_nesterov else n)


class MovingAverage(ReferenceOptimizer):
    """The "gradient" is the new sample; the rate is ignored. It has no state in a checkpoint."""

    kind = "moving_average"

    def step(self, state, w, g, lr, global_step=0):
        return self.mu * w + (ONE - self.mu) * g

    def dump(self, state):
        return None


class Rmsprop(ReferenceOptimizer):
    """Computed in float64; n and w are rounded back to float32. ``epsilon``, 1 by default, is added to the root."""

    kind = "rmsprop"
    vectors = ("n",)

    def step(self, state, w, g, lr, global_step=0):
        wide, mu = w.astype(np.float64), np.float64(self.mu)
        dx = g.astype(np.float64) + np.float64(self.wd) * wide
        n = mu * state["n"].astype(np.float64) + self.share(mu) * dx * dx
        state["n"] = n.astype(F)
        eps = np.float64(F(self.config.get("epsilon", 1.0)))
        return (wide - np.float64(lr) / (np.sqrt(n) + eps) * dx).astype(F)

    def share(self, mu: np.float64) -> np.float64:
        """The weight of the new square."""
        return 1.0 - mu


class RmspropV2(Rmsprop):
    kind = "rmspropv2"

    def share(self, mu):
        return np.float64(1.0)


class Ftrl(ReferenceOptimizer):
    """The weight is recomputed from ``zero`` and ``norm`` at each step. A rate of 0 changes nothing."""

    kind = "ftrl"
    vectors = ("norm", "zero")

    def start(self, name):
        return self.initial if name == "norm" else F(0)

    def accumulate(self, state: State, w: np.ndarray, g: np.ndarray, lr: F) -> None:
        norm = state["norm"] + g * g
        sigma = (np.sqrt(norm) - np.sqrt(state["norm"])) / lr
        state["zero"] = state["zero"] + (g - sigma * w)
        state["norm"] = norm

    def step(self, state, w, g, lr, global_step=0):
        if lr == 0:
            return w.copy()
        self.accumulate(state, w, g, lr)
        zero = state["zero"]
        below = np.sqrt(state["norm"]) + self.beta + self.l2 * lr
        shrunk = lr * (np.sign(zero) * self.l1 - zero)
        return np.divide(shrunk, below, out=np.zeros_like(w), where=np.abs(zero) > self.l1)


class GroupFtrl(Ftrl):
    """FTRL whose l1 acts on the length of ``zero`` over the segment."""

    kind = "group_ftrl"

    def step(self, state, w, g, lr, global_step=0):
        if lr == 0:
            return w.copy()
        self.accumulate(state, w, g, lr)
        length = _norm(state["zero"])
        if length < self.l1 or length == 0:
            return np.zeros_like(w)
        below = self.beta + np.sqrt(state["norm"]) + self.l2 * lr
        shrunk = lr * state["zero"] * ((self.l1 - length) / length)
        return np.divide(shrunk, below, out=np.zeros_like(w), where=state["zero"] != 0)


class GroupAdagrad(ReferenceOptimizer):
    """One accumulator, raised by the largest squared gradient, and a group lasso of strength l2."""

    kind = "group_adagrad"
    scalars = ("grad_square_sum",)

    def start(self, name):
        return self.initial

    def step(self, state, w, g, lr, global_step=0):
        g = g + self.wd * w
        state["grad_square_sum"] = total = state["grad_square_sum"] + np.max(g * g)
        below = self.beta + np.sqrt(total)
        if below == 0 or lr == 0:
            return w.copy()
        e = lr / below
        z = g - w / e
        length = _norm(z)
        if length < self.l2 or length == 0:
            return np.zeros_like(w)
        return -e * (length - self.l2) / length * z


class BatchSoftmax(ReferenceOptimizer):
    """The gradient is ignored; the weight estimates the number of steps between two occurrences of the id."""

    kind = "batch_softmax"
    scalars = ("global_step",)

    def start(self, name):
        return 0

    def step(self, state, w, g, lr, global_step=0):
        if global_step < 0:
            raise ConfigError(f"batch_softmax: the global step must be >= 0, got {global_step}")
        gap = F(global_step - state["global_step"])
        state["global_step"] = int(global_step)
        return (ONE - lr) * w + lr * gap


class RowwiseAdagrad(ReferenceOptimizer):
    """``g += wd * w; norm += mean(g^2); w -= lr * g / (sqrt(norm) + eps)`` with one norm for the segment."""

    kind = "rowwise_adagrad"
    scalars = ("norm",)

    def start(self, name):
        return self.initial

    def step(self, state, w, g, lr, global_step=0):
        g = g + self.wd * w
        state["norm"] = norm = state["norm"] + np.mean(g * g, dtype=F)
        below = np.sqrt(norm) + self.eps
        return w - lr * g / below if below > 0 else w.copy()


def _kinds(base: type[ReferenceOptimizer]) -> dict[str, type[ReferenceOptimizer]]:
    own = {base.kind: base} if "kind" in vars(base) else {}
    return own | {k: cls for child in base.__subclasses__() for k, cls in _kinds(child).items()}


OPTIMIZERS = _kinds(ReferenceOptimizer)


def reference_optimizer(config: OptimizerConfig) -> ReferenceOptimizer:
    """The reference version of the optimizer in ``config``."""
    kind = config.WhichOneof("type")
    if kind not in OPTIMIZERS:
        raise ConfigError(f"optimizer must be one of {', '.join(sorted(OPTIMIZERS))}, got {kind!r}")
    return OPTIMIZERS[kind](getattr(config, kind))
