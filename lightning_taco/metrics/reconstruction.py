"""How far decoded values lie from the exact ones, and what they took, as torchmetrics `Metric` classes.

States are float64 sums, so batches, ranks and metrics add up to the figure of all their values together.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_taco.metrics.energy import energy


class SumMetric(Metric):
    """A metric of sums: float64, 0-dim, added up over updates and ranks."""

    full_state_update = False
    is_differentiable = False

    def add_sums(self, *names: str) -> None:
        """Add a state for each of `names`."""
        for name in names:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")


class RelativeL2Error(SumMetric):
    """``||decoded - exact|| / ||exact||`` over all values of all updates and ranks.

    0 when both norms are 0, and infinite when a value is NaN or Inf on either side: the error of the values that are
    left would make a diverged layer look healthy.

    Args:
        kwargs: as for any torchmetrics ``Metric``.

    Example:
        >>> metric = RelativeL2Error()
        >>> metric.update(decoded=torch.tensor([3.0, 4.5]), exact=torch.tensor([3.0, 4.0]))
        >>> round(metric.compute().item(), 6)
        0.1
    """

    higher_is_better = False
    squared_error: Tensor
    squared_norm: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("squared_error", "squared_norm")

    def update(self, decoded: Tensor, exact: Tensor) -> None:
        """Add values. Cost: three passes; nothing waits for the device.

        Args:
            decoded: floating point, any shape: what arrived.
            exact: of the same shape: what was sent.

        Raises:
            ValueError: for tensors of different shapes.
        """
        _require_same_shape("decoded", decoded, "exact", exact)
        decoded, exact = decoded.detach(), exact.detach()
        # Two infinities of one sign have no difference: a NaN, and so an infinite error.
        self.squared_error += energy(decoded.double() - exact.double())
        self.squared_norm += energy(exact)

    def compute(self) -> Tensor:
        """The error, float64, 0-dim."""
        relative = torch.sqrt(self.squared_error / self.squared_norm)
        relative = torch.where(self.squared_error == 0, 0.0, relative)
        is_finite = torch.isfinite(self.squared_error) & torch.isfinite(self.squared_norm)
        return torch.where(is_finite, relative, math.inf)


class SignalToQuantizationNoise(RelativeL2Error):
    """``-20 log10`` of `RelativeL2Error`: signal over quantisation noise, in dB.

    Infinite without an error (of zeros that arrive as zeros, too), minus infinity beside a NaN or an Inf.

    Args:
        kwargs: as for any torchmetrics ``Metric``.

    Example:
        >>> metric = SignalToQuantizationNoise()
        >>> metric.update(decoded=torch.tensor([3.0, 4.5]), exact=torch.tensor([3.0, 4.0]))
        >>> round(metric.compute().item(), 3)
        20.0
    """

    higher_is_better = True

    def compute(self) -> Tensor:
        """The ratio in dB, float64, 0-dim."""
        return -20 * super().compute().log10()


class ZeroedShare(SumMetric):
    """Of the values that are not zero, the share that arrives as zero.

    0 when all values are zero. A NaN or an Inf is not zero: in `exact` it counts among those that may be lost. Beside a
    NaN or an Inf in `decoded` or `exact` the share is infinite, as every figure of this package is: what is left of a
    diverged tensor says nothing.

    Args:
        kwargs: as for any torchmetrics ``Metric``.

    Example:
        >>> metric = ZeroedShare()
        >>> metric.update(decoded=torch.tensor([0.0, 0.0, 1.0]), exact=torch.tensor([0.0, 0.1, 1.0]))
        >>> metric.compute().item()
        0.5
    """

    higher_is_better = False
    num_zeroed: Tensor
    num_nonzero: Tensor
    num_nonfinite: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("num_zeroed", "num_nonzero", "num_nonfinite")

    def update(self, decoded: Tensor, exact: Tensor) -> None:
        """Add values. Cost: about five passes; nothing waits for the device.

        Args:
            decoded: any shape: what arrived.
            exact: of the same shape: what was sent.

        Raises:
            ValueError: for tensors of different shapes.
        """
        _require_same_shape("decoded", decoded, "exact", exact)
        self.num_zeroed += ((decoded == 0) & (exact != 0)).sum()
        self.num_nonzero += (exact != 0).sum()
        self.num_nonfinite += (~torch.isfinite(decoded) | ~torch.isfinite(exact)).sum()

    def compute(self) -> Tensor:
        """The share, float64, 0-dim."""
        share = torch.where(self.num_nonzero > 0, self.num_zeroed / self.num_nonzero, 0.0)
        return torch.where(self.num_nonfinite > 0, math.inf, share)


class BitsPerValue(SumMetric):
    """Bits that a value takes on the wire, scales and padding included. 0 before the first value.

    Args:
        kwargs: as for any torchmetrics ``Metric``.

    Example:
        >>> metric = BitsPerValue()
        >>> metric.update(message=torch.zeros(1, 132, dtype=torch.uint8), exact=torch.randn(128))
        >>> metric.compute().item()
        8.25
    """

    higher_is_better = False
    num_bits: Tensor
    num_values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums("num_bits", "num_values")

    def update(self, message: Tensor, exact: Tensor) -> None:
        """Add a message. Cost: nothing is read, only sizes count.

        Args:
            message: what is sent, such as ``codec.encode`` gives; any dtype and shape.
            exact: the values that it is made of, any shape.
        """
        self.num_bits += 8 * message.numel() * message.element_size()
        self.num_values += exact.numel()

    def compute(self) -> Tensor:
        """Bits a value, float64, 0-dim."""
        return torch.where(self.num_values > 0, self.num_bits / self.num_values, 0.0)


def _require_same_shape(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and {other_name} {tuple(other.shape)}; both must have the same "
            "shape, value for value."
        )
