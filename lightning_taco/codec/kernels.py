"""The codec as fused Triton kernels: one launch to encode, one to decode, one to decode and sum, one to requantise.

The only file of the codec that imports triton. Bit for bit the same as `codec.reference`: the same butterfly and sums
in the same order, IEEE division and square root, and no contraction into fused multiply-adds
(``enable_fp_fusion=False``). Launch configurations are fixed, so that a new shape costs no new tuning.

A program owns a tile of ``TILE`` blocks of one message. Example: 300 values, block 128, two messages: grid (1, 2);
program (0, 1) reads values 300..599 as blocks [300..427], [428..555], [556..599 and zeros], and writes 3 * 128 codes
and 3 scales to the second message.

Offsets are 64-bit: a tensor may hold more than 2^31 values.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_taco import _compat
from lightning_taco.codec.elements import CODE_MAX, FLOAT_FORMATS, MIX_FACTORS, MIX_SHIFTS
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.reference import ALPHA_EPSILON, ALPHA_MAX, ALPHA_MIN, SMALLEST_AMAX
from lightning_taco.config import BITS_PER_CODE, CodecConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_ALPHA_EPSILON = tl.constexpr(ALPHA_EPSILON)
_ALPHA_MIN = tl.constexpr(ALPHA_MIN)
_ALPHA_MAX = tl.constexpr(ALPHA_MAX)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
# Adding 1.5 * 2^23 rounds a small fp32 to an integer, ties to even, and leaves it in the low bits.
_ROUND_MAGIC = tl.constexpr(12582912.0)
_ROUND_MAGIC_BITS = tl.constexpr(0x4B400000)
_MIX_SHIFT_0, _MIX_SHIFT_1, _MIX_SHIFT_2 = (tl.constexpr(shift) for shift in MIX_SHIFTS)
_MIX_FACTOR_0, _MIX_FACTOR_1 = (tl.constexpr(factor) for factor in MIX_FACTORS)
_TWO_POW_MINUS_24 = tl.constexpr(2.0**-24)


@triton.jit
def _hadamard(values, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG2_BLOCK: tl.constexpr):
    """[TILE, BLOCK] -> the same times the unnormalised Hadamard matrix.

    Each stage adds and subtracts neighbours (bit 0 of the index), then rotates the bits of the index by one; after
    LOG2_BLOCK stages every bit has had its turn, lowest first, and the order is the original one.
    """
    for _ in tl.static_range(LOG2_BLOCK):
        left, right = tl.split(tl.reshape(values, (TILE, BLOCK // 2, 2)))
        pairs = tl.join(left + right, left - right)
        values = tl.reshape(tl.permute(pairs, (0, 2, 1)), (TILE, BLOCK))
    return values


@triton.jit
def _pairwise_sum(values, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG2_BLOCK: tl.constexpr):
    """[TILE, BLOCK] -> [TILE, 1], neighbours first."""
    for stage in tl.static_range(LOG2_BLOCK):
        left, right = tl.split(tl.reshape(values, (TILE, BLOCK >> (stage + 1), 2)))
        values = left + right
    return tl.reshape(values, (TILE, 1))


@triton.jit
def _mix(bits):
    bits = bits ^ (bits >> _MIX_SHIFT_0)
    bits = bits * _MIX_FACTOR_0
    bits = bits ^ (bits >> _MIX_SHIFT_1)
    bits = bits * _MIX_FACTOR_1
    return bits ^ (bits >> _MIX_SHIFT_2)


@triton.jit
def _random_bits(index, seed_low, seed_high):
    """32 random bits for each position, a function of position and seed only; index int64."""
    low, high = (index & 0xFFFFFFFF).to(tl.uint32), (index >> 32).to(tl.uint32)
    return _mix(_mix(low ^ tl.cast(seed_low, tl.uint32)) + high + tl.cast(seed_high, tl.uint32))


@triton.jit
def _float_code(
    quantized, noise, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """fp32 within the format's range -> bits of an 8-bit float by integer arithmetic: exact where the cast is not."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = quantized.to(tl.int32, bitcast=True)
    magnitude = bits & _ABS_MASK
    if STOCHASTIC:
        rounding = (noise & ((1 << DROPPED) - 1)).to(tl.int32)
    else:
        rounding = ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + rounding) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    steps = magnitude.to(tl.float32, bitcast=True) * (2.0 ** (BIAS + MANTISSA - 1))
    if STOCHASTIC:
        steps = tl.floor(steps + (noise >> 8).to(tl.float32) * _TWO_POW_MINUS_24)
        subnormal = steps.to(tl.int32)
    else:
        subnormal = (steps + _ROUND_MAGIC).to(tl.int32, bitcast=True) - _ROUND_MAGIC_BITS
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    return (tl.minimum(code, LARGEST) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _float_value(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Bits of an 8-bit float, neither NaN nor Inf -> fp32, exactly, by integer arithmetic."""
    wide = code.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    value = tl.where(magnitude < (1 << MANTISSA), subnormal, normal)
    # The sign as a bit: a negation is 0 - value in older tritons, which loses the sign of zero.
    signed = value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def _to_code(
    quantized,
    noise,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """fp32 -> one uint8 code a value, not packed; LARGEST is the largest integer, or the largest float's bits."""
    if MANTISSA == 0:
        if STOCHASTIC:
            rounded = tl.floor(quantized + (noise >> 8).to(tl.float32) * _TWO_POW_MINUS_24).to(tl.int32)
            rounded = tl.minimum(tl.maximum(rounded, -LARGEST), LARGEST)
        else:
            rounded = (quantized + _ROUND_MAGIC).to(tl.int32, bitcast=True) - _ROUND_MAGIC_BITS
        code = (rounded & ((1 << BITS) - 1)).to(tl.uint8)
    elif NATIVE_FP8 and not STOCHASTIC:
        if ELEMENT == "e4m3":
            code = quantized.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            code = quantized.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        code = _float_code(quantized, noise, MANTISSA, BIAS, LARGEST, STOCHASTIC)
    return code


@triton.jit
def _from_code(
    code,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    if MANTISSA == 0:
        value = ((code.to(tl.int32) ^ (1 << (BITS - 1))) - (1 << (BITS - 1))).to(tl.float32)
    elif NATIVE_FP8:
        if ELEMENT == "e4m3":
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            value = code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        value = _float_value(code, MANTISSA, BIAS)
    return value


@triton.jit
def _fold(values, WIDTH: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr):
    """[TILE, SIZE] -> [TILE, SIZE // 2]: the second half of each row above the first, WIDTH bits up."""
    halves = tl.permute(tl.reshape(values, (TILE, 2, SIZE // 2)), (0, 2, 1))
    first, second = tl.split(halves)
    return first | (second << WIDTH)


@triton.jit
def _store_codes(
    message, code, blocks, valid, high_offset_bytes, BITS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one code a value, uint8 [TILE, BLOCK], packed to BITS bits (see `codec.layout`)."""
    if BITS == 8:
        tl.store(message + blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], code, mask=valid[:, None])
    else:
        low = _fold(code & 15, 4, TILE, BLOCK)
        HALF: tl.constexpr = BLOCK // 2
        tl.store(message + blocks[:, None] * HALF + tl.arange(0, HALF)[None, :], low, mask=valid[:, None])
        if BITS > 4:
            high = _fold(code >> 4, BITS - 4, TILE, BLOCK)
            high = _fold(high, 2 * (BITS - 4), TILE, HALF)
            if BITS == 5:
                high = _fold(high, 4, TILE, HALF // 2)
            PLANE: tl.constexpr = BLOCK * (BITS - 4) // 8
            offsets = high_offset_bytes + blocks[:, None] * PLANE + tl.arange(0, PLANE)[None, :]
            tl.store(message + offsets, high, mask=valid[:, None])


@triton.jit
def _load_codes(message, blocks, valid, high_offset_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The codes of the tile, uint8 [TILE, BLOCK]; each byte of a plane is read by all values that it holds."""
    value = tl.arange(0, BLOCK)[None, :]
    if BITS == 8:
        code = tl.load(message + blocks[:, None] * BLOCK + value, mask=valid[:, None], other=0)
    else:
        HALF: tl.constexpr = BLOCK // 2
        low = tl.load(message + blocks[:, None] * HALF + value % HALF, mask=valid[:, None], other=0)
        code = (low >> (4 * (value // HALF)).to(tl.uint8)) & 15
        if BITS > 4:
            PLANE: tl.constexpr = BLOCK * (BITS - 4) // 8
            part = value // PLANE
            # Folding puts the halves BITS - 4 bits apart, then the quarters, then (5 bits) the eighths.
            shift = ((part & 1) << 2) | (part & 2) | (part >> 2 if BITS == 5 else 0)
            offsets = high_offset_bytes + blocks[:, None] * PLANE + value % PLANE
            high = tl.load(message + offsets, mask=valid[:, None], other=0)
            high = (high >> shift.to(tl.uint8)) & ((1 << (BITS - 4)) - 1)
            code = code | (high << 4)
    return code


@triton.jit
def _alpha(mean_energy, CODE_MAX_: tl.constexpr):
    alpha = tl.div_rn(tl.full(mean_energy.shape, CODE_MAX_, tl.float32), tl.sqrt_rn(mean_energy + _ALPHA_EPSILON))
    return tl.minimum(tl.maximum(alpha, _ALPHA_MIN), _ALPHA_MAX)


@triton.jit
def _store_message(
    values,  # fp32 [TILE, BLOCK], already in the domain that is quantised
    alpha,  # fp32 [TILE, 1]
    message,  # uint8 pointer to the start of the message
    blocks,  # int64 [TILE]
    first_block,  # blocks in the rows before this one, for the random numbers
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    seed_low,
    seed_high,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    CODE_MAX_: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The largest magnitude as bits: integers order like the floats, and NaN and Inf come out above every finite one.
    amax_bits = tl.max(values.to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)
    finite = amax_bits < _INF_BITS
    amax = amax_bits.to(tl.float32, bitcast=True)
    usable = finite & (amax >= _SMALLEST_AMAX)
    code_max = tl.full([TILE], CODE_MAX_, tl.float32)
    safe_amax = tl.where(usable, amax, 1.0)
    scale = tl.div_rn(code_max, safe_amax)
    scale_inv = tl.where(usable, tl.div_rn(safe_amax, code_max), 0.0)
    scale_inv = tl.where(finite, scale_inv, float("nan"))
    quantized = tl.where(usable[:, None], values * scale[:, None], 0.0)
    valid = blocks < num_blocks
    noise = tl.zeros([TILE, BLOCK], tl.uint32)
    if STOCHASTIC:
        index = (first_block + blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        noise = _random_bits(index, seed_low, seed_high)
    code = _to_code(quantized, noise, ELEMENT, BITS, MANTISSA, BIAS, LARGEST, NATIVE_FP8, STOCHASTIC)
    _store_codes(message, code, blocks, valid, high_offset_bytes, BITS, TILE, BLOCK)
    scales = (message + scale_offset_bytes).to(tl.pointer_type(tl.float32))
    tl.store(scales + blocks, scale_inv, mask=valid)
    if DUAL:
        alphas = (message + alpha_offset_bytes).to(tl.pointer_type(tl.float32))
        flat_alpha = tl.where(finite, tl.reshape(alpha, (TILE,)), 1.0)
        tl.store(alphas + blocks, flat_alpha, mask=valid)


@triton.jit
def _load_rotated(
    message,
    blocks,
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tile's codes times scale_inv, fp32 [TILE, BLOCK], still rotated."""
    valid = blocks < num_blocks
    codes = _load_codes(message, blocks, valid, high_offset_bytes, BITS, BLOCK)
    scales = (message + scale_offset_bytes).to(tl.pointer_type(tl.float32))
    scale_inv = tl.load(scales + blocks, mask=valid, other=0.0)
    if DUAL:
        alphas = (message + alpha_offset_bytes).to(tl.pointer_type(tl.float32))
        scale_inv = tl.div_rn(scale_inv, tl.load(alphas + blocks, mask=valid, other=1.0))
    return _from_code(codes, ELEMENT, BITS, MANTISSA, BIAS, NATIVE_FP8) * scale_inv[:, None]


@triton.jit
def _sum_rotated(
    messages,
    message_bytes,
    blocks,
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = _load_rotated(
        messages,
        blocks,
        num_blocks,
        high_offset_bytes,
        scale_offset_bytes,
        alpha_offset_bytes,
        ELEMENT,
        BITS,
        MANTISSA,
        BIAS,
        LARGEST,
        NATIVE_FP8,
        STOCHASTIC,
        DUAL,
        BLOCK,
    )
    for _ in range(1, NUM_SOURCES):
        messages += message_bytes
        total += _load_rotated(
            messages,
            blocks,
            num_blocks,
            high_offset_bytes,
            scale_offset_bytes,
            alpha_offset_bytes,
            ELEMENT,
            BITS,
            MANTISSA,
            BIAS,
            LARGEST,
            NATIVE_FP8,
            STOCHASTIC,
            DUAL,
            BLOCK,
        )
    if AVERAGE:
        total = total * factor
    return total


@triton.jit
def encode_kernel(
    values_ptr,
    messages_ptr,
    num_values,
    row_stride,
    message_bytes,
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    seed_low,
    seed_high,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    ROTATE: tl.constexpr,
    CODE_MAX_: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
):
    """values [R, num_values] -> messages uint8 [R, message_bytes]; program (i, r): blocks i*TILE.. of row r."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(values_ptr + row * row_stride + offsets, mask=offsets < num_values, other=0.0).to(tl.float32)
    alpha = tl.full([TILE, 1], 1.0, tl.float32)
    if DUAL:
        alpha = _alpha(_pairwise_sum(values * values, TILE, BLOCK, LOG2_BLOCK) * (1.0 / BLOCK), CODE_MAX_)
        values = values * alpha
    if ROTATE:
        values = _hadamard(values * (1.0 / BLOCK), TILE, BLOCK, LOG2_BLOCK)
    _store_message(
        values,
        alpha,
        messages_ptr + row * message_bytes,
        blocks,
        row * num_blocks,
        num_blocks,
        high_offset_bytes,
        scale_offset_bytes,
        alpha_offset_bytes,
        seed_low,
        seed_high,
        ELEMENT,
        BITS,
        MANTISSA,
        BIAS,
        LARGEST,
        NATIVE_FP8,
        STOCHASTIC,
        DUAL,
        CODE_MAX_,
        TILE,
        BLOCK,
    )


@triton.jit
def decode_kernel(
    messages_ptr,
    values_ptr,
    num_values,
    row_stride,
    message_bytes,
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
):
    """Row r of messages (the sum of NUM_SOURCES consecutive ones) -> row r of values [R, num_values]."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = _sum_rotated(
        messages_ptr + row * NUM_SOURCES * message_bytes,
        message_bytes,
        blocks,
        num_blocks,
        high_offset_bytes,
        scale_offset_bytes,
        alpha_offset_bytes,
        factor,
        NUM_SOURCES,
        AVERAGE,
        ELEMENT,
        BITS,
        MANTISSA,
        BIAS,
        LARGEST,
        NATIVE_FP8,
        STOCHASTIC,
        DUAL,
        BLOCK,
    )
    if ROTATE:
        total = _hadamard(total, TILE, BLOCK, LOG2_BLOCK)
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    out = values_ptr + row * row_stride + offsets
    tl.store(out, total.to(values_ptr.dtype.element_ty), mask=offsets < num_values)


@triton.jit
def requantize_kernel(
    messages_ptr,
    message_ptr,
    message_bytes,
    num_blocks,
    high_offset_bytes,
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    seed_low,
    seed_high,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DUAL: tl.constexpr,
    CODE_MAX_: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
):
    """NUM_SOURCES messages -> the message of their sum; the values stay rotated throughout."""
    blocks = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = _sum_rotated(
        messages_ptr,
        message_bytes,
        blocks,
        num_blocks,
        high_offset_bytes,
        scale_offset_bytes,
        alpha_offset_bytes,
        factor,
        NUM_SOURCES,
        AVERAGE,
        ELEMENT,
        BITS,
        MANTISSA,
        BIAS,
        LARGEST,
        NATIVE_FP8,
        STOCHASTIC,
        DUAL,
        BLOCK,
    )
    alpha = tl.full([TILE, 1], 1.0, tl.float32)
    if DUAL:
        alpha = _alpha(_pairwise_sum(total * total, TILE, BLOCK, LOG2_BLOCK), CODE_MAX_)
        total = total * alpha
    _store_message(
        total,
        alpha,
        message_ptr,
        blocks,
        0,
        num_blocks,
        high_offset_bytes,
        scale_offset_bytes,
        alpha_offset_bytes,
        seed_low,
        seed_high,
        ELEMENT,
        BITS,
        MANTISSA,
        BIAS,
        LARGEST,
        NATIVE_FP8,
        STOCHASTIC,
        DUAL,
        CODE_MAX_,
        TILE,
        BLOCK,
    )


VALUES_PER_PROGRAM = 4096


def encode_triton(values: Tensor, codec: CodecConfig, messages: Tensor, *, seed: int = 0) -> Tensor:
    """`encode_reference` in one launch; `values` ``[R, N]`` with contiguous rows, into `messages`."""
    layout = MessageLayout.of(values.shape[1], codec)
    if layout.num_blocks and values.shape[0]:
        with _on_device(values):
            encode_kernel[_grid(layout, codec, values.shape[0])](
                values,
                messages,
                values.shape[1],
                values.stride(0),
                *_offsets(layout),
                *_seed_halves(seed),
                ROTATE=codec.rotation,
                CODE_MAX_=CODE_MAX[codec.element],
                **_options(codec, values.device),
            )
    return messages


def decode_triton(
    messages: Tensor, codec: CodecConfig, values: Tensor, *, num_sources: int = 1, average: bool = False
) -> Tensor:
    """Decode and sum each `num_sources` rows of `messages` into one row of `values` ``[R, N]``, in one launch."""
    layout = MessageLayout.of(values.shape[1], codec)
    if layout.num_blocks and values.shape[0]:
        with _on_device(values):
            decode_kernel[_grid(layout, codec, values.shape[0])](
                messages,
                values,
                values.shape[1],
                values.stride(0),
                *_offsets(layout),
                1.0 / num_sources,
                NUM_SOURCES=num_sources,
                AVERAGE=average,
                ROTATE=codec.rotation,
                **_options(codec, values.device),
            )
    return values


def requantize_triton(
    messages: Tensor, codec: CodecConfig, num_values: int, message: Tensor, *, average: bool = False, seed: int = 0
) -> Tensor:
    """`requantize_reference` in one launch, into `message` ``uint8 [1, message_bytes]``."""
    layout = MessageLayout.of(num_values, codec)
    if layout.num_blocks:
        with _on_device(messages):
            requantize_kernel[_grid(layout, codec, 1)](
                messages,
                message,
                *_offsets(layout),
                1.0 / messages.shape[0],
                *_seed_halves(seed),
                NUM_SOURCES=messages.shape[0],
                AVERAGE=average,
                CODE_MAX_=CODE_MAX[codec.element],
                **_options(codec, messages.device),
            )
    return message


def _on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _grid(layout: MessageLayout, codec: CodecConfig, num_rows: int) -> tuple[int, int]:
    return triton.cdiv(layout.num_blocks, VALUES_PER_PROGRAM // codec.block_size), num_rows


def _offsets(layout: MessageLayout) -> tuple[int, int, int, int, int]:
    return (
        layout.message_bytes,
        layout.num_blocks,
        layout.high_plane_offset_bytes,
        layout.scale_offset_bytes,
        layout.alpha_offset_bytes,
    )


def _seed_halves(seed: int) -> tuple[int, int]:
    return seed & 0x7FFFFFFF, seed >> 31


def _options(codec: CodecConfig, device: torch.device) -> dict[str, Any]:
    native_fp8 = device.type == "cuda" and _compat.supports_fp8(device) and not INTERPRETED
    form = FLOAT_FORMATS.get(codec.element)
    return {
        "ELEMENT": codec.element,
        "BITS": BITS_PER_CODE[codec.element],
        "MANTISSA": form.mantissa_bits if form else 0,
        "BIAS": form.exponent_bias if form else 0,
        "LARGEST": form.largest_code if form else int(CODE_MAX[codec.element]),
        "NATIVE_FP8": native_fp8,
        "STOCHASTIC": codec.rounding == "stochastic",
        "DUAL": codec.scale_mode == "dual",
        "TILE": VALUES_PER_PROGRAM // codec.block_size,
        "BLOCK": codec.block_size,
        "LOG2_BLOCK": codec.block_size.bit_length() - 1,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
