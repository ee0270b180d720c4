"""Rounding and packing of codes in torch, bit for bit what the kernels do."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_taco.codec.elements import CODE_MAX, FLOAT_FORMATS, MIX_FACTORS, MIX_SHIFTS, FloatFormat
from lightning_taco.config import BITS_PER_CODE, CodecConfig

FLOAT_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MASK_32 = 0xFFFFFFFF


def round_to_codes(quantized: Tensor, codec: CodecConfig, seed: int) -> Tensor:
    """fp32 ``[R, num_blocks, block]`` within the format's range -> one ``uint8`` code a value, not packed."""
    noise = random_bits(quantized.shape, seed, quantized.device) if codec.rounding == "stochastic" else None
    if codec.element in FLOAT_FORMATS:
        if noise is None:
            return quantized.to(FLOAT_DTYPES[codec.element]).view(torch.uint8)
        return _stochastic_float_codes(quantized, noise, FLOAT_FORMATS[codec.element])
    code_max = CODE_MAX[codec.element]
    if noise is None:
        rounded = quantized.round()
    else:
        uniform = (noise >> 8).float() * 2.0**-24
        rounded = (quantized + uniform).floor().clamp(-code_max, code_max)
    return (rounded.to(torch.int32) & ((1 << BITS_PER_CODE[codec.element]) - 1)).to(torch.uint8)


def codes_to_values(codes: Tensor, codec: CodecConfig) -> Tensor:
    """One ``uint8`` code a value -> fp32."""
    if codec.element in FLOAT_DTYPES:
        return codes.view(FLOAT_DTYPES[codec.element]).float()
    sign_bit = 1 << (BITS_PER_CODE[codec.element] - 1)
    return ((codes.to(torch.int32) ^ sign_bit) - sign_bit).float()


def pack(codes: Tensor, codec: CodecConfig) -> Tensor:
    """``uint8 [R, num_blocks, block]`` -> the bytes of the planes, ``uint8 [R, bytes]``."""
    bits = BITS_PER_CODE[codec.element]
    if bits == 8:
        return codes.flatten(1)
    low = _fold(codes & 15, 4)
    if bits == 4:
        return low.flatten(1)
    high = codes >> 4
    width = bits - 4
    while width < 8:
        high, width = _fold(high, width), 2 * width
    return torch.cat([low.flatten(1), high.flatten(1)], dim=1)


def unpack(planes: Tensor, codec: CodecConfig, num_blocks: int) -> Tensor:
    """The inverse of `pack`."""
    bits, block_size = BITS_PER_CODE[codec.element], codec.block_size
    if bits == 8:
        return planes.view(planes.shape[0], num_blocks, block_size)
    low_bytes = num_blocks * block_size // 2
    codes = _unfold(planes[:, :low_bytes].reshape(planes.shape[0], num_blocks, block_size // 2), 4)
    if bits > 4:
        high = planes[:, low_bytes:].reshape(planes.shape[0], num_blocks, block_size * (bits - 4) // 8)
        width = 4
        while width >= bits - 4:
            high, width = _unfold(high, width), width // 2
        codes = codes | (high << 4)
    return codes


def random_bits(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """32 random bits for each of ``[R, num_blocks, block]`` values, as int64: a function of position and seed only.

    Args:
        seed: from 0 to 2^62 - 1; its two halves of 31 bits go in at two places.
    """
    index = torch.arange(shape.numel(), device=device, dtype=torch.int64).view(shape)
    low, high = index & MASK_32, index >> 32
    return _mix((_mix(low ^ (seed & 0x7FFFFFFF)) + high + (seed >> 31)) & MASK_32)


def _mix(bits: Tensor) -> Tensor:
    bits = bits ^ (bits >> MIX_SHIFTS[0])
    bits = (bits * MIX_FACTORS[0]) & MASK_32
    bits = bits ^ (bits >> MIX_SHIFTS[1])
    bits = (bits * MIX_FACTORS[1]) & MASK_32
    return bits ^ (bits >> MIX_SHIFTS[2])


def _stochastic_float_codes(quantized: Tensor, noise: Tensor, form: FloatFormat) -> Tensor:
    """Add random bits below the last one that is kept, then cut; subnormals as multiples of the smallest step."""
    bits = quantized.view(torch.int32).to(torch.int64) & MASK_32
    magnitude = bits & 0x7FFFFFFF
    dropped = 23 - form.mantissa_bits
    normal = ((magnitude + (noise & ((1 << dropped) - 1))) >> dropped) - (
        (127 - form.exponent_bias) << form.mantissa_bits
    )
    uniform = (noise >> 8).float() * 2.0**-24
    subnormal = (quantized.abs() * (1.0 / form.smallest_step) + uniform).floor().to(torch.int64)
    is_subnormal = magnitude < ((128 - form.exponent_bias) << 23)
    code = torch.where(is_subnormal, subnormal, normal).clamp(max=form.largest_code)
    return (code | ((bits >> 24) & 0x80)).to(torch.uint8)


def _fold(values: Tensor, width: int) -> Tensor:
    """Put the second half of the last dim above the first, `width` bits up."""
    left, right = values.chunk(2, dim=-1)
    return left | (right << width)


def _unfold(values: Tensor, width: int) -> Tensor:
    return torch.cat([values & ((1 << width) - 1), values >> width], dim=-1)
