"""How far whole exchanges end from the exact ones, by site: an observer that repeats them with and without codes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives.traffic import compressed_sent_bytes, stock_sent_bytes
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.errors import is_sampling
from lightning_taco.dtensor.exact import exact_exchange, exact_sum, share_of_sum
from lightning_taco.dtensor.exchange import REDUCING_KINDS, Exchange, SiteKey
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site
from lightning_taco.dtensor.sums import SumsBySite
from lightning_taco.metrics.energy import energy, ratio

NUM_SUMS = 4


@dataclass(frozen=True)
class ExchangeError:
    """What was seen at one site, over all ranks of the group and since the last reset.

    Attributes:
        saved_bytes: bytes that all ranks of the group together did not have to send.
        relative_l2_error: of what comes out of the exchange, in the model's dtype, against the exact one in fp32; 0
            when both are 0, infinite beside a NaN or an Inf, ``None`` where it was not this site's turn.
        cancellation: ``sum_i ||x_i||^2 / ||sum_i x_i||^2`` over ranks i, infinite beside a NaN or an Inf; ``None`` for
            exchanges that add nothing, and where it was not this site's turn.
    """

    saved_bytes: int
    relative_l2_error: float | None = None
    cancellation: float | None = None


class ExchangeErrors:
    """Repeats exchanges in the steps whose reconstruction errors are sampled, and adds up energies by site.

    All ranks of the session's group see the same exchanges in the same order, so it may exchange too. What training
    gets is untouched, traffic counters too.

    Args:
        session: whose exchanges they are.
        num_sites: at how many sites exchanges are repeated in one sample. Sites take turns, in the order in which the
            exchanges were first seen. ``None`` for all in each sample.

    Cost, at a site whose turn it is: the exchange once more, compressed, and once as it is, in fp32 where it adds; four
    passes; the memory of four copies of the tensor in fp32. Elsewhere a count. Nothing waits for the device.
    """

    def __init__(self, session: CompressionSession, num_sites: int | None) -> None:
        self._session = session
        self._num_sites = num_sites
        self._places: dict[SiteKey, int] = {}
        self._first = 0
        """Place of the first site whose turn it is."""
        self._num_known = 0
        """Sites known when it was chosen; 0 in the first sample."""
        self._device = torch.device("cpu")
        self._saved_bytes: dict[SiteKey, int] = {}
        self._sums = SumsBySite()

    def __call__(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Observe one exchange."""
        if not is_sampling(self._session):
            return
        key = SiteKey.of(exchange, site)
        self._device = exchange.tensor.device
        saved = self._saved_bytes.get(key, 0)
        self._saved_bytes[key] = saved + _saved_bytes(exchange, codec, self._session.world_size)
        if exchange.tensor.numel() == 0 or not self._is_turn_of(key):
            return
        self._sums.add(key, exchange, lambda measured: self._measure(measured, site, codec))

    def read(self) -> dict[SiteKey, ExchangeError]:
        """What was seen, the same on every rank, and on to the next sites; all ranks call it. Waits for the device."""
        if not self._saved_bytes:
            return {}
        nothing = torch.zeros(NUM_SUMS, dtype=torch.float64, device=self._device)
        table = torch.stack([self._sums.get(key, nothing) for key in self._saved_bytes])
        saved = torch.tensor(list(self._saved_bytes.values()), dtype=torch.float64).to(self._device)
        table = torch.cat([saved[:, None], table], dim=1)
        dist.all_reduce(table, group=self._session.group)
        self._turn()
        return {
            key: _exchange_error(key, row, is_measured=key in self._sums)
            for key, row in zip(self._saved_bytes, table.tolist(), strict=True)
        }

    def clear(self) -> None:
        """Start from zero, with the same sites."""
        self._saved_bytes.clear()
        self._sums.clear()

    def _turn(self) -> None:
        if self._num_sites is not None and self._places:
            self._first = (self._first + self._num_sites) % len(self._places)
            self._num_known = len(self._places)

    def _is_turn_of(self, key: SiteKey) -> bool:
        if self._num_sites is None:
            return True
        place = self._places.setdefault(key, len(self._places))
        # A function of the order of exchanges, so the same on all ranks.
        if self._num_known:
            place = (place - self._first) % self._num_known
        return place < self._num_sites

    def _measure(self, exchange: Exchange, site: Site, codec: CodecConfig) -> Tensor:
        """float64 ``[NUM_SUMS]``: energies of the result's error, of the exact result, of the parts, of their sum."""
        session = self._session
        exact, total_energy = self._exact(exchange)
        result = exchange.run(codec, session.group, session.seed(exchange.kind, site)).float()
        return torch.stack([energy(result - exact), energy(exact), energy(exchange.tensor), total_energy])

    def _exact(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """What the exact exchange gives this rank, fp32, and its part of the energy of the sum over ranks."""
        group = self._session.group
        if exchange.kind not in REDUCING_KINDS:
            exact = exact_exchange(exchange, group).float()
            return exact, torch.zeros((), dtype=torch.float64, device=exact.device)
        total = exact_sum(exchange.tensor.float(), group)
        # Every rank holds all of the sum, and the ranks' energies are added up in the end.
        return share_of_sum(exchange, total, group), energy(total) / group.size()


def _saved_bytes(exchange: Exchange, codec: CodecConfig, world_size: int) -> int:
    tensor = exchange.tensor
    stock = stock_sent_bytes(exchange.kind, tensor.numel() * tensor.element_size(), world_size)
    return stock - compressed_sent_bytes(exchange.kind, tensor.numel(), world_size, codec)


def _exchange_error(key: SiteKey, row: list[float], *, is_measured: bool) -> ExchangeError:
    saved_bytes, error_energy, result_energy, part_energy, total_energy = row
    if not is_measured:
        return ExchangeError(int(saved_bytes))
    # A NaN or an Inf on any rank has made its sum one on all ranks.
    is_finite = math.isfinite(error_energy) and math.isfinite(result_energy)
    relative = math.sqrt(ratio(error_energy, result_energy)) if is_finite else math.inf
    cancellation = None
    if key.kind in REDUCING_KINDS:
        is_finite = math.isfinite(part_energy) and math.isfinite(total_energy)
        cancellation = ratio(part_energy, total_energy) if is_finite else math.inf
    return ExchangeError(int(saved_bytes), relative, cancellation)
