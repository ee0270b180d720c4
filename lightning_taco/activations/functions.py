"""Autograd functions that keep the inputs of an operation and run it again, instead of keeping what it computes.

What they keep goes through the saved-tensor hooks around them, which quantise it; forward values are those of the stock
operation, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_taco import _compat
from lightning_taco.activations.storage import AutocastState, Quantized, Recomputed, VersionWatch

Operation = Callable[..., Tensor]


class FromInputs(torch.autograd.Function):
    """``operation(*inputs)``: backward runs it again on the inputs as they were stored, and differentiates that.

    With a `derivative`, which takes the gradient and the input, it does not even run again.
    """

    @staticmethod
    def forward(ctx: Any, operation: Operation, derivative: Operation | None, *inputs: Tensor | None) -> Tensor:
        """Run `operation`, a function of the tensors alone whose result is no view of them."""
        ctx.operation, ctx.derivative = operation, derivative
        ctx.autocast = _autocast_of(inputs)
        ctx.save_for_backward(*inputs)
        return operation(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `operation` at the stored inputs."""
        inputs = ctx.saved_tensors
        if ctx.derivative is not None and type(gradient) is Tensor is type(inputs[0]):  # of DTensors all layouts work
            return None, None, ctx.derivative(gradient, *inputs)
        needed = ctx.needs_input_grad[2:]
        return None, None, *gradients_at(ctx.operation, inputs, needed, gradient, ctx.autocast)


class SiluTimes(torch.autograd.Function):
    """``silu(gate) * up``, of which only `gate` and `up` are kept.

    Stock autograd keeps `gate`, ``silu(gate)`` and `up`, and the layer behind it the product.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activated: Tensor) -> Tensor:
        """``activated * up``, with `activated` the ``silu(gate)`` that has been computed already."""
        ctx.autocast = _autocast_of((gate,))
        ctx.save_for_backward(gate, up)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `gate` and `up`."""
        needed = ctx.needs_input_grad[:2]
        return *gradients_at(silu_times, ctx.saved_tensors, needed, gradient, ctx.autocast), None


class SiluTimesOfMessages(torch.autograd.Function):
    """`SiluTimes` whose backward reads the messages themselves: one kernel, and nothing decoded in memory."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, activated: Tensor, gate_source: Quantized, up_source: Quantized
    ) -> Tensor:
        """``activated * up``; `gate_source` and `up_source` stand for `gate` and `up`. The latter may be pending."""
        from lightning_taco.activations import kernels

        ctx.watches = VersionWatch(gate, gate), VersionWatch(up, up)
        ctx.codec, ctx.shape = gate_source.codec, gate.shape
        ctx.save_for_backward(gate_source.message, up_source.message)
        if not up_source.is_pending:
            return activated * up
        up_source.is_pending = False
        return kernels.multiply_and_encode_triton(activated, up, ctx.codec, up_source.message, seed=up_source.seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `gate` and `up`."""
        from lightning_taco.activations import kernels

        for watch in ctx.watches:
            watch.check(ctx.shape)
        gate, up = ctx.saved_tensors
        of_gate, of_up = kernels.silu_times_backward_triton(gate, up, ctx.codec, gradient)
        return of_gate, of_up, None, None, None


class Product(Recomputed):
    """``silu(gate) * up`` from what stands for both: from their messages where a kernel can read them."""

    def value(self) -> Tensor:
        """The product."""
        gate, up = self.sources
        if not (isinstance(gate, Quantized) and isinstance(up, Quantized) and can_read_messages(gate.message)):
            return super().value()
        from lightning_taco.activations import kernels

        return kernels.silu_times_triton(gate.message, up.message, gate.codec, gate.shape, gate.dtype)


def can_read_messages(tensor: Tensor) -> bool:
    """Whether kernels read the messages of tensors that lie where `tensor` does."""
    return tensor.is_cuda and _compat.has_triton()


def silu_derivative(gradient: Tensor, input: Tensor) -> Tensor:
    """Of SiLU, as stock autograd computes it."""
    return torch.ops.aten.silu_backward(gradient, input)


def gelu_derivative(gradient: Tensor, input: Tensor, *, approximate: str) -> Tensor:
    """Of GELU, as stock autograd computes it."""
    return torch.ops.aten.gelu_backward(gradient, input, approximate=approximate)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """The gated unit of SwiGLU."""
    return F.silu(gate) * up


def gradients_at(
    operation: Operation,
    inputs: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
    gradient: Tensor,
    autocast: AutocastState,
) -> tuple[Tensor | None, ...]:
    """The gradients of `operation` with respect to those `inputs` that are `needed`; ``None`` for the others."""
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(is_needed)
        for tensor, is_needed in zip(inputs, needed, strict=True)
    ]
    with torch.enable_grad(), autocast.restored():
        output = operation(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, gradient))
    return tuple(next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves)


def _autocast_of(inputs: tuple[Tensor | None, ...]) -> AutocastState:
    return AutocastState.of(next(tensor.device for tensor in inputs if tensor is not None))
