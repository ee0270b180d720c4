"""QuanGrad: the gradient of one parameter in 8-bit blocks, between micro-batches and until the optimizer takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_taco.codec import MessageLayout, accumulate, decode, encode
from lightning_taco.config import CodecConfig
from lightning_taco.data_parallel.seeds import derived_seed

ATTRIBUTE = "_lightning_taco_gradient"


class QuantizedGradient:
    """What a parameter's ``.grad`` would hold, quantised.

    Args:
        parameter: whose gradient; of a DTensor, this rank's part.
        codec: how.
        seed: of stochastic rounding.

    Attributes:
        num_added: micro-batches that it holds; 0 for no gradient.
        num_roundings: how often it has been rounded; part of the seed.
    """

    def __init__(self, parameter: Tensor, codec: CodecConfig, seed: int) -> None:
        self.num_added = 0
        self._parameter, self._codec, self._seed = parameter, codec, seed
        self.num_roundings = 0
        self._message: Tensor | None = None
        self._changes: list[tuple[str, Any]] = []

    @property
    def num_values(self) -> int:
        """Values of this rank's part."""
        return local_part(self._parameter).numel()

    @property
    def message_bytes(self) -> int:
        """Memory that it takes once it holds something."""
        return MessageLayout.of(self.num_values, self._codec).message_bytes

    def add(self, gradient: Tensor) -> None:
        """Add this rank's part of the gradient of one micro-batch."""
        values = gradient.reshape(-1)
        self.num_roundings += 1
        seed = derived_seed(self._seed, self.num_roundings)
        if self.num_added == 0:
            self._message = encode(values.view(1, -1), self._codec, seed=seed, out=self._message)
        else:
            assert self._message is not None
            accumulate(self._message, values, self._codec, seed=seed)
        self.num_added += 1

    def replace(self, values: Tensor, *, seed: int) -> None:
        """Hold `values` in place of what it holds; with the same seed on all ranks, with the same bits."""
        self._message = encode(values.reshape(1, -1), self._codec, seed=seed, out=self._message)
        self.num_added = max(1, self.num_added)

    def read(self) -> Tensor:
        """The gradient, in the dtype of the parameter and the shape of this rank's part; a new tensor."""
        part = local_part(self._parameter)
        if self.num_added == 0:
            return torch.zeros_like(part)
        assert self._message is not None
        values = decode(self._message, self._codec, part.numel(), part.dtype).view(part.shape)
        for name, argument in self._changes:
            if name == "scale":
                values.mul_(argument.to(values.device))
            else:
                values.clamp_(-argument, argument)
        return values

    def scale(self, factor: Tensor) -> None:
        """Multiply by the scalar `factor` from now on, until it is cleared."""
        self._changes.append(("scale", factor))

    def limit(self, largest: float) -> None:
        """Limit each value to [-largest, largest] from now on, until it is cleared."""
        self._changes.append(("limit", largest))

    def clear(self) -> None:
        """Hold no gradient; the memory is kept for the next one."""
        self.num_added = 0
        self._changes.clear()

    def hand_over(self) -> None:
        """Put the gradient into ``parameter.grad``, and hold none."""
        if self.num_added:
            self._parameter.grad = like_parameter(self._parameter, self.read())
        self.clear()


def quantized_gradient(parameter: Tensor) -> QuantizedGradient | None:
    """The quantised gradient that belongs to `parameter`, if there is one."""
    return getattr(parameter, ATTRIBUTE, None)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like_parameter(parameter: Tensor, part: Tensor) -> Tensor:
    """A gradient laid out like `parameter`, of which this rank holds `part`."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
