"""How messages move between ranks. `ProcessGroupTransport` uses the collectives of NCCL or gloo."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.addressed import AddressedMessages

Messages = Tensor | AddressedMessages
"""Rows of bytes, or where they have been written."""


class Pending(Protocol):
    """Messages that are on their way."""

    def wait(self) -> Tensor:
        """Them, once the current stream has them."""
        ...


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

    def message_buffer(self, num_rows: int, message_bytes: int) -> AddressedMessages | None:
        """Where messages are to be written that are sent next, one to all or one to each; ``None`` for anywhere."""
        ...

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        """Around the decoding of what was sent, and only that; with `is_async` it may run beside the sending."""
        ...

    def start_all_to_all(self, messages: Messages, is_async: bool) -> Pending:
        """Send row p of ``[P, M]`` to rank p; row p of what arrives came from rank p.

        With `is_async` the current stream does not wait for it before `Pending.wait`.
        """
        ...

    def start_all_gather(self, message: Messages, is_async: bool) -> Pending:
        """Send ``[1, M]`` to every rank; ``[P, M]`` arrives, in rank order, the own message among them."""
        ...


@dataclass(frozen=True)
class Arriving:
    """Messages of an exchange of a process group."""

    messages: Tensor
    work: dist.Work | None
    """``None`` for an exchange that is in the order of the current stream."""

    def wait(self) -> Tensor:
        """Them, once the current stream has them."""
        if self.work is not None:
            self.work.wait()
        return self.messages


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

    def message_buffer(self, num_rows: int, message_bytes: int) -> None:
        """Anywhere."""

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        """The process group sends on a stream of its own, so decoding stays where it is."""
        return nullcontext()

    def start_all_to_all(self, messages: Messages, is_async: bool) -> Arriving:
        """As in `Transport`."""
        assert isinstance(messages, Tensor)
        received = torch.empty_like(messages)
        if self.pairs_gather and self.world_size == 2:
            others = messages.narrow(0, 1 - self.rank, 1)
            work = _compat.all_gather_single(received, others, group=self.group, async_op=is_async)
            return _Swapped(received, work, messages, self.rank)
        return Arriving(received, dist.all_to_all_single(received, messages, group=self.group, async_op=is_async))

    def start_all_gather(self, message: Messages, is_async: bool) -> Arriving:
        """As in `Transport`."""
        assert isinstance(message, Tensor)
        received = message.new_empty(self.world_size, message.shape[1])
        return Arriving(received, _compat.all_gather_single(received, message, group=self.group, async_op=is_async))


@dataclass(frozen=True)
class _Swapped(Arriving):
    """The rows of two ranks that were meant for the other: in place of the own one has come the other's of it."""

    sent: Tensor
    rank: int

    def wait(self) -> Tensor:
        received = super().wait()
        received[self.rank] = self.sent[self.rank]
        return received
