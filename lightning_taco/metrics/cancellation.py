"""How much the parts of a sum cancel: what multiplies an error on the way through a reducing exchange."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_taco.metrics.energy import energy
from lightning_taco.metrics.reconstruction import SumMetric


class Cancellation(SumMetric):
    """``A = sum_i ||x_i||^2 / ||sum_i x_i||^2`` over the parts ``x_i`` of a sum.

    1 for parts that have nothing to do with each other, ``1 / num_parts`` for equal ones; above 1 they cancel, and a
    relative error e of the parts becomes ``e sqrt(A)`` in the sum. 0 when all parts are 0; infinite when parts that are
    not 0 add up to 0, and beside a NaN or an Inf.

    Over several sums, energies are added up before they are divided.

    Args:
        num_parts: of each sum: ranks of the group that adds them. Needed since each update brings the total once more.
        kwargs: as for any torchmetrics ``Metric``.

    Raises:
        ValueError: for `num_parts` below 1.

    Example: between ranks, each updates with its own part; in one process, one update a part.
        >>> metric = Cancellation(num_parts=2)
        >>> parts = torch.tensor([3.0, 0.0]), torch.tensor([-2.0, 0.0])
        >>> for part in parts:
        ...     metric.update(part, total=sum(parts))
        >>> metric.compute().item()
        13.0
    """

    higher_is_better = False
    part_energy: Tensor
    total_energy: Tensor

    def __init__(self, num_parts: int, **kwargs: Any) -> None:
        if isinstance(num_parts, bool) or not isinstance(num_parts, int) or num_parts < 1:
            raise ValueError(f"num_parts={num_parts!r} is not a number of parts; use the number of ranks that add.")
        super().__init__(**kwargs)
        self.num_parts = num_parts
        self.add_sums("part_energy", "total_energy")

    def update(self, part: Tensor, total: Tensor) -> None:
        """Add one part of a sum. Cost: a pass over each; nothing waits for the device.

        Args:
            part: floating point, any shape: what one rank adds.
            total: the exact sum of all parts, whole.

        Raises:
            ValueError: for tensors of different shapes.
        """
        if part.shape != total.shape:
            raise ValueError(
                f"part has shape {tuple(part.shape)} and total {tuple(total.shape)}; a part and the sum of all parts "
                "have the same shape."
            )
        self.part_energy += energy(part.detach())
        self.total_energy += energy(total.detach()) / self.num_parts

    def compute(self) -> Tensor:
        """A, float64, 0-dim."""
        share = torch.where(self.part_energy == 0, 0.0, self.part_energy / self.total_energy)
        is_finite = torch.isfinite(self.part_energy) & torch.isfinite(self.total_energy)
        return torch.where(is_finite, share, math.inf)
