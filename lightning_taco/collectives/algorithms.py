"""The algorithms that a compressed exchange can go by. `break_even` chooses among them by measurement."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch import Tensor

from lightning_taco.collectives import hierarchy
from lightning_taco.collectives.compressed import all_gather, all_reduce, all_to_all, reduce_scatter
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.peer_memory import MAX_SLICES, PeerMemory, PeerTransport
from lightning_taco.collectives.traffic import Kind, compressed_sent_bytes
from lightning_taco.collectives.transport import ProcessGroupTransport
from lightning_taco.config import CodecConfig

Algorithm = str
"""``"one_shot"``, ``"two_shot"``, ``"all_to_all"`` or ``"all_gather"``, each also in slices (``"one_shot/4"``);
``"hierarchical"``; ``"peer_memory"``, also in two slices."""
KINDS: tuple[Kind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
NUM_SLICES = (2, 4)
PEER_MEMORY = "peer_memory"
SLICED_BYTES = 1 << 25
"""Of a tensor that goes through mapped memory in slices unless sizes were measured: there the host keeps ahead."""
DataParallelKind = Literal["gradient_reduce_scatter", "weight_all_gather"]
DATA_PARALLEL_KINDS: tuple[DataParallelKind, ...] = ("gradient_reduce_scatter", "weight_all_gather")
"""Of `lightning_taco.data_parallel`, which has one algorithm for each; a bench times them too."""
MeasuredKind = Kind | DataParallelKind
MEASURED_KINDS: tuple[MeasuredKind, ...] = (*KINDS, *DATA_PARALLEL_KINDS)


def algorithms_of(
    kind: MeasuredKind,
    num_ranks: int,
    spans_hosts: bool = False,
    *,
    overlaps: bool = False,
    has_peer_memory: bool = False,
) -> tuple[Algorithm, ...]:
    """The algorithms that can be chosen for an exchange, the default first.

    Two ranks send the same bytes by a one-shot and a two-shot all-reduce, and the latter quantises twice; an all-to-all
    of two ranks can be an all-gather of what each has for the other.

    Args:
        kind: of the exchange.
        num_ranks: of the group.
        spans_hosts: whether the group has a `Hierarchy`.
        overlaps: whether sending runs beside encoding, so that slices may gain.
        has_peer_memory: whether the ranks share memory.

    >>> algorithms_of("all_reduce", 4), algorithms_of("reduce_scatter", 2)
    (('two_shot', 'one_shot'), ('all_to_all', 'all_gather'))
    >>> algorithms_of("all_gather", 2, overlaps=True)
    ('all_gather', 'all_gather/2', 'all_gather/4')
    """
    if kind in DATA_PARALLEL_KINDS:
        return ("all_to_all",) if kind == "gradient_reduce_scatter" else ("all_gather",)
    whole = _whole(kind, num_ranks)
    sliced = tuple(f"{algorithm}/{number}" for algorithm in whole for number in NUM_SLICES if overlaps)
    hierarchical = ("hierarchical",) if spans_hosts and kind != "all_to_all" else ()
    mapped = (PEER_MEMORY, f"{PEER_MEMORY}/{MAX_SLICES}") if has_peer_memory else ()
    return (*whole, *sliced, *hierarchical, *mapped)


def overlaps(group: dist.ProcessGroup) -> bool:
    """Whether sending runs beside encoding: NCCL has a stream of its own, gloo takes turns with the CPU."""
    return "nccl" in str(dist.get_backend(group))


def _whole(kind: MeasuredKind, num_ranks: int) -> tuple[Algorithm, ...]:
    if kind == "all_gather":
        return ("all_gather",)
    if kind == "all_reduce":
        return ("one_shot",) if num_ranks == 2 else ("two_shot", "one_shot")
    return ("all_to_all", "all_gather") if num_ranks == 2 else ("all_to_all",)


def exchange(
    kind: Kind,
    tensor: Tensor,
    codec: CodecConfig,
    group: dist.ProcessGroup,
    *,
    algorithm: Algorithm | None = None,
    ranks: Hierarchy | None = None,
    memory: PeerMemory | None = None,
    op: str = "sum",
    dim: int = 0,
    scatter_dim: int = 0,
    seed: int = 0,
) -> Tensor:
    """Exchange `tensor`, compressed, by `algorithm`; arguments as in `compressed`.

    Args:
        kind: of the exchange.
        tensor: this rank's.
        codec: with its element resolved.
        group: the ranks.
        algorithm: one of `algorithms_of`, the same on all ranks; ``None`` for the default: by `memory` where there is
            one.
        ranks: those of ``"hierarchical"``. A tensor that cannot go that way goes by default.
        memory: that of ``"peer_memory"``.
        op: of an all-reduce or a reduce-scatter.
        dim: the dim that is joined, or that a reduce-scatter cuts.
        scatter_dim: the dim that an all-to-all cuts.
        seed: of stochastic rounding.
    """
    if algorithm == "hierarchical":
        if ranks is not None and hierarchy.fits(kind, tensor.shape, dim, ranks.num_ranks):
            return _hierarchical(kind, tensor, codec, ranks, op, dim, seed)
        algorithm = None
    if algorithm is None and memory is not None:
        is_large = tensor.numel() * tensor.element_size() >= SLICED_BYTES
        algorithm = f"{PEER_MEMORY}/{MAX_SLICES}" if is_large else PEER_MEMORY
    base, _, number = (algorithm or "").partition("/")
    num_slices = int(number or 1)
    by: PeerTransport | ProcessGroupTransport
    if memory is not None and base == PEER_MEMORY:
        by = PeerTransport(memory)
    else:
        by = ProcessGroupTransport(group, pairs_gather=base == "all_gather" and kind != "all_gather")
    if kind == "all_reduce":
        one_shot = base == "one_shot" if base in ("one_shot", "two_shot") else None
        return all_reduce(tensor, codec, by, op=op, seed=seed, one_shot=one_shot, num_slices=num_slices)  # type: ignore[arg-type]
    if kind == "all_gather":
        return all_gather(tensor, codec, by, dim=dim, seed=seed, num_slices=num_slices)
    if kind == "reduce_scatter":
        return reduce_scatter(tensor, codec, by, dim=dim, op=op, seed=seed, num_slices=num_slices)  # type: ignore[arg-type]
    return all_to_all(tensor, codec, by, gather_dim=dim, scatter_dim=scatter_dim, seed=seed, num_slices=num_slices)


def sent_bytes(
    kind: Kind,
    tensor: Tensor,
    codec: CodecConfig,
    num_ranks: int,
    algorithm: Algorithm | None = None,
    ranks: Hierarchy | None = None,
    dim: int = 0,
) -> int:
    """Bytes that a rank sends in `exchange`."""
    if algorithm == "hierarchical" and ranks is not None and hierarchy.fits(kind, tensor.shape, dim, num_ranks):
        return hierarchy.sent_bytes(kind, tensor, codec, ranks)
    is_one_shot = (algorithm or "").partition("/")[0] == "one_shot"
    return compressed_sent_bytes(kind, tensor.numel(), num_ranks, codec, one_shot=is_one_shot)


def _hierarchical(
    kind: Kind, tensor: Tensor, codec: CodecConfig, ranks: Hierarchy, op: str, dim: int, seed: int
) -> Tensor:
    if kind == "all_reduce":
        return hierarchy.all_reduce(tensor, codec, ranks, op=op, seed=seed)
    if kind == "reduce_scatter":
        return hierarchy.reduce_scatter(tensor, codec, ranks, dim=dim, op=op, seed=seed)
    return hierarchy.all_gather(tensor, codec, ranks, dim=dim, seed=seed)
