"""The oracle of TAH-Quant, in plain torch, written to be read; `codec.kernels_tah_quant` gives the same bits.

Per tile ``a`` of 64 channels of a token, in fp32, b = 3 or 4 its token's bits (`codec.token_entropy_reference`):

    first, second   = the largest |a| and the second largest; pivot = where the first is, of equal ones the first
    is_rotated      = first >= 2 second        ("gated"; "always" and "never" as they say)
    y               = H_64 swap(a) / 8         if it is rotated: swap exchanges positions 0 and pivot; else y = a
    zero, scale     = min y, (max y - min y) / (2^b - 1)        each rounded to 16 bits
    codes           = round((y - zero) / scale)                 to nearest, ties to even; or stochastically

    decode:   y' = codes scale + zero;   a' = swap(H_64 y' / 8) or y'

With the largest value in front, the Hadamard matrix turns it into a constant, which `zero` takes up.

Where we differ from the paper (arXiv 2506.01352):

* Scale and zero are bf16 unless ``scale_format="float16"`` asks for the paper's fp16: the same 16 bits, a common shift
  of at most 2^-9 of the zero, and no range to leave. In fp16 steps below 6e-8 become 0, so that a tile of small values
  arrives as one value, and a tile whose zero or scale is beyond 65504 arrives as NaN.
* A tile whose y are all equal sends that one value in fp32 in place of zero and scale, and is exact. Such are tiles of
  zeros, and of one value among zeros, whose rotation is constant. A constant tile is never rotated.
* A tile with a NaN or an Inf arrives as NaN.
* A tile with a value from 2^120 up is not rotated, so that nothing overflows; one beyond 2^126 may arrive as Inf. In a
  tile whose step would be below 2^-120 all values become its smallest.
* The channels that a last tile lacks count as zeros in a rotation and for nothing else; what is decoded there is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_taco.codec.reference import hadamard_transform_reference
from lightning_taco.codec.rounding import pack_plane, random_bits, uniform_numbers, unpack_plane
from lightning_taco.codec.tah_quant_layout import (
    FEW_BITS,
    MANY_BITS,
    PLANE_BYTES,
    RANGE_BYTES,
    TILE_SIZE,
    TahQuantLayout,
)
from lightning_taco.codec.token_entropy_reference import few_bits_tokens_reference

if TYPE_CHECKING:
    from lightning_taco.codec.tah_quant import TahQuant

SMALLEST_STEP = 2.0**-120
LARGEST_ROTATED = 2.0**120
BF16_MAX = torch.finfo(torch.bfloat16).max
ROTATED_FLAG, CONSTANT_FLAG = 1 << 6, 1 << 7


class _Ranges(NamedTuple):
    """Of each tile, ``[num_tiles, 1]``: where codes start, how far they lie apart, what of it is sent."""

    zero: Tensor
    step: Tensor
    is_constant: Tensor
    word: Tensor


def encode_reference(tokens: Tensor, layout: TahQuantLayout, codec: TahQuant, seed: int) -> Tensor:
    """Encode `tokens`, bf16, fp16 or fp32 ``[samples, tokens, channels]``, to ``uint8 [message_bytes]``."""
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=tokens.device)
    if layout.message_bytes == 0:
        return message
    is_few = few_bits_tokens_reference(tokens, layout.few_per_sample)
    is_few_tile = is_few.reshape(-1, 1).repeat_interleave(layout.tiles_per_token, dim=0)
    tiles, is_channel = _tiles(tokens.float(), layout)
    pivot, is_rotated = _pivots(tiles, is_channel, codec.rotation)
    coded = torch.where(is_rotated, _rotate(_swap(tiles, pivot)), tiles)
    num_steps = torch.where(is_few_tile, float((1 << FEW_BITS) - 1), float((1 << MANY_BITS) - 1))
    ranges = _ranges(coded, is_channel | is_rotated, num_steps, codec.scale_format)
    codes = _codes(coded, ranges, num_steps, codec.rounding, seed)

    flags = pivot * is_rotated + ROTATED_FLAG * is_rotated + CONSTANT_FLAG * ranges.is_constant
    _map(message, layout).copy_(_pack_map(is_few))
    _part(message, layout.flags_offset, flags.numel()).copy_(flags.view(-1))
    _words(message, layout).copy_(ranges.word.view(-1))
    for plane, bits in zip(_planes(message, layout), _code_planes(codes, is_few_tile.view(-1)), strict=True):
        plane.copy_(bits)
    return message


def decode_reference(message: Tensor, layout: TahQuantLayout, codec: TahQuant, dtype: torch.dtype) -> Tensor:
    """Decode ``uint8 [message_bytes]`` to ``[samples, tokens, channels]`` of `dtype`."""
    shape = (layout.num_samples, layout.tokens_per_sample, layout.num_channels)
    if layout.message_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=message.device)
    is_few = _unpack_map(_map(message, layout), layout)
    is_many_tile = ~is_few.view(-1).repeat_interleave(layout.tiles_per_token)
    low, third, fourth = _planes(message, layout)
    codes = unpack_plane(low, 2) | (unpack_plane(third, 1) << 2)
    codes[is_many_tile] |= unpack_plane(fourth, 1) << 3

    flags = _part(message, layout.flags_offset, layout.num_tiles).long().unsqueeze(-1)
    word = _words(message, layout).unsqueeze(-1)
    zero, step = _from_16_bits(word >> 16, codec.scale_format), _from_16_bits(word & 0xFFFF, codec.scale_format)
    coded = codes.float() * step + zero
    coded = torch.where((flags & CONSTANT_FLAG) != 0, word.view(torch.float32), coded)
    rotated_back = _swap(_rotate(coded), flags & (TILE_SIZE - 1))
    tiles = torch.where((flags & ROTATED_FLAG) != 0, rotated_back, coded)
    channels = tiles.view(layout.num_tokens, -1)[:, : layout.num_channels]
    return channels.to(dtype).reshape(shape)


def _tiles(tokens: Tensor, layout: TahQuantLayout) -> tuple[Tensor, Tensor]:
    """fp32 ``[num_tiles, 64]``, zeros where a last tile has no channel, and bool of that shape: where it has one."""
    missing = layout.tiles_per_token * TILE_SIZE - layout.num_channels
    tiles = torch.nn.functional.pad(tokens, (0, missing)).reshape(-1, TILE_SIZE)
    channel = torch.arange(layout.tiles_per_token * TILE_SIZE, device=tokens.device).view(-1, TILE_SIZE)
    return tiles, (channel < layout.num_channels).repeat(layout.num_tokens, 1)


def _pivots(tiles: Tensor, is_channel: Tensor, rotation: str) -> tuple[Tensor, Tensor]:
    """The place of the largest magnitude of each tile, and whether the tile is rotated; ``[num_tiles, 1]`` each."""
    magnitudes = tiles.abs()
    first = magnitudes.amax(-1, keepdim=True)
    pivot = (magnitudes == first).long().argmax(-1, keepdim=True)
    second = magnitudes.scatter(-1, pivot, 0.0).amax(-1, keepdim=True)
    lowest, highest = _extremes(tiles, is_channel)
    can_rotate = (lowest < highest) & (first < LARGEST_ROTATED)  # neither with a NaN
    if rotation == "never":
        return pivot, torch.zeros_like(can_rotate)
    return pivot, can_rotate & (first >= 2.0 * second) if rotation == "gated" else can_rotate


def _ranges(coded: Tensor, counts: Tensor, num_steps: Tensor, scale_format: str) -> _Ranges:
    lowest, highest = _extremes(coded, counts)
    # Halved, so that no difference of finite values overflows.
    step_bits = _to_16_bits((highest * 0.5 - lowest * 0.5) / (num_steps * 0.5), scale_format)
    step_bits = torch.where(_from_16_bits(step_bits, scale_format) < SMALLEST_STEP, 0, step_bits)
    zero_bits = _to_16_bits(lowest, scale_format)
    zero, step = _from_16_bits(zero_bits, scale_format), _from_16_bits(step_bits, scale_format)
    is_finite = torch.isfinite(highest) & torch.isfinite(lowest) & torch.isfinite(zero) & torch.isfinite(step)
    is_equal = lowest == highest
    constant = torch.where(is_equal & torch.isfinite(lowest), lowest, torch.nan)
    is_constant = is_equal | ~is_finite
    word = torch.where(is_constant, constant.view(torch.int32), (zero_bits << 16) | step_bits)
    return _Ranges(zero, step, is_constant, word)


def _extremes(tiles: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest of the values that count; a zero is a positive one, a NaN makes both NaN."""
    lowest = torch.where(counts, tiles, torch.inf).amin(-1, keepdim=True)
    highest = torch.where(counts, tiles, -torch.inf).amax(-1, keepdim=True)
    return lowest + 0.0, highest + 0.0


def _codes(coded: Tensor, ranges: _Ranges, num_steps: Tensor, rounding: str, seed: int) -> Tensor:
    """One ``uint8`` code a value, ``[num_tiles, 64]``; zeros in tiles that are constant, or have no step."""
    is_usable = ~ranges.is_constant & (ranges.step > 0)
    inverse = torch.ones_like(ranges.step) / torch.where(is_usable, ranges.step, 1.0)
    position = torch.minimum(((coded - ranges.zero) * inverse).clamp(min=0.0), num_steps)
    position = torch.where(is_usable, position, 0.0)
    if rounding == "stochastic":
        noise = uniform_numbers(random_bits(torch.Size((1, *coded.shape)), seed, coded.device)[0])
        position = torch.minimum((position + (noise - 0.5)).round().clamp(min=0.0), num_steps)
    return torch.where(is_usable, position.round(), 0.0).to(torch.uint8)


def _swap(tiles: Tensor, pivot: Tensor) -> Tensor:
    """Exchange the values at position 0 and at `pivot`, ``[num_tiles, 1]``, of each tile; its own inverse."""
    swapped = tiles.scatter(-1, pivot, tiles[:, :1])
    return torch.cat([tiles.gather(-1, pivot), swapped[:, 1:]], dim=-1)


def _rotate(tiles: Tensor) -> Tensor:
    """H_64 / 8, its own inverse; divided first, so that nothing overflows on the way."""
    return hadamard_transform_reference(tiles * 0.125)


def _to_16_bits(values: Tensor, scale_format: str) -> Tensor:
    """fp32 rounded to nearest, as the 16 bits of bf16, where what is finite stays so, or of fp16; int32."""
    if scale_format == "bfloat16":
        finite = torch.where(torch.isfinite(values), values.clamp(-BF16_MAX, BF16_MAX), values)
        return finite.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF
    return values.to(torch.float16).view(torch.int16).int() & 0xFFFF


def _from_16_bits(bits: Tensor, scale_format: str) -> Tensor:
    if scale_format == "bfloat16":
        return (bits << 16).view(torch.float32)
    return bits.to(torch.int16).view(torch.float16).float()


def _code_planes(codes: Tensor, is_few_tile: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return pack_plane(codes & 3, 2), pack_plane((codes >> 2) & 1, 1), pack_plane(codes[~is_few_tile] >> 3, 1)


def _pack_map(is_few: Tensor) -> Tensor:
    """bool ``[samples, tokens]`` -> ``uint8 [samples, map_row_bytes]``."""
    padded = torch.nn.functional.pad(is_few.to(torch.uint8), (0, -is_few.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded << torch.arange(8, device=is_few.device)).sum(-1).to(torch.uint8)


def _unpack_map(rows: Tensor, layout: TahQuantLayout) -> Tensor:
    bits = (rows.unsqueeze(-1) >> torch.arange(8, device=rows.device)) & 1
    return bits.flatten(1)[:, : layout.tokens_per_sample] == 1


def _part(message: Tensor, offset: int, num_bytes: int) -> Tensor:
    return message[offset : offset + num_bytes]


def _map(message: Tensor, layout: TahQuantLayout) -> Tensor:
    return message[: layout.num_samples * layout.map_row_bytes].view(layout.num_samples, layout.map_row_bytes)


def _words(message: Tensor, layout: TahQuantLayout) -> Tensor:
    """The ranges, int32 ``[num_tiles]``, as a view."""
    return _part(message, layout.ranges_offset, RANGE_BYTES * layout.num_tiles).view(torch.int32)


def _planes(message: Tensor, layout: TahQuantLayout) -> list[Tensor]:
    """The planes, ``uint8 [tiles, bytes of a tile]``, as views."""
    tiles_of_many = layout.num_tiles - layout.num_samples * layout.few_per_sample * layout.tiles_per_token
    counts = (layout.num_tiles, layout.num_tiles, tiles_of_many)
    parts = zip(layout.plane_offsets, counts, PLANE_BYTES, strict=True)
    return [_part(message, offset, count * width).view(count, width) for offset, count, width in parts]
