"""The cosine between the gradients that a model has and those of the same batch, computed again without compression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_taco.collectives import timing
from lightning_taco.data_parallel.quantized_gradient import quantized_gradient
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.gradients import gradient_norm

RngStates = dict[str, Any]


def rng_states() -> RngStates:
    """The states of the random numbers of torch, CUDA, numpy and Python."""
    return _collect_rng_states()


def cosine_with_exact(
    module: nn.Module, closure: Callable[[], object], compression: Compression, rng: RngStates
) -> float:
    """Run `closure` without compression, compare its gradients with those that `module` has, and undo all it did.

    Gradients, buffers and random numbers are the same to the last bit afterwards.

    Args:
        module: whose gradients are compared. They must be those of the closure's batch alone, with compression.
        closure: a forward and a backward of that batch. All ranks call it.
        compression: what is off while it runs; nothing that the closure exchanges is counted.
        rng: from before the first forward, so that dropout draws the same masks.

    Returns:
        The cosine of all gradients taken as one vector: the unsharded model's, the same on all ranks. 1 when both are
        0, 0 when one is, NaN beside a NaN or an Inf.

    Raises:
        ValueError: for gradients that are kept quantised.

    Cost: a forward and a backward, the memory of a second set of gradients, and a wait for the device.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if any(quantized_gradient(parameter) is not None for parameter in parameters):
        raise ValueError(
            "Gradients that are kept quantised (data_parallel='quangrad') cannot be compared with those of a second "
            "backward, which would be added to them; turn the cosine off, or accumulation=None."
        )
    compressed = [parameter.grad for parameter in parameters]
    with ExitStack() as stack:
        stack.enter_context(timing.aside())
        stack.enter_context(_without(compression))
        stack.enter_context(_kept_gradients(parameters))
        stack.enter_context(_kept_buffers(module))
        stack.enter_context(_replayed(rng))
        with torch.enable_grad():
            closure()
        return _cosine(parameters, compressed)


@contextmanager
def _without(compression: Compression) -> Iterator[None]:
    """No session, no scope: everything goes as it is, in autograd's threads too, and no step is counted."""
    session, compression.session = compression.session, None
    try:
        yield
    finally:
        compression.session = session


@contextmanager
def _kept_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    kept = [parameter.grad for parameter in parameters]
    _set_gradients(parameters, [None] * len(parameters))
    try:
        yield
    finally:
        _set_gradients(parameters, kept)


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Running statistics and the like, which a forward in training mode changes."""
    buffers = list(module.buffers())
    kept = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, kept, strict=True):
                buffer.copy_(values)


@contextmanager
def _replayed(rng: RngStates) -> Iterator[None]:
    kept = rng_states()
    _set_rng_states(rng)
    try:
        yield
    finally:
        _set_rng_states(kept)


@torch.no_grad()
def _cosine(parameters: Sequence[Tensor], others: Sequence[Tensor | None]) -> float:
    """Of the parameters' gradients and `others`; leaves other gradients behind.

    From the norms of both and of their difference, which count a gradient once however it is placed. 1 minus a small
    angle's cosine keeps its digits in this form: ``1 - cos = (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|)``.
    """
    own = [parameter.grad for parameter in parameters]
    norm = gradient_norm(parameters).item()
    _set_gradients(parameters, [_difference(one, other) for one, other in zip(own, others, strict=True)])
    apart = gradient_norm(parameters).item()
    _set_gradients(parameters, others)
    other_norm = gradient_norm(parameters).item()
    if norm == 0 or other_norm == 0:
        return 1.0 if norm == other_norm else 0.0
    return 1 - (apart**2 - (norm - other_norm) ** 2) / (2 * norm * other_norm)


def _difference(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other  # of either sign: only its norm counts
    if not isinstance(one, DTensor) or not isinstance(other, DTensor) or one.placements != other.placements:
        return one - other
    # Local parts, since torch may sum the ranks' terms of a partial gradient before it subtracts.
    return DTensor.from_local(
        one.to_local() - other.to_local(),
        one.device_mesh,
        one.placements,
        run_check=False,
        shape=one.shape,
        stride=one.stride(),
    )


def _set_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
