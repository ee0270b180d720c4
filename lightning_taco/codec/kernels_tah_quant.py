"""TAH-Quant as Triton kernels: tiles to codes and ranges, and back. `codec.tah_quant_reference` has the same bits.

Which tokens have 3 bits, and where the fourth bits of the others lie, comes from `codec.kernels_token_entropy`.

A program owns C.tile consecutive tiles of 64 channels, held in parts as in `codec.kernels`: each thread has a whole
tile. Example: 2 samples of 3 tokens of 100 channels: 12 tiles, of which one program has all; tile 5 is the second of
token 2, with channels 64 to 99 and 28 zeros.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.constants import KernelConstants
from lightning_taco.codec.kernel_launch import SEEDS, launch, seed_halves
from lightning_taco.codec.kernels_planes import joined, load_plane, packed, store_plane, unpacked, with_higher_bits
from lightning_taco.codec.kernels_scales import largest_bits
from lightning_taco.codec.kernels_tah_tiles import (
    extremes,
    from_16_bits,
    pivots,
    places,
    rotated_where,
    swapped,
    tile_codes,
    tile_ranges,
)
from lightning_taco.codec.kernels_token_entropy import choose_tokens_triton, slots_triton
from lightning_taco.codec.tah_quant_layout import FEW_BITS, MANY_BITS, TILE_SIZE, TahQuantLayout
from lightning_taco.codec.tah_quant_reference import CONSTANT_FLAG, LARGEST_ROTATED, ROTATED_FLAG
from lightning_taco.config import CodecConfig

if TYPE_CHECKING:
    from lightning_taco.codec.tah_quant import TahQuant

_INF_BITS = tl.constexpr(0x7F800000)
_LARGEST_ROTATED = tl.constexpr(LARGEST_ROTATED)
_ROTATED_FLAG, _CONSTANT_FLAG = tl.constexpr(ROTATED_FLAG), tl.constexpr(CONSTANT_FLAG)
_FEW_STEPS, _MANY_STEPS = tl.constexpr(float((1 << FEW_BITS) - 1)), tl.constexpr(float((1 << MANY_BITS) - 1))
ROTATION_NUMBERS = {"never": 0, "gated": 1, "always": 2}
_NEVER, _GATED = (tl.constexpr(ROTATION_NUMBERS[rotation]) for rotation in ("never", "gated"))


@triton.jit
def _fourth_place(slots_ptr, token, tile_of_token, tiles_per_token, valid):
    """Where the fourth bits of each tile lie, in tiles, int64, and whether it has any."""
    slot = tl.load(slots_ptr + token, mask=valid, other=-1).to(tl.int64)
    return slot * tiles_per_token + tile_of_token, slot >= 0


@triton.jit(do_not_specialize=SEEDS)
def encode_kernel(
    values_ptr,
    slots_ptr,
    message_ptr,
    num_channels,
    row_stride,
    num_tiles,
    tiles_per_token,
    flags_offset,
    ranges_offset,
    low_offset,
    third_offset,
    fourth_offset,
    seed_low,
    seed_high,
    ROTATION: tl.constexpr,
    IS_BF16: tl.constexpr,
    TAIL: tl.constexpr,  # whether a token's last tile lacks channels
    C: tl.constexpr,
):
    """values [tokens, num_channels] and slots int32 [tokens] -> all of a message but its map."""
    PARTS: tl.constexpr = C.parts
    tiles = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    valid = tiles < num_tiles
    token = tiles // tiles_per_token
    tile_of_token = tiles - token * tiles_per_token
    row = values_ptr + token[:, None] * row_stride
    parts = ()
    for part in tl.static_range(PARTS):
        channel = tile_of_token[:, None] * C.block_size + places(part, C)
        values = tl.load(row + channel, mask=valid[:, None] & (channel < num_channels), other=0.0)
        parts = parts + (values.to(tl.float32),)
    fourth_place, has_fourth = _fourth_place(slots_ptr, token, tile_of_token, tiles_per_token, valid)
    steps = tl.where(has_fourth, _MANY_STEPS, _FEW_STEPS)

    first = largest_bits(parts, C)
    num_values = (num_channels - tile_of_token * C.block_size).to(tl.int32)
    lowest, highest = extremes(parts, num_values, C, TAIL)
    flags = tl.full([C.tile], 0, tl.int32)
    if ROTATION != _NEVER:
        pivot, second = pivots(parts, C)
        magnitude = first.to(tl.float32, bitcast=True)
        is_rotated = (lowest < highest) & (magnitude < _LARGEST_ROTATED)
        if ROTATION == _GATED:
            is_rotated = is_rotated & (magnitude >= 2.0 * second.to(tl.float32, bitcast=True))
        pivot = tl.where(is_rotated, pivot, 0)
        parts = rotated_where(is_rotated, swapped(parts, pivot, C), C)
        lowest, highest = extremes(parts, tl.where(is_rotated, C.block_size, num_values), C, TAIL)
        flags = tl.where(is_rotated, pivot | _ROTATED_FLAG, 0)
    zero, step, is_constant, word = tile_ranges(lowest, highest, steps, first < _INF_BITS, IS_BF16)
    codes = tile_codes(parts, zero, step, is_constant, steps, tiles, seed_low, seed_high, C)
    words = ()
    for part in tl.static_range(PARTS):
        words = words + (packed(codes[part], C),)

    flags = flags | tl.where(is_constant, _CONSTANT_FLAG, 0)
    tl.store(message_ptr + flags_offset + tiles, flags.to(tl.uint8), mask=valid)
    tl.store((message_ptr + ranges_offset).to(tl.pointer_type(tl.int32)) + tiles, word, mask=valid)
    store_plane(message_ptr + low_offset, words, tiles, valid, 0, 2, C)
    store_plane(message_ptr + third_offset, words, tiles, valid, 2, 1, C)
    store_plane(message_ptr + fourth_offset, words, fourth_place, has_fourth, 3, 1, C)


@triton.jit
def decode_kernel(
    message_ptr,
    slots_ptr,
    values_ptr,
    num_channels,
    num_tiles,
    tiles_per_token,
    flags_offset,
    ranges_offset,
    low_offset,
    third_offset,
    fourth_offset,
    IS_BF16: tl.constexpr,
    C: tl.constexpr,
):
    """A message and its slots, int32 [tokens] -> values [tokens, num_channels]."""
    PARTS: tl.constexpr = C.parts
    tiles = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    valid = tiles < num_tiles
    token = tiles // tiles_per_token
    tile_of_token = tiles - token * tiles_per_token
    fourth_place, has_fourth = _fourth_place(slots_ptr, token, tile_of_token, tiles_per_token, valid)
    codes = load_plane(message_ptr + low_offset, tiles, valid, 2, C)
    codes = with_higher_bits(codes, load_plane(message_ptr + third_offset, tiles, valid, 1, C), 2, C)
    fourth = load_plane(message_ptr + fourth_offset, fourth_place, has_fourth, 1, C)
    codes = with_higher_bits(codes, fourth, 3, C)

    flags = tl.load(message_ptr + flags_offset + tiles, mask=valid, other=0).to(tl.int32)
    ranges = (message_ptr + ranges_offset).to(tl.pointer_type(tl.int32))
    word = tl.load(ranges + tiles, mask=valid, other=0)
    zero, step = from_16_bits((word >> 16) & 0xFFFF, IS_BF16), from_16_bits(word & 0xFFFF, IS_BF16)
    is_constant = ((flags & _CONSTANT_FLAG) != 0)[:, None]
    constant = word.to(tl.float32, bitcast=True)[:, None]
    parts = ()
    for part in tl.static_range(PARTS):
        coded = unpacked(codes[part], 0, C).to(tl.float32) * step[:, None] + zero[:, None]
        parts = parts + (tl.where(is_constant, constant, coded),)
    parts = rotated_where((flags & _ROTATED_FLAG) != 0, parts, C)
    parts = swapped(parts, flags & (C.block_size - 1), C)

    rounded = ()
    for part in tl.static_range(PARTS):
        rounded = rounded + (parts[part].to(values_ptr.dtype.element_ty),)
    channel = tile_of_token[:, None] * C.block_size + tl.arange(0, C.block_size)[None, :]
    place = values_ptr + token[:, None] * num_channels + channel
    tl.store(place, joined(rounded, C.parts, C), mask=valid[:, None] & (channel < num_channels))


@cache
def tile_constants(is_stochastic: bool) -> KernelConstants:
    """How a tile is held: as a block of 64 of the other codecs."""
    codec = CodecConfig(element="int3", block_size=TILE_SIZE)  # planes of 2 bits and of 1, as here
    return replace(KernelConstants.of(codec, False, False), is_stochastic=is_stochastic)


def _grid(layout: TahQuantLayout, constants: KernelConstants) -> tuple[int, int, int]:
    return -(-layout.num_tiles // constants.tile), 1, 1


def encode_triton(tokens: Tensor, layout: TahQuantLayout, codec: TahQuant, message: Tensor, *, seed: int = 0) -> Tensor:
    """`encode_reference` of `tokens` ``[num_tokens, channels]``, of contiguous rows, into `message`; three launches."""
    if layout.message_bytes == 0:
        return message
    slots = choose_tokens_triton(tokens, layout, message)
    constants = tile_constants(codec.rounding == "stochastic")
    sizes = (layout.num_channels, tokens.stride(0), layout.num_tiles, layout.tiles_per_token)
    offsets = (layout.flags_offset, layout.ranges_offset, *layout.plane_offsets)
    has_tail = layout.num_channels % TILE_SIZE != 0
    fixed = (ROTATION_NUMBERS[codec.rotation], codec.scale_format == "bfloat16", has_tail, constants)
    arguments = (tokens, slots, message, *sizes, *offsets, *seed_halves(seed))
    launch(encode_kernel, _grid(layout, constants), arguments, fixed)
    return message


def decode_triton(message: Tensor, layout: TahQuantLayout, codec: TahQuant, values: Tensor) -> Tensor:
    """`decode_reference` into `values` ``[num_tokens, channels]``, contiguous; two launches."""
    if layout.message_bytes == 0:
        return values
    slots, constants = slots_triton(message, layout), tile_constants(False)
    sizes = (layout.num_channels, layout.num_tiles, layout.tiles_per_token)
    offsets = (layout.flags_offset, layout.ranges_offset, *layout.plane_offsets)
    arguments = (message, slots, values, *sizes, *offsets)
    launch(decode_kernel, _grid(layout, constants), arguments, (codec.scale_format == "bfloat16", constants))
    return values
