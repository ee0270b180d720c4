"""What an exchange would have given without compression: the measure of one that is compressed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.dtensor.exchange import REDUCING_KINDS, Exchange


def exact_exchange(exchange: Exchange, group: dist.ProcessGroup) -> Tensor:
    """The exchange without compression; all ranks of `group` call it. What is reduced must be fp32."""
    if exchange.kind not in REDUCING_KINDS:
        return _compat.stock_exchange(
            exchange.tensor.contiguous(), exchange.kind, exchange.op, exchange.dim, exchange.scatter_dim, group
        )
    return share_of_sum(exchange, exact_sum(exchange.tensor, group), group)


def exact_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `tensor` over the ranks of `group`, a new tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def share_of_sum(exchange: Exchange, total: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What a rank holds after a reducing `exchange` whose sum is `total`."""
    if exchange.op == "avg":
        total = total / group.size()
    if exchange.kind == "all_reduce":
        return total
    shards = total.chunk(group.size(), exchange.dim)
    return shards[group.rank()] if group.rank() < len(shards) else total.narrow(exchange.dim, 0, 0)
