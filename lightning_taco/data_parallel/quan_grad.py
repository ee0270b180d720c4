"""QuanGrad for a model: gradients go into 8-bit blocks as they are accumulated, and to the optimizer few at a time.

No full-precision copy of all gradients ever exists: autograd accumulates into ``.grad``, a hook adds that to the
quantised gradient and frees it; the optimizer's step is taken for a few parameters after the other, each of which has
its ``.grad`` for that long.

Source: AGoQ, arXiv 2605.00539, section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel.quantized_gradient import (
    ATTRIBUTE,
    QuantizedGradient,
    local_part,
    quantized_gradient,
)
from lightning_taco.data_parallel.seeds import derived_seed

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HAND_OVER_BYTES = 1 << 26
"""Gradients that exist at a time during an optimizer step; one parameter's may be more."""
ACCUMULATION = 4  # part of a seed


class QuantizedGradients:
    """The quantised gradients of `parameters`.

    Args:
        parameters: those that get a gradient; of FSDP2, the sharded ones.
        codec: how.
        seed: of stochastic rounding; another one on each data-parallel rank, the same on tensor-parallel ones.
    """

    def __init__(self, parameters: Iterable[Tensor], codec: CodecConfig, seed: int) -> None:
        self.parameters = [p for p in parameters if p.requires_grad and p.dtype in VALUE_DTYPES]
        self._undo: list[Callable[[], None]] = []
        for index, parameter in enumerate(self.parameters):
            gradient = QuantizedGradient(parameter, codec, derived_seed(seed, ACCUMULATION, index))
            setattr(parameter, ATTRIBUTE, gradient)
            handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(_take)
            self._undo += [handle.remove, partial(delattr, parameter, ATTRIBUTE)]

    @property
    def message_bytes(self) -> int:
        """Memory of all of them."""
        return sum(gradient.message_bytes for gradient in self._gradients())

    @property
    def num_calls(self) -> int:
        """Roundings of each so far, made the same for all; part of the seed."""
        gradients = self._gradients()
        self.num_calls = most = max((gradient.num_roundings for gradient in gradients), default=0)
        return most

    @num_calls.setter
    def num_calls(self, num_calls: int) -> None:
        for gradient in self._gradients():
            gradient.num_roundings = num_calls

    def _gradients(self) -> list[QuantizedGradient]:
        found = map(quantized_gradient, self.parameters)
        return [gradient for gradient in found if gradient is not None]

    def attach(self, optimizer: Optimizer) -> None:
        """Let `optimizer` take its gradients from here; what it does to each parameter stays its own."""
        step, zero_grad = optimizer.step, optimizer.zero_grad

        def step_in_turn(closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for _ in _handed_over(optimizer):
                step()
            return loss

        def zero_all(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            for parameter in _parameters_of(optimizer):
                if (gradient := quantized_gradient(parameter)) is not None:
                    gradient.clear()

        replaced = {"step": step_in_turn, "zero_grad": zero_all}
        before = {name: optimizer.__dict__.get(name) for name in replaced}
        optimizer.__dict__.update(replaced)

        def restore() -> None:
            for name, value in before.items():
                if value is None:
                    optimizer.__dict__.pop(name, None)
                else:
                    optimizer.__dict__[name] = value

        self._undo.append(restore)

    def detach(self) -> None:
        """Give parameters and optimizers back what they had; what gradients are held is lost."""
        while self._undo:
            self._undo.pop()()


def _take(parameter: Tensor) -> None:
    """Move ``parameter.grad`` into the quantised gradient."""
    gradient = quantized_gradient(parameter)
    assert gradient is not None
    if parameter.grad is None:
        return
    gradient.add(part_of_gradient(parameter))
    parameter.grad = None


def part_of_gradient(parameter: Tensor) -> Tensor:
    """This rank's part of ``parameter.grad``, laid out like the parameter; sums that are due are taken."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    assert gradient is not None
    part = local_part(gradient)
    return part.wait() if hasattr(part, "wait") else part


def _handed_over(optimizer: Optimizer) -> Iterator[None]:
    """Yields with few parameters, and their gradients, in the optimizer at a time; at last with those left over."""
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for number, parameters in enumerate(whole):
            for few in _in_turn(parameters):
                for index, group in enumerate(optimizer.param_groups):
                    group["params"] = few if index == number else []
                for parameter in few:
                    if (gradient := quantized_gradient(parameter)) is not None:
                        gradient.hand_over()
                yield
                for parameter in few:
                    if quantized_gradient(parameter) is not None:
                        parameter.grad = None
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _in_turn(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive parameters whose gradients together are no more than `HAND_OVER_BYTES`."""
    few: list[Tensor] = []
    num_bytes = 0
    for parameter in parameters:
        size = local_part(parameter).numel() * parameter.element_size()
        if few and num_bytes + size > HAND_OVER_BYTES:
            yield few
            few, num_bytes = [], 0
        few.append(parameter)
        num_bytes += size
    if few:
        yield few


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
