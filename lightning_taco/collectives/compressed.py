"""Compressed `all_reduce`, `reduce_scatter`, `all_gather` and `all_to_all`.

Common to all: every rank decodes the messages that its peers decode, its own included, in rank order, so that ranks
end with the same bits; sums are fp32; a NaN or an Inf comes out as NaN on every rank that receives its block; shapes,
dtypes and settings alone decide what is sent, so no rank can disagree with another.

With ``num_slices`` above 1 a tensor goes in so many messages of a part of it each: while one is on the way, the next is
encoded and the one before decoded. Slices cut no block, so the result has the bits of one message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_taco import codec as codecs
from lightning_taco.codec import addressed
from lightning_taco.codec.checks import require_resolved
from lightning_taco.collectives import rows as row_views
from lightning_taco.collectives.timing import timed, timed_transport
from lightning_taco.collectives.traffic import chunk_values
from lightning_taco.collectives.transport import Messages, ProcessGroupTransport, Transport
from lightning_taco.config import CodecConfig

ReduceOp = Literal["sum", "avg"]
Group = dist.ProcessGroup | Transport
SEED_RANGE = 1 << 62
SEED_STEP = 0x1E3779B97F4A7C15  # odd and irregular: the seeds of ranks share no pattern of bits

encode = timed("codec", codecs.encode)
decode = timed("codec", codecs.decode)
decode_sum = timed("codec", codecs.decode_sum)
requantize = timed("codec", codecs.requantize)
encode_to = timed("codec", addressed.encode_to)
requantize_to = timed("codec", addressed.requantize_to)


def all_reduce(
    tensor: Tensor,
    codec: CodecConfig,
    group: Group,
    *,
    op: ReduceOp = "sum",
    seed: int = 0,
    one_shot: bool | None = None,
    num_slices: int = 1,
) -> Tensor:
    """The sum or average of `tensor` over the ranks of `group`.

    1. Two ranks (one-shot): each encodes the tensor whole, all-gathers the messages, decodes and adds both.
    2. More (two-shot): each encodes one chunk per rank, an all-to-all brings the chunks together, their owner adds them
       without leaving the rotated domain and quantises the sum, an all-gather spreads it, all decode.

    Args:
        tensor: bf16, fp16 or fp32, any shape, the same on all ranks.
        codec: with its element resolved.
        group: a process group, or a transport.
        op: ``"sum"`` or ``"avg"``; the average is taken in fp32.
        seed: of stochastic rounding, from 0 to 2^62 - 1, the same on all ranks; each rank draws its own numbers of it.
        one_shot: which of the two, the same on all ranks; by default the first for two ranks only. With more it sends
            P / 2 times the bytes, in one step less, and quantises once: small tensors may gain.
        num_slices: in which it goes, the same on all ranks.

    Returns:
        A new tensor of the same shape and dtype, with the same bits on every rank.

    Raises:
        ValueError: for another `op`.

    Cost: each rank sends P - 1 times (one-shot) or 2 (P - 1) / P times (two-shot) the values as codes; one or two
        quantisations of each value; 2 or 3 launches a slice.

    Source: TACO, arXiv 2604.24088, two-shot all-reduce; the one-shot for two ranks sends the same bytes.
    """
    _require_op(op)
    transport = _transport(group)
    num_ranks = transport.world_size
    if num_ranks == 1 or tensor.numel() == 0:
        return tensor.clone()
    values, average = tensor.reshape(-1), op == "avg"
    if num_ranks == 2 if one_shot is None else one_shot:
        return _one_shot(values, codec, transport, average, seed, num_slices).view(tensor.shape)
    return _two_shot(values, codec, transport, average, seed, num_slices).view(tensor.shape)


def _one_shot(
    values: Tensor, codec: CodecConfig, transport: Transport, average: bool, seed: int, num_slices: int
) -> Tensor:
    cuts = row_views.cuts(values.numel(), num_slices, codec)
    pending = [
        transport.start_all_gather(message, len(cuts) > 1)
        for message in _encoded(values.view(1, -1), cuts, codec, transport, seed)
    ]
    total = torch.empty_like(values)
    with transport.receiving(len(cuts) > 1):
        for (start, stop), messages in zip(cuts, pending, strict=True):
            decode_sum(messages.wait(), codec, stop - start, values.dtype, average=average, out=total[start:stop])
    return total


def _two_shot(
    values: Tensor, codec: CodecConfig, transport: Transport, average: bool, seed: int, num_slices: int
) -> Tensor:
    num_ranks, num_values = transport.world_size, values.numel()
    chunk = chunk_values(num_values, num_ranks, codec)
    values = F.pad(values, (0, num_ranks * chunk - num_values)) if num_ranks * chunk != num_values else values
    cuts = row_views.cuts(chunk, num_slices, codec)
    is_sliced = len(cuts) > 1
    scattered = [
        transport.start_all_to_all(messages, is_sliced)
        for messages in _encoded(values.view(num_ranks, chunk), cuts, codec, transport, seed)
    ]
    own_seed, gathered = _rank_seed(seed, num_ranks + transport.rank), []
    for (start, stop), messages in zip(cuts, scattered, strict=True):
        received, first_block = messages.wait(), start // codec.block_size
        out = transport.message_buffer(1, received.shape[1])
        own_sum: Messages
        if out is None:
            own_sum = requantize(received, codec, stop - start, average=average, seed=own_seed, first_block=first_block)
        else:
            own_sum = requantize_to(
                out, received, codec, stop - start, average=average, seed=own_seed, first_block=first_block
            )
        gathered.append(transport.start_all_gather(own_sum, is_sliced))
    total = values.new_empty(num_ranks, chunk)
    with transport.receiving(is_sliced):
        for (start, stop), sums in zip(cuts, gathered, strict=True):
            decode(sums.wait(), codec, stop - start, values.dtype, out=total[:, start:stop])
    return total.view(-1)[:num_values]


def reduce_scatter(
    tensor: Tensor,
    codec: CodecConfig,
    group: Group,
    *,
    dim: int = 0,
    op: ReduceOp = "sum",
    seed: int = 0,
    num_slices: int = 1,
) -> Tensor:
    """This rank's shard, along `dim`, of the sum or average of `tensor` over the ranks of `group`.

    Args:
        tensor: bf16, fp16 or fp32, the same shape on all ranks.
        codec: with its element resolved.
        group: a process group, or a transport.
        dim: the dim that is scattered. Shards are those of `torch.chunk`: the last ones may be short or empty.
        op: ``"sum"`` or ``"avg"``; the average is taken in fp32.
        seed: of stochastic rounding, from 0 to 2^62 - 1, the same on all ranks; each rank draws its own numbers of it.
        num_slices: in which it goes, the same on all ranks.

    Returns:
        The shard, contiguous, in the dtype of `tensor`.

    Raises:
        ValueError: for another `op`.

    Cost: each rank sends (P - 1) / P of the values as codes; one quantisation; 2 launches a slice; and a copy if the
        tensor is not contiguous, or cut within blocks.
    """
    _require_op(op)
    transport = _transport(group)
    num_ranks = transport.world_size
    if num_ranks == 1:
        return tensor.clone()
    rows, shard_shape = row_views.rows_of(tensor, num_ranks, dim, codec)
    own_size, num_values = _shard_size(tensor.shape[dim], num_ranks, transport.rank), rows.shape[1:].numel()
    shard = tensor.new_empty(num_values)
    cuts = row_views.cuts(num_values, num_slices, codec, rows)
    pending = [
        transport.start_all_to_all(messages, len(cuts) > 1) for messages in _encoded(rows, cuts, codec, transport, seed)
    ]
    with transport.receiving(len(cuts) > 1):
        for (start, stop), messages in zip(cuts, pending, strict=True):
            decode_sum(messages.wait(), codec, stop - start, tensor.dtype, average=op == "avg", out=shard[start:stop])
    return shard.view(shard_shape).narrow(dim, 0, own_size).contiguous()


def all_gather(
    tensor: Tensor,
    codec: CodecConfig,
    group: Group,
    *,
    dim: int = 0,
    full_size: int | None = None,
    seed: int = 0,
    num_slices: int = 1,
) -> Tensor:
    """The shards of all ranks of `group`, joined along `dim`.

    Args:
        tensor: this rank's shard; bf16, fp16 or fp32.
        codec: with its element resolved.
        group: a process group, or a transport.
        dim: the dim along which shards are joined.
        full_size: size of `dim` in the result, if shards are uneven as `torch.chunk` makes them (the last ones short or
            empty); left out, all ranks hold shards of the same shape.
        seed: of stochastic rounding, as for `all_reduce`.
        num_slices: in which it goes, the same on all ranks.

    Returns:
        The joined tensor, contiguous, with the same bits on every rank: the own shard too has gone through the codec.

    Raises:
        ValueError: for a shard that is not the one `torch.chunk` gives this rank of `full_size`.

    Cost: each rank sends its values P - 1 times as codes; one quantisation; 2 launches a slice; and a copy if shards
        are joined within blocks, or are uneven.
    """
    transport = _transport(group)
    num_ranks = transport.world_size
    if num_ranks == 1:
        return tensor.clone()
    shard, sizes = _padded_shard(tensor, num_ranks, transport.rank, dim, full_size)
    if shard.numel() == 0:
        return torch.cat([shard.narrow(dim, 0, size) for size in sizes], dim)
    out = None if full_size is not None else row_views.joined_rows(list(shard.shape), num_ranks, dim, codec, shard)
    joined, rows = out or (None, shard.new_empty(num_ranks, shard.numel()))
    values = shard.reshape(1, -1)
    cuts = row_views.cuts(shard.numel(), num_slices, codec, rows)
    pending = [
        transport.start_all_gather(message, len(cuts) > 1) for message in _encoded(values, cuts, codec, transport, seed)
    ]
    with transport.receiving(len(cuts) > 1):
        for (start, stop), messages in zip(cuts, pending, strict=True):
            decode(messages.wait(), codec, stop - start, tensor.dtype, out=row_views.part(rows, start, stop))
    if joined is not None:
        return joined
    shards = rows.view(num_ranks, *shard.shape)
    if full_size is not None:
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(shards, sizes, strict=True)], dim)
    return _join(shards, dim)


def all_to_all(
    tensor: Tensor,
    codec: CodecConfig,
    group: Group,
    *,
    gather_dim: int,
    scatter_dim: int,
    seed: int = 0,
    num_slices: int = 1,
) -> Tensor:
    """Scatter `tensor` along one dim and join what arrives along another: a change of the dim that is sharded.

    Args:
        tensor: bf16, fp16 or fp32, the same shape on all ranks.
        codec: with its element resolved.
        group: a process group, or a transport.
        gather_dim: the dim along which the received shards are joined.
        scatter_dim: the dim that is scattered; its size is a multiple of the number of ranks.
        seed: of stochastic rounding, as for `all_reduce`.
        num_slices: in which it goes, the same on all ranks.

    Returns:
        The joined shards, contiguous; the own shard too has gone through the codec.

    Raises:
        ValueError: when the number of ranks does not divide the size of `scatter_dim`.

    Cost: each rank sends (P - 1) / P of the values as codes; one quantisation; 2 launches a slice, and a copy for each
        of the dims that cuts blocks.
    """
    transport = _transport(group)
    num_ranks = transport.world_size
    if num_ranks == 1:
        return tensor.clone()
    if tensor.shape[scatter_dim] % num_ranks:
        raise ValueError(
            f"dim {scatter_dim} has size {tensor.shape[scatter_dim]}, which {num_ranks} ranks do not divide; "
            "pad it first."
        )
    sent, shard_shape = row_views.rows_of(tensor, num_ranks, scatter_dim, codec)
    num_values = sent.shape[1:].numel()
    if num_values == 0:
        return _join(sent.view(num_ranks, *shard_shape), gather_dim)
    out = row_views.joined_rows(shard_shape, num_ranks, gather_dim, codec, tensor)
    joined, rows = out or (None, tensor.new_empty(num_ranks, num_values))
    cuts = row_views.cuts(num_values, num_slices, codec, sent, rows)
    pending = [
        transport.start_all_to_all(messages, len(cuts) > 1) for messages in _encoded(sent, cuts, codec, transport, seed)
    ]
    with transport.receiving(len(cuts) > 1):
        for (start, stop), messages in zip(cuts, pending, strict=True):
            decode(messages.wait(), codec, stop - start, tensor.dtype, out=row_views.part(rows, start, stop))
    return joined if joined is not None else _join(rows.view(num_ranks, *shard_shape), gather_dim)


def _encoded(
    rows: Tensor, cuts: list[tuple[int, int]], codec: CodecConfig, transport: Transport, seed: int
) -> Iterator[Messages]:
    """The messages of each slice of `rows`, encoded when they are asked for."""
    require_resolved(codec)
    own_seed, row_blocks = _rank_seed(seed, transport.rank), -(-rows.shape[1:].numel() // codec.block_size)
    for start, stop in cuts:
        values = row_views.part(rows, start, stop)
        out = transport.message_buffer(rows.shape[0], codecs.MessageLayout.of(stop - start, codec).message_bytes)
        first_block = start // codec.block_size
        if out is None:
            yield encode(values, codec, seed=own_seed, first_block=first_block, row_blocks=row_blocks)
        else:
            yield encode_to(out, values, codec, seed=own_seed, first_block=first_block, row_blocks=row_blocks)


def _transport(group: Group) -> Transport:
    return timed_transport(ProcessGroupTransport(group) if isinstance(group, dist.ProcessGroup) else group)


def _rank_seed(seed: int, place: int) -> int:
    """A seed of its own for each rank, and for the second quantisation of a two-shot."""
    return (seed + (place + 1) * SEED_STEP) % SEED_RANGE


def _require_op(op: str) -> None:
    if op not in ("sum", "avg"):
        raise ValueError(f"op={op!r} cannot be compressed; use 'sum' or 'avg', or the collective of torch.distributed.")


def _shard_size(full_size: int, num_ranks: int, rank: int) -> int:
    """Size of the shard that `torch.chunk` gives `rank`."""
    chunk = -(-full_size // num_ranks)
    return max(0, min(full_size, (rank + 1) * chunk) - rank * chunk)


def _padded_shard(
    tensor: Tensor, num_ranks: int, rank: int, dim: int, full_size: int | None
) -> tuple[Tensor, list[int]]:
    """The shard filled up to the size of the largest one, and the sizes of all shards."""
    if full_size is None:
        return tensor, [tensor.shape[dim]] * num_ranks
    sizes = [_shard_size(full_size, num_ranks, peer) for peer in range(num_ranks)]
    if tensor.shape[dim] != sizes[rank]:
        raise ValueError(
            f"rank {rank} holds {tensor.shape[dim]} of dim {dim}, but of full_size={full_size} over {num_ranks} ranks "
            f"it should hold {sizes[rank]}; cut shards with torch.chunk, or leave full_size out for equal shards."
        )
    missing = sizes[0] - sizes[rank]
    if missing:
        padding = list(tensor.shape)
        padding[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(padding)], dim)
    return tensor, sizes


def _join(shards: Tensor, dim: int) -> Tensor:
    """``[P, *shard]`` -> the shards joined along `dim` of the shard."""
    dim = dim % (shards.dim() - 1)
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous()
