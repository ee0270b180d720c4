"""Messages through memory that the GPUs of one host share over NVLink: who encodes writes into the peers' memory.

The kernel that makes a message stores it in the memory of every rank that is to have it; all ranks meet at a barrier on
the device; each decodes what has come into its own. What NCCL does in a kernel of its own is part of the first one.
Multicast is not used.

Two halves of the memory take turns. A message may overwrite the last but one: who meets for a message has read the one
before, since all of it happens in the order of one stream. A captured graph does not know which half was the last, so
from the first capture on there is a barrier before each message too.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.addressed import AddressedMessages
from lightning_taco.codec.layout import ALIGNMENT_BYTES
from lightning_taco.collectives.transport import Arriving, Messages, Pending

FIRST_BYTES = 1 << 20
TIMEOUT_MS = 600_000
"""As long as NCCL waits for a peer; then the kernel that waits ends the process with an error."""


CLOSING_TIME = timedelta(seconds=5)
_KEPT: list[_Mapped] = []
_num_closed = 0


class PeerMemory:
    """Memory on each rank of a group that the kernels of all of them can read.

    `open` makes it. All ranks exchange the same messages over it, in the same order and on one stream at a time.

    Args:
        group: the ranks.
        device: of this rank.
        memory: what every rank holds of it, mapped.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, memory: _Mapped) -> None:
        self.group = group
        self.device = device
        self._memory = memory
        self._turn = 0
        self._was_captured = False

    @classmethod
    def open(cls, group: dist.ProcessGroup, device: torch.device) -> tuple[PeerMemory | None, str]:
        """Map the memory of all ranks, which all call it; or ``None``, and why not, the same on all ranks."""
        reasons: list[Any] = [None] * group.size()
        dist.all_gather_object(reasons, (platform.node(), _reason_against(device)), group=group)
        hosts = dict.fromkeys(host for host, _ in reasons)
        if len(hosts) > 1:
            return None, f"the ranks are on {len(hosts)} hosts"
        reason = next((reason for _, reason in reasons if reason), None)
        if reason is not None:
            return None, reason
        mapped, error = _try_to_map(group, device)
        errors: list[Any] = [None] * group.size()
        dist.all_gather_object(errors, error, group=group)
        error = next((error for error in errors if error), None)
        if mapped is None or error is not None:
            return None, f"the GPUs cannot map each other's memory ({error})"
        return cls(group, device, mapped), ""

    def message_buffer(self, num_rows: int, message_bytes: int) -> AddressedMessages:
        """Where this rank's next messages are to be written: one in the memory of all ranks, or one in that of each.

        Raises:
            RuntimeError: while a graph is captured, for a message larger than all before.
        """
        num_bytes = self.group.size() * message_bytes
        is_capturing = torch.cuda.is_current_stream_capturing()
        if num_bytes > self._memory.half_bytes:
            self._grow(num_bytes, is_capturing)
        self._was_captured = self._was_captured or is_capturing
        if self._was_captured:
            self._memory.meet()
        self._turn = 1 - self._turn
        return AddressedMessages(self._memory.addresses[self._turn], self.group.rank() * message_bytes)

    def received(self, message_bytes: int) -> Tensor:
        """What all ranks have written for this one, ``uint8 [P, message_bytes]``, once they have."""
        self._memory.meet()
        start = self._turn * self._memory.half_bytes
        return self._memory.own[start : start + self.group.size() * message_bytes].view(-1, message_bytes)

    def close(self) -> None:
        """Give the memory back once no rank reads it any more. All ranks call it.

        When a rank does not come, since it has failed, the memory stays until the process ends.
        """
        torch.cuda.synchronize(self.device)
        global _num_closed
        _num_closed += 1  # the same on all ranks, which open and close alike
        name = f"lightning_taco/peer_memory/{self.group.group_name}/{_num_closed}"
        if not _compat.agree_by_store(name, self.group.rank(), self.group.size(), CLOSING_TIME):
            _KEPT.append(self._memory)

    def _grow(self, num_bytes: int, is_capturing: bool) -> None:
        if is_capturing:
            raise RuntimeError(
                f"a message of {num_bytes} bytes is larger than all before, and memory cannot be mapped while a CUDA "
                "graph is captured; run one step before the capture."
            )
        self._memory.meet()  # nobody reads the old memory any more
        torch.cuda.synchronize(self.device)
        self._memory = _Mapped.of(self.group, self.device, 1 << (num_bytes - 1).bit_length())


@dataclass(frozen=True)
class _Mapped:
    """Two halves of memory on each rank, and where all of them lie."""

    own: Tensor
    handle: Any
    half_bytes: int
    addresses: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, half_bytes: int) -> _Mapped:
        half_bytes = -(-half_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        own, handle = _compat.symmetric_memory(2 * half_bytes, device, group)
        first, second = (
            torch.tensor([start + half * half_bytes for start in handle.buffer_ptrs], dtype=torch.int64, device=device)
            for half in range(2)
        )
        return cls(own, handle, half_bytes, (first, second))

    def meet(self) -> None:
        """Wait, on the device, until all ranks have come here."""
        self.handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)


class PeerTransport:
    """`Transport` over `PeerMemory`: messages are where they are to go as soon as they are encoded.

    Args:
        memory: of this rank.
    """

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self.rank = memory.group.rank()
        self.world_size = memory.group.size()
        self._message_bytes = 0

    def message_buffer(self, num_rows: int, message_bytes: int) -> AddressedMessages:
        """In the half whose turn it is."""
        self._message_bytes = message_bytes
        return self.memory.message_buffer(num_rows, message_bytes)

    def start_all_to_all(self, messages: Messages, is_async: bool) -> Pending:
        """As in `Transport`."""
        return Arriving(self.memory.received(self._message_bytes), None)

    def start_all_gather(self, message: Messages, is_async: bool) -> Pending:
        """As in `Transport`."""
        return Arriving(self.memory.received(self._message_bytes), None)


def _reason_against(device: torch.device) -> str | None:
    """Why this rank's memory cannot be shared, as far as one rank can tell."""
    if device.type != "cuda":
        return f"the ranks compute on {device.type}, and it takes GPUs of one host"
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE is set"
    if not _compat.has_triton():
        return "Triton is not installed"
    return None


def _try_to_map(group: dist.ProcessGroup, device: torch.device) -> tuple[_Mapped | None, str | None]:
    try:
        mapped = _Mapped.of(group, device, FIRST_BYTES)
    except RuntimeError as error:  # the driver's, or torch's own
        return None, str(error).splitlines()[0]
    return mapped, None
