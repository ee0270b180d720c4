"""How far what is decoded lies from what was encoded, by site: an observer for `CompressionSession`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.exchange import Exchange, SiteKey
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site
from lightning_taco.dtensor.sums import SumsBySite
from lightning_taco.metrics.energy import decibels, energy

ErrorKey = SiteKey


@dataclass(frozen=True)
class SiteError:
    """What sampling saw at one site, over all ranks of the group and since the last reset.

    Attributes:
        relative_l2_error: ``||x' - x|| / ||x||``; 0 when both norms are 0, infinite beside a NaN or an Inf, since the
            error of the values that are left would make a diverged layer look healthy.
        num_nonfinite: NaN and Inf values among those that were to be sent.
        num_values: values looked at.
    """

    relative_l2_error: float
    num_nonfinite: int
    num_values: int

    @property
    def decibels(self) -> float:
        """``20 log10`` of the relative error; minus infinity for none."""
        return decibels(self.relative_l2_error)


class ReconstructionErrors:
    """Encodes and decodes each observed tensor once more and adds up squared errors and squared norms by site.

    Nothing is read back until `read`, so observing does not wait for the device.
    Cost per observed exchange: an encode, a decode, and three reductions over the tensor.
    """

    def __init__(self) -> None:
        self._sums = SumsBySite()

    def __call__(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Observe one exchange."""
        self._sums.add(SiteKey.of(exchange, site), exchange, lambda exact: _squared_sums(exact.tensor, codec))

    def read(self, group: dist.ProcessGroup) -> dict[ErrorKey, SiteError]:
        """Errors by site, the same on every rank; all ranks of `group` call it. Waits for the device."""
        return {key: _site_error(*row) for key, row in self._sums.over(group).items()}

    def clear(self) -> None:
        """Start from zero."""
        self._sums.clear()


def is_sampling(session: CompressionSession) -> bool:
    """Whether the reconstruction errors of the step that runs are measured. Cost: a look at each observer."""
    return any(isinstance(observer, ReconstructionErrors) for observer in session.observers)


def _squared_sums(tensor: Tensor, codec: CodecConfig) -> Tensor:
    """float64 ``[4]``: squared error, squared norm, non-finite values, values."""
    values = tensor.reshape(1, -1)
    decoded = decode(encode(values, codec), codec, values.shape[1], torch.float32)
    exact = values.float()
    finite = torch.isfinite(decoded)
    error = torch.where(finite, decoded - exact, 0.0)
    known = torch.where(finite, exact, 0.0)
    num_nonfinite = values.numel() - torch.isfinite(exact).sum()
    return torch.stack(
        [
            energy(error),
            energy(known),
            num_nonfinite.double(),
            torch.full_like(num_nonfinite, values.numel(), dtype=torch.float64),
        ]
    )


def _site_error(squared_error: float, squared_norm: float, num_nonfinite: float, num_values: float) -> SiteError:
    relative = math.sqrt(squared_error / squared_norm) if squared_norm > 0 else 0.0
    return SiteError(math.inf if num_nonfinite else relative, int(num_nonfinite), int(num_values))
