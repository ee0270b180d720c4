"""What a bench times: tensor-parallel exchanges by the codecs that were asked for, data-parallel ones by SDP4Bit's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.collectives.algorithms import DATA_PARALLEL_KINDS, MeasuredKind
from lightning_taco.collectives.calibration import Call, Contest, Name, RankGroup, contest, measuring_dtype
from lightning_taco.config import BITS_PER_CODE, CodecConfig
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.nodes import NodeGroups, make_node_groups
from lightning_taco.data_parallel.settings import DataParallelConfig, weight_differences
from lightning_taco.data_parallel.traffic import DataParallelTraffic
from lightning_taco.data_parallel.weights import exchange_differences

LAST_STEP = 1e-3
"""By how much the weights that are gathered differ from the copy of them, in their own spread."""


@dataclass(frozen=True)
class Exchanges:
    """All exchanges of one bench, over the same ranks.

    Args:
        ranks: who measures.
        codecs: of tensor-parallel exchanges, with their element resolved.
        gradients: by codec in words.
    """

    ranks: RankGroup
    codecs: Sequence[CodecConfig]
    gradients: dict[str, GradientExchange]

    @classmethod
    def over(cls, ranks: RankGroup, codecs: Sequence[CodecConfig], kinds: Sequence[MeasuredKind]) -> Exchanges:
        """Those of `kinds`; all ranks call it. Makes the groups of two levels where there are two."""
        return cls(ranks, codecs, _gradient_exchanges(ranks) if "gradient_reduce_scatter" in kinds else {})

    @property
    def codecs_by_name(self) -> dict[str, CodecConfig]:
        """Codecs in words to codecs; an exchange in two levels, which has two, is not among them."""
        known = [*self.codecs, *(each.first_codec for each in self.gradients.values() if not each.has_two_levels)]
        return {str(codec): codec for codec in (*known, weight_differences())}

    def contest(self, kind: MeasuredKind, size: int) -> Contest:
        """The exchanges of one kind, of about so many bytes."""
        if kind not in DATA_PARALLEL_KINDS:
            return contest(kind, size, self.ranks, self.codecs)
        rows = _example_rows(self.ranks, size)
        return self._of_gradients(rows) if kind == "gradient_reduce_scatter" else self._of_weights(rows)

    def _of_gradients(self, rows: Tensor) -> Contest:
        """Sums of `rows` ``[P, N]``, a row for each rank."""
        out, stock_out = rows.new_empty(rows.shape[1]), rows.new_empty(rows.shape[1])
        group = self.ranks.group

        def stock() -> Tensor:
            _compat.reduce_scatter_single(stock_out, rows.view(-1), group=group)
            return stock_out

        def by(exchange: GradientExchange) -> Call:
            return lambda: exchange.reduce_scatter(rows, out)

        ours: dict[Name, Call] = {(name, "all_to_all"): by(exchange) for name, exchange in self.gradients.items()}
        bits = {name: BITS_PER_CODE[exchange.last_codec.element] for name, exchange in self.gradients.items()}
        return Contest("gradient_reduce_scatter", _num_bytes(rows), stock, ours, bits)

    def _of_weights(self, rows: Tensor) -> Contest:
        """This rank's of `rows` ``[P, N]``, gathered by all; each has a copy of what they were a step ago."""
        group, codec = self.ranks.group, weight_differences()
        shard, gathered = rows[group.rank()].clone(), torch.empty_like(rows)
        _compat.all_gather_single(gathered.view(-1), shard, group=group)
        copy, out = gathered * (1 + LAST_STEP), torch.empty_like(rows)

        def stock() -> Tensor:
            _compat.all_gather_single(gathered.view(-1), shard, group=group)
            return gathered

        def ours() -> Tensor:
            difference = shard.float().sub_(copy[group.rank()]).view(1, -1)
            exchange_differences(difference, copy, codec, group, seed=0)
            return out.copy_(copy)

        bits = {str(codec): BITS_PER_CODE[codec.element]}
        return Contest("weight_all_gather", _num_bytes(rows), stock, {(str(codec), "all_gather"): ours}, bits)


def _gradient_exchanges(ranks: RankGroup) -> dict[str, GradientExchange]:
    """In one level with either codec of SDP4Bit, and in two where ranks are on several nodes."""
    config, group = DataParallelConfig(), ranks.group
    inside, between = config.gradients_inside_node, config.gradients_between_nodes
    one_level = NodeGroups(whole=group, inside=None, between=None, node_size=group.size())
    found = {str(codec): GradientExchange(one_level, codec, None, DataParallelTraffic()) for codec in (inside, between)}
    two_levels = GradientExchange(make_node_groups(group), inside, between, DataParallelTraffic())
    if two_levels.has_two_levels:
        found[f"{inside} inside nodes, {between} between"] = two_levels
    return found


def _example_rows(ranks: RankGroup, size: int) -> Tensor:
    """Normal values ``[P, N]`` of about `size` bytes, others on each rank."""
    num_ranks, dtype = ranks.group.size(), measuring_dtype(ranks.device)
    num_values = max(1, -(-size // (num_ranks * dtype.itemsize)))
    generator = torch.Generator(ranks.device).manual_seed(ranks.group.rank())  # leaves the run's own alone
    return torch.randn(num_ranks, num_values, device=ranks.device, generator=generator).to(dtype)


def _num_bytes(rows: Tensor) -> int:
    return rows.numel() * rows.element_size()
