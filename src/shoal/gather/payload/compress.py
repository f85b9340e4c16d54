"""The producer: compress a model's pseudo-gradient into a payload, with error feedback, and decompress it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shoal import _core
from shoal.errors import ConfigError
from shoal.gather.payload.codec import dequantize, pack12, quantize, unpack12
from shoal.gather.payload.spec import GradientSpec, ParamSpec
from shoal.gather.payload.validate import checked_param

_NEVER_OVERFLOWS = 1e30  # below half the distance of the largest float32 values, so adding it to one never overflows


def pseudo_gradient(before: Mapping[str, Tensor], model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters before the inner steps minus those after: what an outer SGD step of rate 1 subtracts."""
    return {name: before[name] - p.detach() for name, p in model.named_parameters() if name in before}


class Compressor:
    """Sends the quantized top-k of every chunk, and carries the rest over to the next window.

    ``c = g + decay * e`` is compressed and ``e = c - decompressed`` is kept, float32, one tensor per parameter; it
    includes the quantization error. Save ``state_dict`` with the model; call ``reset`` after a discarded round. Not
    thread-safe.
    """

    def __init__(self, spec: GradientSpec, *, error_feedback: bool = True, decay: float = 1.0) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"Compressor: decay must be in 0..1, got {decay}")
        self.spec = spec
        self.error_feedback = error_feedback
        self.decay = decay
        self.memory: dict[str, Tensor] = {}

    def compress(
        self, gradients: Mapping[str, Tensor], *, global_step: int = 0, window: int | None = None
    ) -> dict[str, Any]:
        """Return a payload of all parameters of the spec; ``gradients`` maps names to tensors of their shapes.

        Raises:
            ConfigError: a gradient is missing, has another shape or is not finite; the memory is unchanged.
        """
        state: dict[str, Any] = {}
        for param in self.spec.params:
            self._check_finite(param, _gradient(param, gradients))
        for param in self.spec.params:
            gradient = _gradient(param, gradients).to("cpu", torch.float32).contiguous()
            memory = None
            if self.error_feedback:
                memory = self.memory.setdefault(param.name, torch.zeros(param.shape, device="cpu"))
            self._compress_param(param, gradient, memory, state)
        payload: dict[str, Any] = {"state_dict": state, "global_step": int(global_step)}
        if window is not None:
            payload["metadata"] = {"window": int(window)}
        return payload

    def _check_finite(self, param: ParamSpec, gradient: Tensor) -> None:
        most = max(abs(float(each)) for each in torch.aminmax(gradient)) if gradient.numel() else 0.0
        memory = self.memory.get(param.name)
        if not most <= torch.finfo(torch.float32).max:
            what = "the gradient must be finite in float32, got NaN or infinity"
        elif most > _NEVER_OVERFLOWS and memory is not None and not _sum(gradient, self.decay, memory).isfinite().all():
            what = "the gradient and the carried-over error must have a finite sum, got infinity; call reset()"
        else:
            return
        raise ConfigError(f"compress: parameter {param.name!r}: {what}; nothing was compressed")

    def _compress_param(self, param: ParamSpec, gradient: Tensor, memory: Tensor | None, state: dict[str, Any]) -> None:
        indices = torch.empty(*param.grid, param.k, dtype=torch.int32, device="cpu")
        values = torch.empty(*param.grid, param.k, device="cpu")
        address = 0 if memory is None else memory.data_ptr()
        try:
            _core.gather_topk(
                gradient.data_ptr(), address, self.decay, *param.blocks, param.k, indices.data_ptr(), values.data_ptr()
            )
        except ValueError as error:
            raise ConfigError(f"compress: parameter {param.name!r}: {error}") from error
        sent = values
        if self.spec.quant is not None:
            q, quant_params = quantize(values, self.spec.quant.bins, self.spec.quant.range_sigmas)
            sent = dequantize(q, quant_params)
            state[param.name + "vals"], state[param.name + "quant_params"] = q, quant_params
        else:
            state[param.name + "vals"] = values
        state[param.name + "idxs"] = pack12(indices) if param.codec == "packed12" else indices
        if memory is not None:
            _core.gather_subtract_sent(
                memory.data_ptr(), *param.blocks, param.k, indices.data_ptr(), sent.contiguous().data_ptr()
            )

    def reset(self) -> None:
        """Drop the carried-over errors."""
        self.memory.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"spec_hash": self.spec.hash, "memory": {name: t.clone() for name, t in self.memory.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``; raises ConfigError and changes nothing if it is not of this spec."""
        if state["spec_hash"] != self.spec.hash:
            raise ConfigError(
                f"Compressor: the state must be of spec {self.spec.hash}, got one of spec {state['spec_hash']}"
            )
        shapes, memory = {param.name: param.shape for param in self.spec.params}, {}
        for name, kept in state["memory"].items():
            if tuple(kept.shape) != shapes.get(name):
                raise ConfigError(
                    f"Compressor: the memory of {name!r} must have shape {shapes.get(name)}, got {tuple(kept.shape)}"
                )
            memory[name] = kept.detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)
        self.memory = memory


def _gradient(param: ParamSpec, gradients: Mapping[str, Tensor]) -> Tensor:
    if param.name not in gradients:
        raise ConfigError(f"compress: gradients must have an entry for parameter {param.name!r}")
    gradient = gradients[param.name].detach()
    if hasattr(gradient, "full_tensor"):  # a DTensor
        gradient = gradient.full_tensor()
    if tuple(gradient.shape) != param.shape:
        raise ConfigError(
            f"compress: {param.name!r} must have the spec's shape {param.shape}, got {tuple(gradient.shape)}"
        )
    return gradient


def _sum(gradient: Tensor, decay: float, memory: Tensor) -> Tensor:
    return gradient.to("cpu", torch.float32) + decay * memory


def compress(
    gradients: Mapping[str, Tensor], spec: GradientSpec, *, global_step: int = 0, window: int | None = None
) -> dict[str, Any]:
    """Return one payload, without error feedback; for that, keep a :class:`Compressor`."""
    return Compressor(spec, error_feedback=False).compress(gradients, global_step=global_step, window=window)


def decompress(payload: Mapping[str, Any], spec: GradientSpec) -> dict[str, Tensor]:
    """Return the dense float32 tensors of one valid payload; zero where it sent nothing.

    Raises:
        PayloadRejected: a tensor is missing, or its shape or dtype is not that of the spec.
    """
    dense = {}
    for param in spec.params:
        idxs, vals, quant = checked_param(payload["state_dict"], param, spec)
        if quant is not None:
            vals = dequantize(vals, quant)
        indices = unpack12(idxs, (*param.grid, param.k)) if param.codec == "packed12" else idxs.long()
        values = vals.to(torch.float32).contiguous()
        out = torch.zeros(param.shape, device="cpu")
        _core.gather_scatter_chunks(out.data_ptr(), *param.blocks, param.k, indices.data_ptr(), values.data_ptr())
        dense[param.name] = out
    return dense
