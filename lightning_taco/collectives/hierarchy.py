"""Exchanges of a group that spans hosts, in two steps: in full precision within each host, compressed between hosts.

A link within a host (NVLink) is often ten times faster than one between hosts, and a flat exchange pays for it: its
all-to-all sends a message from each rank of a host to each rank of the others, where a sum needs one for each host.
With H hosts of L ranks each, whose ranks have the same place on their hosts l = 0 ... L - 1:

1. all-reduce: within a host, rank l adds up the l-th part of all ranks there, in fp32 and rank order; the ranks of
   place l all-reduce it between hosts, compressed; an all-gather within the host spreads it.
2. reduce-scatter: the same, but the second step is a reduce-scatter, and there is no third.
3. all-gather: the ranks of place l gather their shards between hosts, compressed; an all-gather within the host spreads
   what they have, decoded.

All ranks end with the same bits: what is exchanged within a host is exact.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec import MessageLayout
from lightning_taco.collectives import compressed
from lightning_taco.collectives.timing import timed
from lightning_taco.collectives.traffic import Kind, chunk_values, compressed_sent_bytes
from lightning_taco.config import CodecConfig

_all_to_all = timed("communication", dist.all_to_all_single)
_all_gather = timed("communication", _compat.all_gather_single)
SEED_STEP = 0x2545F4914F6CDD1D  # another than that of `compressed`: places draw other numbers than hosts


@dataclass(frozen=True)
class Hierarchy:
    """The ranks of a group that spans hosts.

    Attributes:
        inside: those of this rank's host.
        between: those at this rank's place of every host.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Hierarchy | None:
        """Make the groups of `group`, whose ranks all call it; ``None`` where `host_size` gives none."""
        hosts: list[Any] = [None] * group.size()
        dist.all_gather_object(hosts, platform.node(), group=group)
        size = host_size(hosts)
        if size is None:
            return None
        ranks, first = dist.get_process_group_ranks(group), group.rank() // size * size
        return cls(_new_group(ranks[first : first + size]), _new_group(ranks[group.rank() % size :: size]))

    def destroy(self) -> None:
        """Give the groups back. All ranks call it."""
        dist.destroy_process_group(self.inside)
        dist.destroy_process_group(self.between)

    @property
    def num_ranks(self) -> int:
        """Of the whole group."""
        return self.inside.size() * self.between.size()


def host_size(hosts: Sequence[str]) -> int | None:
    """Ranks on each host, given the host of each rank; ``None`` on one host, or if the hosts do not have equal blocks.

    >>> host_size(["a", "a", "b", "b"]), host_size(["a", "b", "a", "b"]), host_size(["a", "b"])
    (2, None, None)
    """
    size = len(hosts) // len(set(hosts))
    blocks = [set(hosts[start : start + size]) for start in range(0, len(hosts), size)]
    is_regular = len(blocks) == len(set(hosts)) and all(len(block) == 1 for block in blocks)
    return size if is_regular and size > 1 and len(blocks) > 1 else None


def fits(kind: Kind, shape: torch.Size, dim: int, num_ranks: int) -> bool:
    """Whether a tensor can go this way: not empty, and scattered to shards of one size."""
    return 0 not in shape and (kind != "reduce_scatter" or shape[dim] % num_ranks == 0)


def all_reduce(tensor: Tensor, codec: CodecConfig, ranks: Hierarchy, *, op: str = "sum", seed: int = 0) -> Tensor:
    """The sum or average of `tensor` over all ranks; arguments as in `compressed.all_reduce`.

    Cost: each rank sends 2 (L - 1) / L of the values as they are, within its host, and 2 (H - 1) / (H L) as codes.
    """
    size = ranks.inside.size()
    chunk = chunk_values(tensor.numel(), size, codec)
    values = F.pad(tensor.reshape(-1), (0, size * chunk - tensor.numel())).view(size, chunk)
    own = compressed.all_reduce(_sum_inside(values, ranks), codec, ranks.between, seed=_place_seed(seed, ranks))
    total = _finished(own, op, ranks).to(tensor.dtype)
    return _gather_inside(total, ranks).view(-1)[: tensor.numel()].view(tensor.shape)


def reduce_scatter(
    tensor: Tensor, codec: CodecConfig, ranks: Hierarchy, *, dim: int = 0, op: str = "sum", seed: int = 0
) -> Tensor:
    """This rank's shard of the sum or average over all ranks; arguments as in `compressed.reduce_scatter`.

    Cost: each rank sends (L - 1) / L of the values as they are, within its host, and (H - 1) / (H L) as codes.
    """
    shape = (ranks.between.size(), ranks.inside.size(), -1)
    shards = tensor.unflatten(dim, (ranks.num_ranks, -1)).movedim(dim if dim >= 0 else dim - 1, 0)
    by_place = shards.reshape(shape).transpose(0, 1).contiguous()  # [L, H, n]
    sums = _sum_inside(by_place.view(shape[1], -1), ranks).view(shape[0], -1)
    own = compressed.reduce_scatter(sums, codec, ranks.between, seed=_place_seed(seed, ranks))
    return _finished(own, op, ranks).to(tensor.dtype).view(shards.shape[1:])


def all_gather(tensor: Tensor, codec: CodecConfig, ranks: Hierarchy, *, dim: int = 0, seed: int = 0) -> Tensor:
    """The equal shards of all ranks, joined along `dim`; arguments as in `compressed.all_gather`.

    Cost: each rank sends its values H - 1 times as codes, and H (L - 1) times as they are, within its host.
    """
    row = tensor.reshape(1, -1)
    of_place = compressed.all_gather(row, codec, ranks.between, seed=_place_seed(seed, ranks))  # [H, n]
    gathered = _gather_inside(of_place.view(-1), ranks).view(ranks.inside.size(), ranks.between.size(), -1)
    shards = gathered.transpose(0, 1).reshape(ranks.num_ranks, *tensor.shape)
    dim = dim % tensor.dim()
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def sent_bytes(kind: Kind, tensor: Tensor, codec: CodecConfig, ranks: Hierarchy) -> int:
    """Bytes that a rank sends, within its host and between hosts."""
    inside, between, item = ranks.inside.size(), ranks.between.size(), tensor.element_size()
    if kind == "all_reduce":
        chunk = chunk_values(tensor.numel(), inside, codec)
        return 2 * (inside - 1) * chunk * item + compressed_sent_bytes("all_reduce", chunk, between, codec)
    if kind == "reduce_scatter":
        part = tensor.numel() // inside
        return (inside - 1) * part * item + compressed_sent_bytes("reduce_scatter", part, between, codec)
    message = MessageLayout.of(tensor.numel(), codec).message_bytes
    return (between - 1) * message + (inside - 1) * between * tensor.numel() * item


def _sum_inside(parts: Tensor, ranks: Hierarchy) -> Tensor:
    """``[L, n]``, row l for place l -> fp32 ``[n]``: the sum of this rank's row over its host, in rank order."""
    received = torch.empty_like(parts)
    _all_to_all(received, parts, group=ranks.inside)
    total = received[0].to(torch.float32, copy=True)
    for part in received[1:]:
        total += part
    return total


def _gather_inside(values: Tensor, ranks: Hierarchy) -> Tensor:
    """``[n]`` -> ``[L, n]`` of the host's ranks, exact."""
    gathered = values.new_empty(ranks.inside.size(), values.numel())
    _all_gather(gathered, values.view(1, -1), group=ranks.inside)
    return gathered


def _finished(total: Tensor, op: str, ranks: Hierarchy) -> Tensor:
    return total.mul_(1 / ranks.num_ranks) if op == "avg" else total


def _place_seed(seed: int, ranks: Hierarchy) -> int:
    return (seed + (ranks.inside.rank() + 1) * SEED_STEP) % compressed.SEED_RANGE


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """A group that only its own ranks make."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
