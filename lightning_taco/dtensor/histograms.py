"""How the values of messages are distributed before and after the rotation, by site: an observer that counts."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from lightning_taco.codec.reference import hadamard_transform_reference
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.errors import is_sampling
from lightning_taco.dtensor.exchange import Exchange, SiteKey
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site
from lightning_taco.dtensor.sums import SumsBySite

BINS_PER_OCTAVE = 16  # an edge is 4.4% above the one below
LOWEST_OCTAVE, HIGHEST_OCTAVE = -12, 12
MAX_BLOCKS = 512  # of a message that are looked at


@dataclass(frozen=True)
class Histogram:
    """Counts of values in units of the root mean square of their message.

    Attributes:
        edges: ascending; bin i holds what is above edge i, up to edge i + 1.
        counts: one less than edges.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def num_values(self) -> float:
        """Values counted."""
        return sum(self.counts)

    def magnitude_quantile(self, share: float) -> float:
        """The magnitude that a `share` of the values stays within, up to the width of a bin (4.4%); 0 without values.

        Args:
            share: from 0 to 1; 1 is the largest magnitude.
        """
        half = len(self.counts) // 2
        magnitudes = [self.counts[half]]
        magnitudes += [self.counts[half + place] + self.counts[half - place] for place in range(1, half + 1)]
        totals = list(accumulate(magnitudes))
        if totals[-1] == 0:
            return 0.0
        place = bisect_left(totals, share * totals[-1])
        # The middle bin is what counts as zero.
        return 0.0 if place == 0 else self.edges[half + 1 + place]


@dataclass(frozen=True)
class RotationHistograms:
    """Histograms of the messages of one site, over all ranks of the group.

    Attributes:
        before: of the values as they are.
        after: of the values as they are quantised: each block rotated; ``None`` where the codec does not rotate.
    """

    before: Histogram
    after: Histogram | None


class HistogramSampler:
    """Counts values in the steps whose reconstruction errors are sampled.

    Until `keep` is called, at all sites; then at those that it names. Of a message at most 512 blocks are counted,
    evenly spread; messages shorter than a block, NaN and Inf are left out.

    Args:
        session: whose exchanges they are.

    Cost of a message: about 40 small launches on CUDA. Nothing waits for the device.
    """

    def __init__(self, session: CompressionSession) -> None:
        self._session = session
        self._kept: frozenset[SiteKey] | None = None
        self._counts = SumsBySite()
        self._is_rotated: dict[SiteKey, bool] = {}

    def __call__(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Observe one exchange."""
        if not is_sampling(self._session):
            return
        key = SiteKey.of(exchange, site)
        if exchange.tensor.numel() < codec.block_size or not (self._kept is None or key in self._kept):
            return
        self._counts.add(key, exchange, lambda counted: _counts(counted.tensor, codec))
        self._is_rotated[key] = codec.rotation

    def read(self, keys: list[SiteKey]) -> dict[SiteKey, RotationHistograms]:
        """The histograms of those of `keys` that were seen, the same on every rank; all ranks call it, with the same.

        Waits for the device.
        """
        found = self._counts.over(self._session.group, [key for key in keys if key in self._counts])
        edges = _edges()
        histograms = {}
        for key, (before, after) in found.items():
            rotated = Histogram(edges, tuple(after)) if self._is_rotated[key] else None
            histograms[key] = RotationHistograms(Histogram(edges, tuple(before)), rotated)
        return histograms

    def keep(self, keys: list[SiteKey]) -> None:
        """Count only at `keys` from now on."""
        self._kept = frozenset(keys)

    def clear(self) -> None:
        """Start from zero."""
        self._counts.clear()
        self._is_rotated.clear()


@lru_cache(maxsize=1)
def _edges() -> tuple[float, ...]:
    """Symmetric, logarithmic on each side; below the lowest magnitude counts as zero."""
    octaves = range(LOWEST_OCTAVE * BINS_PER_OCTAVE, HIGHEST_OCTAVE * BINS_PER_OCTAVE + 1)
    positive = [2.0 ** (step / BINS_PER_OCTAVE) for step in octaves]
    return (*(-edge for edge in reversed(positive)), *positive)


@lru_cache(maxsize=8)
def _edges_on(device: torch.device) -> Tensor:
    return torch.tensor(_edges(), device=device)


def _counts(tensor: Tensor, codec: CodecConfig) -> Tensor:
    """float64 ``[2, bins]``: of the blocks as they are, and rotated."""
    blocks = _sampled_blocks(tensor.reshape(-1), codec.block_size)
    finite = torch.isfinite(blocks)
    blocks = torch.where(finite, blocks, 0.0)
    peak = blocks.abs().amax()
    blocks = blocks / torch.where(peak > 0, peak, 1.0)  # squares of 1e30 would overflow
    rms = blocks.square().mean().sqrt()
    blocks = blocks / torch.where(rms > 0, rms, 1.0)
    rotated = hadamard_transform_reference(blocks * codec.block_size**-0.5) if codec.rotation else blocks
    # A NaN spoils all of its block on the wire.
    whole = finite.all(dim=1, keepdim=True).expand_as(finite)
    return torch.stack([_histogram(blocks, finite), _histogram(rotated, whole)])


def _sampled_blocks(values: Tensor, block_size: int) -> Tensor:
    """fp32 ``[blocks, block_size]``: at most `MAX_BLOCKS` whole ones, evenly spread."""
    num_blocks = values.numel() // block_size
    stride = math.ceil(num_blocks / MAX_BLOCKS)
    return values[: num_blocks * block_size].view(num_blocks, block_size)[::stride].float()


def _histogram(values: Tensor, is_counted: Tensor) -> Tensor:
    edges = _edges_on(values.device)
    places = torch.bucketize(values.flatten(), edges) - 1
    counts = torch.zeros(edges.numel() - 1, dtype=torch.float64, device=values.device)
    return counts.index_add_(0, places.clamp_(0, counts.numel() - 1), is_counted.flatten().double())
