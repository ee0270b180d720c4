"""Messages through memory that the GPUs of one host share over NVLink: who encodes writes into the peers' memory.

The kernel that makes a message stores it in the memory of every rank that is to have it; all ranks meet at a barrier on
the device; each decodes what has come into its own. What NCCL does in a kernel of its own is part of the first one.
Multicast is not used.

Four regions of the memory take turns. A message may overwrite the last but three: who meets for a message has read all
before it but, in an exchange of two slices, the first of them, since the rest happens in the order of one stream. A
captured graph does not know which region was the last, so from the first capture on there is a barrier before each
message too.

With two slices the first is decoded while the second is encoded, on a stream of a higher priority, so that it need not
wait for the blocks of a kernel that waits for the link.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.addressed import AddressedMessages
from lightning_taco.collectives.transport import Arriving, Messages, Pending

FIRST_BYTES = 1 << 20
"""Of a region at first, and what its size is a multiple of."""
NUM_REGIONS = 4
MAX_SLICES = 2
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
        self._receiver = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

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
        if num_bytes > self._memory.region_bytes:
            self._grow(num_bytes, is_capturing)
        self._was_captured = self._was_captured or is_capturing
        if self._was_captured:
            self._memory.meet()
        self._turn = (self._turn + 1) % NUM_REGIONS
        return AddressedMessages(self._memory.addresses[self._turn], self.group.rank() * message_bytes)

    def received(self, message_bytes: int) -> Tensor:
        """What all ranks have written for this one, ``uint8 [P, message_bytes]``, once they have."""
        self._memory.meet()
        start = self._turn * self._memory.region_bytes
        return self._memory.own[start : start + self.group.size() * message_bytes].view(-1, message_bytes)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Run the block on a stream beside the current one, which waits for it at the end."""
        if self._receiver is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._receiver):
            yield
        current.wait_stream(self._receiver)

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
        self._memory = _Mapped.of(self.group, self.device, num_bytes)


@dataclass(frozen=True)
class _Mapped:
    """The regions of this rank, and where those of all ranks lie."""

    own: Tensor
    handle: Any
    region_bytes: int
    addresses: tuple[Tensor, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device, region_bytes: int) -> _Mapped:
        region_bytes = -(-region_bytes // FIRST_BYTES) * FIRST_BYTES
        own, handle = _compat.symmetric_memory(NUM_REGIONS * region_bytes, device, group)
        addresses = tuple(
            torch.tensor([start + region * region_bytes for start in handle.buffer_ptrs], device=device)
            for region in range(NUM_REGIONS)
        )
        return cls(own, handle, region_bytes, addresses)

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
        """In the region whose turn it is."""
        self._message_bytes = message_bytes
        return self.memory.message_buffer(num_rows, message_bytes)

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        """Beside the sending, if there is more than one slice."""
        return self.memory.receiving() if is_async else nullcontext()

    def start_all_to_all(self, messages: Messages, is_async: bool) -> Pending:
        """As in `Transport`."""
        return self._received(is_async)

    def start_all_gather(self, message: Messages, is_async: bool) -> Pending:
        """As in `Transport`."""
        return self._received(is_async)

    def _received(self, is_async: bool) -> Pending:
        messages = self.memory.received(self._message_bytes)
        if not is_async or messages.device.type != "cuda":
            return Arriving(messages, None)
        event = torch.cuda.Event()
        event.record()
        return _Recorded(messages, event)


@dataclass(frozen=True)
class _Recorded:
    """Messages that are there when `event` has come to pass."""

    messages: Tensor
    event: torch.cuda.Event

    def wait(self) -> Tensor:
        self.event.wait()
        return self.messages


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
