"""RMSNorm and LayerNorm that keep their input: run again for whoever reads their output, and differentiated.

Both happen in one backward, first the former. What it has decoded, and the norm's statistics, serve the latter too,
which then neither decodes the input a second time nor runs the norm a third time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_taco.activations.functions import gradients_at
from lightning_taco.activations.storage import AutocastState, Quantized, Recomputed, Source
from lightning_taco.activations.store import ActivationStore


class Norm:
    """One call of a norm.

    Args:
        normalized_shape: the last dims.
        eps: beside the mean square or the variance.

    Attributes:
        statistics: of the stored input, once the norm has run again on it: fp32, one or two values a token.
    """

    def __init__(self, normalized_shape: Any, eps: float | None) -> None:
        self.normalized_shape = tuple(normalized_shape)
        self.eps: Any = eps  # which LayerNorm needs, and RMSNorm may choose by dtype
        self.statistics: tuple[Tensor, ...] | None = None

    def __call__(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The stock function."""
        raise NotImplementedError

    def is_whole(self, *tensors: Tensor | None) -> bool:
        """Whether one operation of torch's runs it on `tensors`, and another differentiates it by statistics."""
        given = [tensor for tensor in tensors if tensor is not None]
        return not torch.is_autocast_enabled(given[0].device.type) and all(
            type(tensor) in (Tensor, torch.nn.Parameter) and tensor.dtype == given[0].dtype for tensor in given
        )

    def run(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        """The output and the statistics."""
        raise NotImplementedError

    def differentiate(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor | None], mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of input, weight and bias by the statistics."""
        raise NotImplementedError


class RMSNorm(Norm):
    """``F.rms_norm``. On a CPU it is several operations."""

    def __call__(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """``F.rms_norm``."""
        return F.rms_norm(input, self.normalized_shape, weight, self.eps)

    def is_whole(self, *tensors: Tensor | None) -> bool:
        """On CUDA only."""
        return has_fused_rms_norm(tensors[0]) and super().is_whole(*tensors)

    def run(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        """What ``F.rms_norm`` runs."""
        return torch.ops.aten._fused_rms_norm(input, self.normalized_shape, weight, self.eps)

    def differentiate(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor | None], mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """As stock autograd does."""
        input, weight, _ = inputs
        found = torch.ops.aten._fused_rms_norm_backward(
            gradient, input, self.normalized_shape, *(self.statistics or ()), weight, mask[:2]
        )
        return *found, None


class LayerNorm(Norm):
    """``F.layer_norm``."""

    def __call__(self, input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """``F.layer_norm``."""
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    def run(self, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
        """What ``F.layer_norm`` runs."""
        return torch.ops.aten.native_layer_norm(input, self.normalized_shape, weight, bias, self.eps)

    def differentiate(
        self, gradient: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor | None], mask: list[bool]
    ) -> tuple[Tensor | None, ...]:
        """As stock autograd does."""
        input, weight, bias = inputs
        return torch.ops.aten.native_layer_norm_backward(
            gradient, input, self.normalized_shape, *(self.statistics or ()), weight, bias, mask
        )


class NormOfInput(torch.autograd.Function):
    """A norm of which only the inputs are kept."""

    @staticmethod
    def forward(ctx: Any, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm's output."""
        ctx.norm, ctx.autocast = norm, AutocastState.of(input.device)
        ctx.save_for_backward(input, weight, bias)
        return norm(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients at the stored input."""
        norm, inputs, needed = ctx.norm, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if norm.statistics is None or not norm.is_whole(*inputs, gradient) or ctx.autocast.is_enabled:
            return None, *gradients_at(norm, inputs, needed, gradient, ctx.autocast)
        mask = [tensor is not None and is_needed for tensor, is_needed in zip(inputs, needed, strict=True)]
        found = norm.differentiate(gradient.contiguous(), inputs, mask)
        norm.statistics = None
        return None, *(each if is_wanted else None for each, is_wanted in zip(found, mask, strict=True))


class NormOutput(Recomputed):
    """A norm's output from its stored input, which is held for the norm's own backward.

    Args:
        norm: that is run.
        parameters: its weight and bias, whole.
        source: of its input.
        store: that holds what has been decoded.
        device: of the input.
    """

    def __init__(
        self,
        norm: Norm,
        parameters: tuple[Tensor | None, Tensor | None],
        source: Source,
        store: ActivationStore,
        device: torch.device,
    ) -> None:
        super().__init__(lambda x: norm(x, *parameters), [source], device)
        self.norm, self.parameters, self.store = norm, parameters, store

    def value(self) -> Tensor:
        """The output; of several readers the first has it computed."""
        source = self.sources[0]
        if not isinstance(source, Quantized):
            return super().value()
        input = source.value()
        with torch.no_grad(), self.autocast.restored():
            if self.norm.is_whole(input, *self.parameters):
                output, *statistics = self.norm.run(input, *self.parameters)
                self.norm.statistics = tuple(statistics)
            else:
                output = self.norm(input, *self.parameters)
        self.store.hold(source, input)
        return output.contiguous()


def has_fused_rms_norm(tensor: Tensor | None) -> bool:
    """Whether torch has RMSNorm and its backward as one operation each where `tensor` lies."""
    return tensor is not None and tensor.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward")
