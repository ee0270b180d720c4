"""Rounding and packing of codes in torch, bit for bit what the kernels do."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.elements import (
    CODE_MAX,
    FLOAT_FORMATS,
    GAUSSIAN_CENTRE,
    GAUSSIAN_EDGE,
    GAUSSIAN_INVERSE,
    MIX_FACTORS,
    MIX_SHIFTS,
    NF4_LEVELS,
    NF4_MIDPOINTS,
    PLACE_FACTOR,
    FloatFormat,
    gaussian_half,
)
from lightning_taco.codec.layout import plane_bits
from lightning_taco.config import BITS_PER_CODE, CodecConfig

FLOAT_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MASK_32 = 0xFFFFFFFF
_FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def round_to_codes(
    quantized: Tensor, codec: CodecConfig, seed: int, first_block: int = 0, row_blocks: int | None = None
) -> Tensor:
    """fp32 ``[R, num_blocks, block]`` within the format's range -> one ``uint8`` code a value, not packed."""
    noise = None
    if codec.rounding == "stochastic":
        noise = random_bits(quantized.shape, seed, quantized.device, first_block, row_blocks)
    if codec.element in FLOAT_FORMATS:
        if noise is None and codec.element in FLOAT_DTYPES:
            return quantized.to(FLOAT_DTYPES[codec.element]).view(torch.uint8)
        return _float_codes(quantized, noise, FLOAT_FORMATS[codec.element], BITS_PER_CODE[codec.element])
    code_max = CODE_MAX[codec.element]
    uniform = None if noise is None else uniform_numbers(noise)
    if codec.element == "nf4":
        return _nf4_codes(quantized, uniform)
    if codec.levels == "gaussian":
        rounded = _gaussian_codes(quantized, uniform, gaussian_half(BITS_PER_CODE[codec.element]))
    elif uniform is None:
        rounded = quantized.round()
    else:
        rounded = (quantized + (uniform - 0.5)).round().clamp(-code_max, code_max)
    return (rounded.to(torch.int32) & ((1 << BITS_PER_CODE[codec.element]) - 1)).to(torch.uint8)


def codes_to_values(codes: Tensor, codec: CodecConfig) -> Tensor:
    """One ``uint8`` code a value -> fp32."""
    if codec.element in FLOAT_DTYPES:
        return codes.view(FLOAT_DTYPES[codec.element]).float()
    if codec.element in ("fp4", "nf4"):
        levels = torch.tensor(_FP4_LEVELS if codec.element == "fp4" else NF4_LEVELS, device=codes.device)
        return levels[codes.long()]
    sign_bit = 1 << (BITS_PER_CODE[codec.element] - 1)
    integers = ((codes.to(torch.int32) ^ sign_bit) - sign_bit).float()
    return gaussian_levels(integers, sign_bit) if codec.levels == "gaussian" else integers


def gaussian_levels(codes: Tensor, half: int) -> Tensor:
    """Integer codes from -half to half, as fp32 -> their levels, exactly."""
    return codes * (codes * codes * (GAUSSIAN_EDGE / half**2) + GAUSSIAN_CENTRE)


def _gaussian_codes(quantized: Tensor, uniform: Tensor | None, half: int) -> Tensor:
    """fp32 from -half to half -> the code whose level is near it (up to 0.05 of a step off), as fp32.

    With random numbers: that code, or the next one towards the value, as often as the value lies between their levels.
    """
    place = quantized.abs() * (1.0 / half)
    first, second, third, fourth = GAUSSIAN_INVERSE
    position = quantized * (first + place * (second + place * (third + place * fourth)))
    if uniform is None:
        return position.round().clamp(-half, half - 1)
    nearest = (position + 0.5).floor()
    level = gaussian_levels(nearest, half)
    rest = quantized - level
    direction = torch.where(torch.signbit(rest), -1.0, 1.0)
    step = gaussian_levels(nearest + direction, half) - level
    return (nearest + direction * (uniform * step.abs() < rest.abs()).float()).clamp(-half, half - 1)


def pack(codes: Tensor, codec: CodecConfig) -> Tensor:
    """``uint8 [R, num_blocks, block]`` -> the bytes of the planes, ``uint8 [R, bytes]``."""
    planes = plane_bits(BITS_PER_CODE[codec.element])
    return torch.cat([pack_plane(codes >> first & ((1 << width) - 1), width).flatten(1) for first, width in planes], 1)


def unpack(planes: Tensor, codec: CodecConfig, num_blocks: int) -> Tensor:
    """The inverse of `pack`."""
    codes = torch.zeros(planes.shape[0], num_blocks, codec.block_size, dtype=torch.uint8, device=planes.device)
    for first, width in plane_bits(BITS_PER_CODE[codec.element]):
        start, block_bytes = num_blocks * codec.block_size * first // 8, codec.block_size * width // 8
        plane = planes[:, start : start + num_blocks * block_bytes].unflatten(1, (num_blocks, block_bytes))
        codes |= unpack_plane(plane, width) << first
    return codes


def pack_plane(values: Tensor, width: int) -> Tensor:
    """``uint8 [..., block]`` below ``2^width`` -> ``uint8 [..., block * width / 8]``."""
    while width < 8:
        values, width = _fold(values, width), 2 * width
    return values


def unpack_plane(values: Tensor, width: int) -> Tensor:
    """The inverse of `pack_plane`."""
    step = 4
    while step >= width:
        values, step = _unfold(values, step), step // 2
    return values


def random_bits(
    shape: torch.Size, seed: int, device: torch.device, first_block: int = 0, row_blocks: int | None = None
) -> Tensor:
    """16 random bits for each of ``[R, num_blocks, block]`` values, as int64: a function of position and seed only.

    Two values half a block apart share the 32 bits of one hash, of a key of their block and their place in it.

    Args:
        seed: from 0 to 2^62 - 1; its two halves of 31 bits go in at two places.
        first_block: number of the first block of the first row.
        row_blocks: numbers from the first block of a row to that of the next; left out, as many as it has blocks.
    """
    num_rows, num_blocks, block_size = shape
    rows = torch.arange(num_rows, device=device) * (num_blocks if row_blocks is None else row_blocks)
    blocks = first_block + rows.view(-1, 1, 1) + torch.arange(num_blocks, device=device).view(1, -1, 1)
    low, high = blocks & MASK_32, blocks >> 32
    key = _mix((_mix(low ^ (seed & 0x7FFFFFFF)) + high + (seed >> 31)) & MASK_32)
    places = torch.arange(block_size // 2, device=device) * PLACE_FACTOR
    bits = _mix((key + places) & MASK_32)
    return torch.cat((bits & 0xFFFF, bits >> 16), dim=-1)


def uniform_numbers(noise: Tensor) -> Tensor:
    """16 random bits -> fp32 from 0 to 1, the middles of 2^16 steps: nothing that is exact is ever moved."""
    return (noise.float() + 0.5) * 2.0**-16


def _mix(bits: Tensor) -> Tensor:
    bits = bits ^ (bits >> MIX_SHIFTS[0])
    bits = (bits * MIX_FACTORS[0]) & MASK_32
    bits = bits ^ (bits >> MIX_SHIFTS[1])
    bits = (bits * MIX_FACTORS[1]) & MASK_32
    return bits ^ (bits >> MIX_SHIFTS[2])


def _float_codes(quantized: Tensor, noise: Tensor | None, form: FloatFormat, num_bits: int) -> Tensor:
    """Add half of the last bit that is kept, or random bits below it, then cut; subnormals as multiples of a step."""
    bits = quantized.view(torch.int32).to(torch.int64) & MASK_32
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - form.mantissa_bits
    steps = quantized.abs() * (1.0 / form.smallest_step)
    if noise is None:  # ties to even
        rounding = ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)
        subnormal = steps.round().to(torch.int64)
    else:
        rounding = (2 * noise + 1) << (dropped - 17)
        subnormal = (steps + (uniform_numbers(noise) - 0.5)).round().to(torch.int64)
    normal = ((magnitude + rounding) >> dropped) - ((127 - form.exponent_bias) << form.mantissa_bits)
    is_subnormal = magnitude < ((128 - form.exponent_bias) << 23)
    code = torch.where(is_subnormal, subnormal, normal).clamp(max=form.largest_code)
    return (code | ((bits >> (32 - num_bits)) & (1 << (num_bits - 1)))).to(torch.uint8)


def _nf4_codes(quantized: Tensor, uniform: Tensor | None) -> Tensor:
    """fp32 from -1 to 1 -> the code of the nearest level, or of one of the two around it."""
    if uniform is None:
        return torch.bucketize(quantized, torch.tensor(NF4_MIDPOINTS, device=quantized.device)).to(torch.uint8)
    levels = torch.tensor(NF4_LEVELS, device=quantized.device)
    below = (torch.bucketize(quantized, levels, right=True) - 1).clamp(0, len(NF4_LEVELS) - 2)
    step = levels[below + 1] - levels[below]
    return (below + (uniform * step < quantized - levels[below])).to(torch.uint8)


def _fold(values: Tensor, width: int) -> Tensor:
    """Put the second half of the last dim above the first, `width` bits up."""
    left, right = values.chunk(2, dim=-1)
    return left | (right << width)


def _unfold(values: Tensor, width: int) -> Tensor:
    return torch.cat([values & ((1 << width) - 1), values >> width], dim=-1)
