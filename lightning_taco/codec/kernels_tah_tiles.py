"""What the kernels of TAH-Quant do to a tile: pivot, rotation, range and codes; functions of Triton only.

A program's tiles come as parts of [tile, width], as in `codec.kernels`; what there is one of a tile is [tile]. The
oracle is `codec.tah_quant_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_taco.codec.kernels_numbers import (
    hadamard,
    random_key,
    random_pair,
    round_to_integer,
    scaled,
    uniform_numbers,
)
from lightning_taco.codec.kernels_scales import largest_bits
from lightning_taco.codec.tah_quant_reference import BF16_MAX, SMALLEST_STEP

_ABS_MASK, _INF_BITS, _NAN_BITS = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_BF16_MAX, _SMALLEST_STEP = tl.constexpr(BF16_MAX), tl.constexpr(SMALLEST_STEP)


@triton.jit
def places(part, C: tl.constexpr):
    """The places of a part's values in their tile, int32 [1, width]."""
    return (part * C.width + tl.arange(0, C.width))[None, :]


@triton.jit
def _at(parts, place, C: tl.constexpr):
    """The value of each tile at its place [tile], fp32 [tile], bit for bit."""
    PARTS: tl.constexpr = C.parts
    found = tl.full([C.tile, C.width], -(1 << 31), tl.int32)
    for part in tl.static_range(PARTS):
        bits = parts[part].to(tl.int32, bitcast=True)
        found = tl.where(places(part, C) == place[:, None], bits, found)
    is_there = (place[:, None] % C.width) == tl.arange(0, C.width)[None, :]
    return tl.max(tl.where(is_there, found, -(1 << 31)), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def swapped(parts, pivot, C: tl.constexpr):
    """Each tile with the values at places 0 and pivot [tile] exchanged; as it is where pivot is 0."""
    PARTS: tl.constexpr = C.parts
    front, largest = _at(parts, pivot * 0, C), _at(parts, pivot, C)
    exchanged = ()
    for part in tl.static_range(PARTS):
        values = tl.where(places(part, C) == pivot[:, None], front[:, None], parts[part])
        if part == 0:
            values = tl.where(places(part, C) == 0, largest[:, None], values)
        exchanged = exchanged + (values,)
    return exchanged


@triton.jit
def rotated_where(is_rotated, parts, C: tl.constexpr):
    """The tiles where is_rotated [tile] holds times H_64 / 8, the others as they are."""
    PARTS: tl.constexpr = C.parts
    rotated = hadamard(scaled(parts, 0.125, C), C)
    result = ()
    for part in tl.static_range(PARTS):
        result = result + (tl.where(is_rotated[:, None], rotated[part], parts[part]),)
    return result


@triton.jit
def pivots(parts, C: tl.constexpr):
    """The place of the largest magnitude of each tile, of equal ones the first, and the bits of the second largest."""
    PARTS: tl.constexpr = C.parts
    first = largest_bits(parts, C)[:, None]
    place = tl.full([C.tile, C.width], C.block_size, tl.int32)
    for part in tl.static_range(PARTS):
        is_first = (parts[part].to(tl.int32, bitcast=True) & _ABS_MASK) == first
        place = tl.minimum(place, tl.where(is_first, places(part, C), C.block_size))
    pivot = tl.min(place, axis=1)
    second = tl.full([C.tile, C.width], 0, tl.int32)
    for part in tl.static_range(PARTS):
        magnitude = parts[part].to(tl.int32, bitcast=True) & _ABS_MASK
        second = tl.maximum(second, tl.where(places(part, C) == pivot[:, None], 0, magnitude))
    return pivot, tl.max(second, axis=1)


@triton.jit
def extremes(parts, num_values, C: tl.constexpr, TAIL: tl.constexpr):
    """The lowest and the highest of the first num_values [tile] of each tile, fp32 [tile]; a zero is a positive one."""
    PARTS: tl.constexpr = C.parts
    lowest = tl.full([C.tile, C.width], (1 << 31) - 1, tl.int32)
    highest = tl.full([C.tile, C.width], -(1 << 31), tl.int32)
    for part in tl.static_range(PARTS):
        bits = parts[part].to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & _ABS_MASK)  # orders like the floats
        if TAIL:
            counts = places(part, C) < num_values[:, None]
            lowest = tl.minimum(lowest, tl.where(counts, ordered, (1 << 31) - 1))
            highest = tl.maximum(highest, tl.where(counts, ordered, -(1 << 31)))
        else:
            lowest, highest = tl.minimum(lowest, ordered), tl.maximum(highest, ordered)
    low, high = tl.min(lowest, axis=1), tl.max(highest, axis=1)
    low, high = low ^ ((low >> 31) & _ABS_MASK), high ^ ((high >> 31) & _ABS_MASK)
    return low.to(tl.float32, bitcast=True) + 0.0, high.to(tl.float32, bitcast=True) + 0.0


@triton.jit
def _to_16_bits(values, IS_BF16: tl.constexpr):
    """fp32 -> the bits of bf16, rounded by integer arithmetic, or of fp16, in the low half of int32."""
    if IS_BF16:
        clamped = tl.minimum(tl.maximum(values, -_BF16_MAX), _BF16_MAX)
        bits = clamped.to(tl.int32, bitcast=True)
        result = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    else:
        result = values.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return result


@triton.jit
def from_16_bits(bits, IS_BF16: tl.constexpr):
    """The low 16 bits of int32, those of bf16 or fp16 -> fp32."""
    if IS_BF16:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _is_finite(values):
    return (values.to(tl.int32, bitcast=True) & _ABS_MASK) < _INF_BITS


@triton.jit
def tile_ranges(lowest, highest, steps, is_finite, IS_BF16: tl.constexpr):
    """Zero, step, whether a tile is constant, and its word, [tile] each."""
    step_bits = _to_16_bits(tl.div_rn(highest * 0.5 - lowest * 0.5, steps * 0.5), IS_BF16)
    step_bits = tl.where(from_16_bits(step_bits, IS_BF16) < _SMALLEST_STEP, 0, step_bits)
    zero_bits = _to_16_bits(lowest, IS_BF16)
    zero, step = from_16_bits(zero_bits, IS_BF16), from_16_bits(step_bits, IS_BF16)
    is_equal = lowest == highest
    is_constant = is_equal | ~(is_finite & _is_finite(zero) & _is_finite(step))
    constant = tl.where(is_equal & is_finite, lowest.to(tl.int32, bitcast=True), _NAN_BITS)
    return zero, step, is_constant, tl.where(is_constant, constant, (zero_bits << 16) | step_bits)


@triton.jit
def tile_codes(parts, zero, step, is_constant, steps, tiles, seed_low, seed_high, C: tl.constexpr):
    """One code a value, parts of int32 [tile, width]; zeros in tiles that are constant, or have no step."""
    PARTS: tl.constexpr = C.parts
    is_usable = (~is_constant) & (step > 0)
    inverse = tl.div_rn(tl.full([C.tile], 1.0, tl.float32), tl.where(is_usable, step, 1.0))
    noise = ()
    if C.is_stochastic:
        key, behind = random_key(tiles, seed_low, seed_high), ()
        for part in tl.static_range(PARTS // 2):
            first, second = random_pair(key, part, C)
            noise, behind = noise + (first,), behind + (second,)
        noise = noise + behind
    codes = ()
    for part in tl.static_range(PARTS):
        position = (parts[part] - zero[:, None]) * inverse[:, None]
        position = tl.minimum(tl.maximum(position, 0.0), steps[:, None])
        position = tl.where(is_usable[:, None], position, 0.0)
        if C.is_stochastic:
            moved = round_to_integer(position + (uniform_numbers(noise[part]) - 0.5))
            code = tl.minimum(tl.maximum(moved, 0), steps.to(tl.int32)[:, None])
        else:
            code = round_to_integer(position)
        codes = codes + (code,)
    return codes
