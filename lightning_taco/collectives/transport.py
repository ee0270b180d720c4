"""How messages move between ranks. `ProcessGroupTransport` uses the collectives of NCCL or gloo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat


class Transport(Protocol):
    """Moves whole messages, ``uint8``, between the ranks of one group."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        ...

    def all_to_all(self, messages: Tensor) -> Tensor:
        """Send row p of ``[P, M]`` to rank p; row p of the result came from rank p."""
        ...

    def all_gather(self, message: Tensor) -> Tensor:
        """Send ``[1, M]`` to every rank; ``[P, M]`` in rank order, the own message among them."""
        ...


@dataclass(frozen=True)
class ProcessGroupTransport:
    """The collectives of a `ProcessGroup`, in stream order: on CUDA no call waits on the host.

    Bytes travel as ``uint8``, since gloo refuses every float8 dtype, and NCCL does before compute capability 9.0.

    Args:
        group: the ranks.
        pairs_gather: whether two ranks exchange their rows by an all-gather of the rows that are meant for the other,
            instead of an all-to-all: the same bytes on the wire and the same result. NCCL's all-gather may be faster
            for each byte; what it costs is a copy of the own row.
    """

    group: dist.ProcessGroup
    pairs_gather: bool = False

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.group.rank()

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    def all_to_all(self, messages: Tensor) -> Tensor:
        """Send row p of ``[P, M]`` to rank p; row p of the result came from rank p."""
        if self.pairs_gather and self.world_size == 2:
            return self._swap(messages)
        received = torch.empty_like(messages)
        dist.all_to_all_single(received, messages, group=self.group)
        return received

    def all_gather(self, message: Tensor) -> Tensor:
        """Send ``[1, M]`` to every rank; ``[P, M]`` in rank order, the own message among them."""
        received = message.new_empty(self.world_size, message.shape[1])
        _compat.all_gather_single(received, message, group=self.group)
        return received

    def _swap(self, messages: Tensor) -> Tensor:
        received = torch.empty_like(messages)
        _compat.all_gather_single(received, messages.narrow(0, 1 - self.rank, 1), group=self.group)
        received[self.rank] = messages[self.rank]
        return received
