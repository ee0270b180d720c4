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

from lightning_taco.activations.storage import AutocastState

Operation = Callable[..., Tensor]


class FromInputs(torch.autograd.Function):
    """``operation(*inputs)``: backward runs it again on the inputs as they were stored, and differentiates that."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *inputs: Tensor | None) -> Tensor:
        """Run `operation`, a function of the tensors alone whose result is no view of them."""
        ctx.operation = operation
        ctx.autocast = _autocast_of(inputs)
        ctx.save_for_backward(*inputs)
        return operation(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `operation` at the stored inputs."""
        return None, *gradients_at(ctx.operation, ctx.saved_tensors, ctx.needs_input_grad[1:], gradient, ctx.autocast)


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
