"""HSDP with FSDP2's own mesh of replicas and shards: gradients between replicas in few bits.

``set_all_reduce_hook`` cannot do it: FSDP2 calls the hook after an all-reduce of its own. What it asks for that is the
replicas' process group, so a group of ours takes its place and does one thing otherwise. FSDP2 goes on to decide when
to reduce (``set_requires_all_reduce``), on which stream, and what is still to be divided.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.data_parallel.exchange import GradientExchange
from lightning_taco.data_parallel.fsdp import CompressedReplicaSum, record_all_reduce_as_it_is


class ReplicaGroup(dist.ProcessGroup):
    """The replicas of one unit of FSDP2, whose all-reduce is compressed.

    Args:
        group: the ranks that hold the same shards.
        reduction: of the unit's gradients over them.
        exchange: that `reduction` goes by.
    """

    def __init__(self, group: dist.ProcessGroup, reduction: CompressedReplicaSum, exchange: GradientExchange) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group, self._reduction, self._exchange = group, reduction, exchange

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work | None:  # type: ignore[override]
        """Reduce the one tensor in place, in stream order; ``None``, since there is nothing to wait for.

        A sum or a mean is compressed, by the rules of `CompressedReplicaSum`; all else goes as it is.
        """
        (values,) = tensors

        def as_it_is(part: Tensor, reason: str) -> None:
            record_all_reduce_as_it_is(part, self._exchange, reason)
            self._group.allreduce([part], opts).wait()

        factor = _compat.reduction_factor(opts.reduceOp, self.size())
        if factor is None:
            as_it_is(values, f"reduction {opts.reduceOp}")
        else:
            self._reduction.reduce(values, factor, as_it_is)
        return None
