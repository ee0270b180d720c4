"""How far what the next stage decodes lies from what was sent, by site."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_taco.metrics.energy import energy
from lightning_taco.pipeline_parallel.wire import TransferCodec


class TransferErrors:
    """Decodes observed messages once more and adds up squared errors and squared norms by site.

    Cost of an observed message: a decode and three reductions over the tensor; nothing is read back until `read`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def observe(self, site: str, tensor: Tensor, message: Tensor, codec: TransferCodec) -> None:
        """Compare `tensor` with what its `message` decodes to."""
        exact = tensor.float()
        decoded = codec.decode(message, tensor.shape, tensor.dtype).float()
        finite = torch.isfinite(decoded) & torch.isfinite(exact)
        error, known = torch.where(finite, decoded - exact, 0.0), torch.where(finite, exact, 0.0)
        num_nonfinite = exact.numel() - torch.isfinite(exact).sum().double()
        sums = torch.stack([energy(error), energy(known), num_nonfinite])
        self._sums[site] = self._sums[site] + sums if site in self._sums else sums

    def read(self) -> dict[str, float]:
        """``||x' - x|| / ||x||`` by site; 0 when both are 0, infinite beside a NaN or an Inf. Waits for the device."""
        if not self._sums:
            return {}
        rows = torch.stack(list(self._sums.values())).tolist()
        return {site: _relative(*row) for site, row in zip(self._sums, rows, strict=True)}


def _relative(squared_error: float, squared_norm: float, num_nonfinite: float) -> float:
    if num_nonfinite:
        return math.inf
    return math.sqrt(squared_error / squared_norm) if squared_norm > 0 else 0.0
