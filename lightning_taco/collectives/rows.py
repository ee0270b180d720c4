"""How a tensor is seen as one row of values for each rank, without a copy where its blocks allow it.

A contiguous tensor that is cut (or joined) along `dim` over P ranks is ``[outer, P, L]``: row p is made of `outer`
segments of L values, P L apart. The codec reads and writes them where they are, if L is a multiple of its block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_taco.config import CodecConfig


def rows_of(tensor: Tensor, num_ranks: int, dim: int, codec: CodecConfig) -> tuple[Tensor, list[int]]:
    """`tensor` as a row for each rank, short shards filled up with zeros, and the shape of a shard.

    Returns:
        ``[P, S, L]``, a view, where segments are whole blocks, or else ``[P, N]``, which may be a copy.
    """
    dim = dim % tensor.dim()
    chunk = -(-tensor.shape[dim] // num_ranks)
    missing = chunk * num_ranks - tensor.shape[dim]
    if missing:
        padding = list(tensor.shape)
        padding[dim] = missing
        tensor = torch.cat([tensor, tensor.new_zeros(padding)], dim)
    shard_shape = [*tensor.shape[:dim], chunk, *tensor.shape[dim + 1 :]]
    if tensor.is_contiguous() and math.prod(shard_shape[dim:]) % codec.block_size == 0 and tensor.numel():
        return rows_in_place(tensor, num_ranks, dim), shard_shape
    rows = tensor.unflatten(dim, (num_ranks, chunk)).movedim(dim, 0)
    return rows.reshape(num_ranks, -1), shard_shape


def joined_rows(
    shard_shape: list[int], num_ranks: int, dim: int, codec: CodecConfig, like: Tensor
) -> tuple[Tensor, Tensor] | None:
    """An empty tensor of shards joined along `dim`, and its rows; ``None`` where segments would cut blocks."""
    dim = dim % len(shard_shape)
    length = math.prod(shard_shape[dim:])
    if length == 0 or length % codec.block_size:
        return None
    joined = like.new_empty([*shard_shape[:dim], num_ranks * shard_shape[dim], *shard_shape[dim + 1 :]])
    return joined, rows_in_place(joined, num_ranks, dim)


def rows_in_place(tensor: Tensor, num_ranks: int, dim: int) -> Tensor:
    """``[P, S, L]``, or ``[P, N]`` when there is one segment, of a contiguous tensor that P divides along `dim`."""
    outer = math.prod(tensor.shape[:dim])
    rows = tensor.view(outer, num_ranks, -1).transpose(0, 1)
    return rows if outer > 1 else rows.flatten(1)


def cuts(num_values: int, num_slices: int, codec: CodecConfig, *rows: Tensor | None) -> list[tuple[int, int]]:
    """First and last (not included) value of up to `num_slices` slices of a row, which cut neither blocks nor segments.

    >>> cuts(1000, 2, CodecConfig(element="int8", block_size=128))
    [(0, 512), (512, 1000)]
    """
    lengths = [each.shape[2] for each in rows if each is not None and each.dim() == 3]
    unit = math.lcm(codec.block_size, *lengths)
    num_units = -(-num_values // unit)
    step = max(1, -(-num_units // max(1, num_slices))) * unit
    return [(start, min(num_values, start + step)) for start in range(0, num_values, step)]


def part(rows: Tensor, start: int, stop: int) -> Tensor:
    """Values `start` to `stop` of each row, a view; in rows of segments, of whole ones."""
    if rows.dim() == 2:
        return rows if stop - start == rows.shape[1] else rows[:, start:stop]
    length = rows.shape[2]
    return rows[:, start // length : stop // length]
