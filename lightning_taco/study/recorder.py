"""Measures every candidate on the messages of a running session, and keeps only sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.exact import exact_exchange, exact_sum, share_of_sum
from lightning_taco.dtensor.exchange import REDUCING_KINDS, Exchange, SiteKey
from lightning_taco.dtensor.sites import Site
from lightning_taco.dtensor.sums import SumsBySite
from lightning_taco.metrics.energy import energy
from lightning_taco.study import figures
from lightning_taco.study.candidates import Candidate
from lightning_taco.study.figures import CodecSums, Message, MessageSums

NUM_COLUMNS = max(len(MessageSums._fields), len(CodecSums._fields))


@dataclass(frozen=True)
class SiteSums:
    """What was measured of one kind of exchange of one module in one direction, over all ranks of the group.

    Attributes:
        key: site, direction and kind.
        shape: of one rank's part, at the first message.
        dtype: of it.
        num_seen: messages that one rank sent while the recorder watched, those beyond the cap included.
        messages: sums of the messages; `num_finite` and `num_nonfinite` count each exchange once.
        codecs: sums of each candidate, in their order.
    """

    key: SiteKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_seen: int
    messages: MessageSums
    codecs: tuple[CodecSums, ...]


@dataclass
class _Record:
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_seen: int = 0


class MessageRecorder:
    """An observer for `CompressionSession` that measures `candidates` on each message.

    All ranks of `group` see the same exchanges in the same order, so it may exchange too. It changes nothing: the
    training goes on with the same bits.

    Args:
        candidates: what to measure.
        group: the session's.
        max_messages: of each site, direction and kind; what comes later is only counted.
        on_progress: called before each candidate is measured on a message, with the site and the candidate's place.

    Cost of a message: for each candidate two encodes, two decodes and an exchange, and about ten passes over the
    values; the memory of the exact result and of four to eight copies of the message in fp32. Nothing waits for the
    device.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        group: dist.ProcessGroup,
        max_messages: int,
        on_progress: Callable[[SiteKey, int], None] | None = None,
    ) -> None:
        self.candidates = tuple(candidates)
        self.group = group
        self.max_messages = max_messages
        self.num_messages = 0
        self._on_progress = on_progress
        self._records: dict[SiteKey, _Record] = {}
        self._sums = SumsBySite()
        """float64 ``[1 + candidates, NUM_COLUMNS]`` each: `MessageSums`, then `CodecSums`, filled up with zeros."""

    def __call__(self, exchange: Exchange, site: Site, codec: CodecConfig) -> None:
        """Observe one exchange."""
        tensor = exchange.tensor
        if tensor.numel() == 0:
            return
        key = SiteKey.of(exchange, site)
        record = self._records.setdefault(key, _Record(tuple(tensor.shape), tensor.dtype))
        record.num_seen += 1
        if record.num_seen > self.max_messages:
            return
        self.num_messages += 1
        self._sums.add(key, exchange, lambda measured: self._measure(key, measured))

    def read(self) -> list[SiteSums]:
        """What was measured, the same on every rank; all ranks of the group call it. Waits for the device."""
        return [self._site_sums(key, self._records[key], rows) for key, rows in self._sums.over(self.group).items()]

    def _site_sums(self, key: SiteKey, record: _Record, rows: list[list[float]]) -> SiteSums:
        num_ranks = self.group.size()
        messages = MessageSums(*rows[0][: len(MessageSums._fields)])
        messages = messages._replace(
            num_finite=messages.num_finite / num_ranks, num_nonfinite=messages.num_nonfinite / num_ranks
        )
        codecs = tuple(CodecSums(*row[: len(CodecSums._fields)]) for row in rows[1:])
        return SiteSums(key, record.shape, record.dtype, record.num_seen, messages, codecs)

    def _measure(self, key: SiteKey, exchange: Exchange) -> Tensor:
        """``[1 + candidates, NUM_COLUMNS]`` of one exchange, in fp32."""
        exchange = replace(exchange, tensor=exchange.tensor.float())
        message = Message.of(exchange.tensor)
        exact, reduced_energy = self._exact(exchange)
        is_finite = self._is_finite_everywhere(exchange.tensor, exact)
        own = figures.message_sums(message, exact, reduced_energy)
        # Not a product with 0 or 1, since NaN times 0 is NaN.
        rows = [torch.where(is_finite, own, figures.nonfinite_sums(own.device))]
        seed = self.num_messages
        for place, candidate in enumerate(self.candidates):
            if self._on_progress is not None:
                self._on_progress(key, place)
            decoded, num_bits = candidate.quantize(exchange.tensor, seed)
            result = candidate.exchange(exchange, self.group, seed, decoded)
            sums = figures.codec_sums(message, decoded, num_bits, result, exact)
            rows.append(torch.where(is_finite, sums, 0.0))
        return torch.stack([F.pad(row, (0, NUM_COLUMNS - row.numel())) for row in rows])

    def _exact(self, exchange: Exchange) -> tuple[Tensor, Tensor | float]:
        """What the exact exchange gives this rank, and its part of the energy of the sum over ranks."""
        if exchange.kind not in REDUCING_KINDS:
            return exact_exchange(exchange, self.group), 0.0
        total = exact_sum(exchange.tensor, self.group)
        # Every rank holds all of the sum, and the ranks' energies are added up in the end.
        reduced_energy = energy(total) / self.group.size()
        return share_of_sum(exchange, total, self.group), reduced_energy

    def _is_finite_everywhere(self, tensor: Tensor, result: Tensor) -> Tensor:
        """bool, 0-dim, the same on all ranks: whether what is sent, and what comes out of it exactly, is finite."""
        num_finite_ranks = (torch.isfinite(tensor).all() & torch.isfinite(result).all()).float()
        dist.all_reduce(num_finite_ranks, group=self.group)
        return num_finite_ranks == self.group.size()
