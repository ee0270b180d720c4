"""Whether the ranks of one tensor-parallel group got the same batch and draw the same random numbers."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK_VALUES = 1 << 20  # so that a fingerprint of a large batch needs little memory


def batches_agree(batch: Any, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` have the same tensors in `batch`: values, order, shapes and dtypes.

    Cost: reads each tensor once, and gathers one integer of each rank.
    """
    return len(_ranks_by_fingerprint(_fingerprint(batch), group)) == 1


def check_same_batch(batch: Any, group: dist.ProcessGroup, axis: str = "tensor-parallel") -> None:
    """Refuse different batches within one tensor-parallel group, or another; the same error on every rank.

    Args:
        batch: of this rank.
        group: ranks that must have the same.
        axis: what the message calls them.

    Raises:
        ValueError: with the ranks that agree among each other.
    """
    ranks = _ranks_by_fingerprint(_fingerprint(batch), group)
    if len(ranks) > 1:
        raise ValueError(
            f"The ranks of one {axis} group compute one model and must get the same batch, but these ranks "
            f"got different ones: {' / '.join(map(str, ranks))}. Shard the data over the data-parallel ranks only: "
            f"give a custom sampler **trainer.strategy.distributed_sampler_kwargs (num_replicas and rank), let an "
            f"IterableDataset use the same two numbers, and seed what draws at random alike on all ranks."
        )


def check_rng_agrees(group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    """Refuse random generators that differ within one tensor-parallel group; the same error on every rank.

    Dropout on activations that every rank holds whole draws its mask from the rank's own generator, so the masks are
    the same only if the generators are. A model without dropout needs no such agreement.

    Args:
        group: the tensor-parallel group.
        device: a CUDA device whose generator is compared, too.

    Raises:
        ValueError: with the ranks that agree among each other.
    """
    states = [torch.get_rng_state()]
    if device is not None and device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    ranks = _ranks_by_fingerprint(_fingerprint(states), group)
    if len(ranks) > 1:
        raise ValueError(
            f"The random generators of one tensor-parallel group differ (ranks {' / '.join(map(str, ranks))}), so "
            f"dropout would mask the same activations differently on each rank. Call lightning.seed_everything with "
            f"one seed on all ranks, and draw no random number on some ranks only."
        )


def _ranks_by_fingerprint(fingerprint: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """Global ranks of `group`, those with the same fingerprint together; the same list on every rank."""
    if group.size() == 1:
        return [dist.get_process_group_ranks(group)]
    is_nccl_only = "cpu:" not in str(dist.get_backend_config(group))
    mine = fingerprint.to("cuda" if is_nccl_only else "cpu").reshape(1)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    ranks: dict[int, list[int]] = {}
    for rank, other in zip(dist.get_process_group_ranks(group), torch.cat(gathered).tolist(), strict=True):
        ranks.setdefault(other, []).append(rank)
    return list(ranks.values())


def _fingerprint(batch: Any) -> Tensor:
    """One int64 that depends on every bit of the tensors in `batch`, on their order, shapes and dtypes."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    apply_to_collection(batch, Tensor, collect)
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        seed = zlib.crc32(f"{tuple(local.shape)} {local.dtype}".encode())
        values = _fingerprint_of_values(local).to(total.device) if local.layout == torch.strided else 0
        total = (total * 1_000_003 + values) * 1_000_003 + seed  # int64 wraps around, alike on every device
    return total


def _fingerprint_of_values(tensor: Tensor) -> Tensor:
    """Sum of the bytes' integers, each times an odd number of its own, modulo 2^64: exact in any order."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    width = next((kind for kind in (torch.int32, torch.int16) if flat.element_size() % kind.itemsize == 0), torch.uint8)
    integers = flat.view(width)
    for start in range(0, integers.numel(), CHUNK_VALUES):
        bits = integers[start : start + CHUNK_VALUES].to(torch.int64)
        places = torch.arange(start, start + bits.numel(), device=tensor.device, dtype=torch.int64)
        # The two multiplications spread a place over all bits: neighbouring changes do not cancel out.
        places = (places * -7046029254386353131) ^ (places * 668265261).bitwise_right_shift(7)
        total = total + (bits * (places | 1)).sum()
    return total
