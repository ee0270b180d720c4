"""How far each site's exchange ends from the exact one, and whether it met NaN or Inf: what a guard decides by."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.exact import exact_exchange
from lightning_taco.dtensor.exchange import REDUCING_KINDS, Exchange, SiteKey
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site
from lightning_taco.dtensor.sums import SumsBySite
from lightning_taco.metrics.energy import energy, ratio

NUM_GAUSSIAN_VALUES = 1 << 15


@dataclass(frozen=True)
class Sighting:
    """What was seen at one site in a step, in the worst replica of the model.

    Attributes:
        relative_l2_error: norm of the error over the norm of what is exact: of the sum over ranks for exchanges that
            add, so that ranks that cancel each other show; of the tensor that is sent for the others. 0 when both are
            0; infinite beside a NaN or an Inf.
        is_finite: whether there was no NaN and no Inf, in what was sent on any rank or in what came out of it.
    """

    relative_l2_error: float
    is_finite: bool


class SiteWatch:
    """Repeats exchanges with and without codes, while it is an observer of a session.

    All ranks of the session's group see the same exchanges in the same order, so it may exchange too. Training and
    traffic counters are untouched.

    Args:
        session: whose exchanges they are.
        trials: of the suspended sites, those to look at.

    Attributes:
        codecs: the codec of each site seen.

    Cost, per exchange that adds: the exchange once more, compressed, and an all-reduce of the tensor in fp32; for the
    others an encode and a decode. Three passes, and the memory of three copies of the tensor in fp32. Nothing waits for
    the device.
    """

    def __init__(self, session: CompressionSession, trials: Collection[SiteKey] = ()) -> None:
        self._session = session
        self._trials = frozenset(trials)
        self._sums = SumsBySite()
        self.codecs: dict[SiteKey, CodecConfig] = {}

    def open(self, *, is_sample: bool) -> None:
        """Look at the trials from now on and, if it `is_sample`, at everything that is compressed."""
        if is_sample:
            self._session.observers.append(self.observe)
        if self._trials:
            self._session.trial_observers.append(self._observe_trial)

    def close(self) -> None:
        """Look no longer."""
        for observers, own in (
            (self._session.observers, self.observe),
            (self._session.trial_observers, self._observe_trial),
        ):
            if own in observers:
                observers.remove(own)

    def _observe_trial(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        if SiteKey.of(exchange, site) in self._trials:
            self.observe(exchange, site, codec)

    def observe(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Observe one exchange."""
        if exchange.tensor.numel() == 0:
            return
        key, seed = SiteKey.of(exchange, site), self._session.seed(exchange.kind, site)
        self.codecs[key] = codec
        self._sums.add(key, exchange, lambda measured: self._measure(measured, codec, seed))

    def read(self) -> dict[SiteKey, Sighting]:
        """What was seen, the same on every rank; all ranks of all replicas call it. Waits for the device."""
        replicas = self._session.replicas
        sightings = [{key: _sighting(*row) for key, row in self._sums.over(self._session.group).items()}]
        if replicas is not None:
            gathered: list[Any] = [None] * replicas.size()
            dist.all_gather_object(gathered, (sightings[0], self.codecs), group=replicas)
            sightings = [seen for seen, _ in gathered]
            self.codecs = {key: codec for _, codecs in gathered for key, codec in codecs.items()}
        return _worst(sightings)

    def _measure(self, exchange: Exchange, codec: CodecConfig, seed: int) -> Tensor:
        """float64 ``[3]``: squared error, squared norm, values of the result that are not finite."""
        group, values = self._session.group, exchange.tensor.float()
        exchange = replace(exchange, tensor=values)
        if exchange.kind in REDUCING_KINDS:
            exact = exact_exchange(exchange, group)
            result = exchange.run(codec, group, seed)
        else:
            exact = values.reshape(1, -1)
            result = decode(encode(exact, codec, seed=seed), codec, exact.shape[1], torch.float32)
        num_nonfinite = result.numel() - torch.isfinite(result).sum()
        return torch.stack([energy(result - exact), energy(exact), num_nonfinite.double()])


def _sighting(error_energy: float, exact_energy: float, num_nonfinite: float) -> Sighting:
    is_finite = num_nonfinite == 0 and math.isfinite(error_energy) and math.isfinite(exact_energy)
    return Sighting(math.sqrt(ratio(error_energy, exact_energy)) if is_finite else math.inf, is_finite)


def _worst(replicas: list[dict[SiteKey, Sighting]]) -> dict[SiteKey, Sighting]:
    """Of each site the largest error, in an order that is the same everywhere."""
    worst: dict[SiteKey, Sighting] = {}
    for key in sorted({key for seen in replicas for key in seen}):
        seen_at = [seen[key] for seen in replicas if key in seen]
        worst[key] = Sighting(max(each.relative_l2_error for each in seen_at), all(each.is_finite for each in seen_at))
    return worst


@lru_cache(maxsize=64)
def gaussian_error(codec: CodecConfig) -> float:
    """The relative L2 error of one quantisation of Gaussian values, to two digits; its element is resolved.

    From 32768 quantiles in a fixed order, on the CPU: the same on all machines.

    >>> gaussian_error(CodecConfig(element="int8"))
    0.0065
    """
    places = torch.randperm(NUM_GAUSSIAN_VALUES, generator=torch.Generator().manual_seed(0))
    values = torch.special.ndtri((places.double() + 0.5) / NUM_GAUSSIAN_VALUES).float().view(1, -1)
    codec = replace(codec, reshape="natural")
    decoded = decode(encode(values, codec), codec, NUM_GAUSSIAN_VALUES, torch.float32)
    return float(f"{((decoded - values).norm() / values.norm()).item():.2g}")
