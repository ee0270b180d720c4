"""What the ranks of one pipeline tell each other beside the tensors: numbers each step, texts where something is wrong.

It goes over gloo on the host, so nobody waits for a device.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.pipeline_parallel.failure import Failure, StageFailedError
from lightning_taco.pipeline_parallel.microbatches import REPEATED

PEERS_TIMEOUT = timedelta(seconds=30)
"""How long a rank whose stage has failed waits for its peers to fail, too; see `Agreement.meet_peers`."""


class Agreement:
    """Between the ranks of one pipeline.

    Args:
        group: the pipeline axis, over which tensors travel.
        host: the same ranks over gloo; see `host_group`.
        device: of this rank.
        peers: the ranks of other pipelines with the same stages, which may exchange within a stage; ``None`` for none.
            See `peers_group`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        host: dist.ProcessGroup,
        device: torch.device,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        self.group, self.host, self.device, self.peers = group, host, device, peers
        self._shapes: dict[int, bytes] = {}

    def numbers(self, *mine: int) -> list[list[int]]:
        """Integers of every rank, in rank order. Cost: one all-gather of a few bytes on the host."""
        sent = torch.tensor(mine, dtype=torch.int64)
        gathered = [torch.empty_like(sent) for _ in range(self.host.size())]
        dist.all_gather(gathered, sent, group=self.host)
        return [each.tolist() for each in gathered]

    def objects(self, mine: Any) -> list[Any]:
        """A picklable object of every rank, in rank order."""
        gathered: list[Any] = [None] * self.host.size()
        dist.all_gather_object(gathered, mine, group=self.host)
        return gathered

    def object_of(self, rank: int, mine: Any) -> Any:
        """The picklable object of one rank, on all."""
        box = [mine]
        dist.broadcast_object_list(box, dist.get_global_rank(self.host, rank), group=self.host)
        return box[0]

    def meet_peers(self, error: BaseException) -> None:
        """Wait, after `error`, for the peers to fail as well.

        If they do, all of them can go on to the end of the step, where every rank gets the message. If one does not, it
        will wait for this rank in an exchange within the stage: then this rank ends at once, and with it the run.

        Raises:
            BaseException: `error`, when a peer did not come in time.
        """
        if self.peers is None:
            return
        try:
            dist.barrier(group=self.peers)
        except RuntimeError:
            raise error from None

    def raise_failure(self, failure: Failure) -> None:
        """Raise what any rank has noted, on all of them.

        Raises:
            BaseException: this rank's own error, if it has one.
            StageFailedError: with the error of another rank.
        """
        mine = None
        if failure.error is not None:
            mine = f"rank {dist.get_rank()} ({failure.place}): {type(failure.error).__name__}: {failure.error}"
        texts = [text for text in self.objects(mine) if text is not None]
        if failure.error is not None:
            raise failure.error
        raise StageFailedError(f"The pipeline ends, since a stage failed: {'; '.join(texts)}")

    def share(self, tree: Any, packed: bytes | None, key: int, source: int) -> Any:
        """What rank `source` holds, on all ranks.

        Args:
            tree: on `source`: nested containers of tensors, numbers and picklable objects.
            packed: on `source`: what `structure_of` gave for `tree`.
            key: the `Structure.key` of `source`, which all ranks know.
            source: a rank of the pipeline.

        Cost: one broadcast for all numbers, one for each tensor with dims; one of the structure when it is new.
        """
        if key not in self._shapes:
            self._shapes[key] = self.object_of(source, packed)
        slots = pickle.loads(self._shapes[key])
        leaves, rebuild = _compat.flattened(slots)
        mine = _compat.leaves_of(tree) if packed is not None else [None] * len(leaves)
        numbers = self._shared_numbers(leaves, mine, source)
        found = [
            self._shared_leaf(slot, value, numbers, source) if isinstance(slot, Slot) else slot
            for slot, value in zip(leaves, mine, strict=True)
        ]
        return rebuild(found)

    def _shared_numbers(self, slots: Sequence[Any], mine: Sequence[Any], source: int) -> list[Tensor]:
        is_number = [isinstance(slot, Slot) and slot.shape is None for slot in slots]
        if not any(is_number):
            return []
        # Float64 holds every value of the other floating types, and integers up to 2^53.
        flat = torch.zeros(sum(is_number), dtype=torch.float64, device=self.device)
        values = [value for value, is_one in zip(mine, is_number, strict=True) if is_one]
        if values[0] is not None:
            ready = [torch.as_tensor(v, dtype=torch.float64, device=self.device).reshape(()) for v in values]
            flat = torch.stack(ready)
        dist.broadcast(flat, dist.get_global_rank(self.group, source), group=self.group)
        return list(flat.unbind())

    def _shared_leaf(self, slot: Slot, value: Any, numbers: list[Tensor], source: int) -> Any:
        if slot.shape is None:
            number = numbers.pop(0)
            if slot.dtype is None:
                return slot.kind(number.item())
            return number.to(slot.dtype)
        tensor = (
            value.contiguous() if value is not None else torch.empty(slot.shape, dtype=slot.dtype, device=self.device)
        )
        as_bytes = tensor.reshape(-1).view(torch.uint8)
        if as_bytes.numel():
            dist.broadcast(as_bytes, dist.get_global_rank(self.group, source), group=self.group)
        return tensor


@dataclass(frozen=True)
class Slot:
    """A leaf whose value travels apart from the structure: a number, or a tensor with dims."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    kind: type[Any] = float


class Structure(NamedTuple):
    """What a tree is without its values, and a number for it."""

    packed: bytes
    key: int


def structure_of(tree: Any) -> Structure:
    """The structure of `tree`, the same for trees that differ in values only."""
    leaves, rebuild = _compat.flattened(tree)
    packed = pickle.dumps(rebuild([_slot(leaf) for leaf in leaves]))
    return Structure(packed, number_of(packed))


def number_of(what: bytes | str) -> int:
    """A positive 56-bit number for a text, the same in every process."""
    content = what.encode() if isinstance(what, str) else what
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big") + 1


def _slot(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Slot(tuple(leaf.shape) if leaf.dim() else None, leaf.dtype)
    if isinstance(leaf, REPEATED) and leaf is not None:
        return Slot(None, None, type(leaf))
    return leaf


def host_group(group: dist.ProcessGroup, all_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The ranks of `group` over gloo: itself, or a new group. All processes of the run call it.

    Args:
        group: one pipeline's ranks.
        all_ranks: the global ranks of every pipeline of the run, in an order that all processes share.
    """
    if "cpu:" in str(dist.get_backend_config(group)):
        return group
    return _own_group(all_ranks)


def peers_group(all_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This process's of several groups of peers, which all processes of the run make together."""
    return _own_group(all_ranks, PEERS_TIMEOUT)


def _own_group(all_ranks: Sequence[Sequence[int]], timeout: timedelta | None = None) -> dist.ProcessGroup:
    groups = [dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in all_ranks]
    return next(made for made, ranks in zip(groups, all_ranks, strict=True) if dist.get_rank() in ranks)
