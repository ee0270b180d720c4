"""The codec as fused Triton kernels: one launch to encode, one to decode, one to decode and sum, one to requantise.

With `codec.kernels_numbers` and `codec.kernels_planes` the only files of the codec that import triton. Bit for bit the
same as `codec.reference`: the same butterfly and sums in the same order, IEEE division and square root, and no
contraction into fused multiply-adds (``enable_fp_fusion=False``). Launch configurations are fixed, so that a new shape
costs no new tuning.

A program owns a tile of blocks of one message. Example: 300 values, block 128, two messages: grid (1, 2); program
(0, 1) reads values 300..599 as blocks [300..427], [428..555], [556..599 and zeros], and writes 3 * 128 codes and
3 scales to the second message.

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
from lightning_taco.codec.constants import KernelConstants
from lightning_taco.codec.kernels_numbers import from_code, hadamard, pairwise_sum, random_bits, to_code
from lightning_taco.codec.kernels_planes import load_codes, store_codes
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.reference import (
    ALPHA_EPSILON,
    ALPHA_MAX,
    ALPHA_MIN,
    FINE_HIGHEST,
    FINE_LOWEST,
    SMALLEST_AMAX,
    SMALLEST_EXPONENT,
)
from lightning_taco.config import SUB_BLOCK_SIZE, CodecConfig

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_ALPHA_EPSILON = tl.constexpr(ALPHA_EPSILON)
_ALPHA_MIN = tl.constexpr(ALPHA_MIN)
_ALPHA_MAX = tl.constexpr(ALPHA_MAX)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_FINE_LOWEST, _FINE_HIGHEST = tl.constexpr(FINE_LOWEST), tl.constexpr(FINE_HIGHEST)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST_EXPONENT)
_SUB_BLOCK = tl.constexpr(SUB_BLOCK_SIZE)
_LOG2_SUB_BLOCK = tl.constexpr(SUB_BLOCK_SIZE.bit_length() - 1)


@triton.jit
def _num_blocks(num_values, C: tl.constexpr):
    # Not num_values.to: Triton hands in an argument of 1 as a constant.
    return (tl.cast(num_values, tl.int64) + (C.block_size - 1)) // C.block_size


@triton.jit
def _aligned(num_bytes):
    return (num_bytes + 15) // 16 * 16


@triton.jit
def _scale_offset(num_blocks, C: tl.constexpr):
    return _aligned(num_blocks * C.code_bytes)


@triton.jit
def _alpha_offset(num_blocks, C: tl.constexpr):
    return _scale_offset(num_blocks, C) + num_blocks * 4


@triton.jit
def _message_bytes(num_blocks, C: tl.constexpr):
    return _aligned(_alpha_offset(num_blocks, C) + num_blocks * C.alpha_bytes)


@triton.jit
def _scale_pointers(message, blocks, num_blocks, C: tl.constexpr):
    return (message + _scale_offset(num_blocks, C)).to(tl.pointer_type(tl.float32)) + blocks


@triton.jit
def _alpha_pointers(message, blocks, num_blocks, C: tl.constexpr):
    return (message + _alpha_offset(num_blocks, C)).to(tl.pointer_type(tl.float32)) + blocks


@triton.jit
def _factor_pointers(message, blocks, num_blocks, C: tl.constexpr):
    """uint8 pointers [tile, sub-blocks]."""
    PER_BLOCK: tl.constexpr = C.block_size // _SUB_BLOCK
    offsets = blocks[:, None] * PER_BLOCK + tl.arange(0, PER_BLOCK)[None, :]
    return message + _alpha_offset(num_blocks, C) + offsets


@triton.jit
def _alpha(mean_energy, C: tl.constexpr):
    alpha = tl.div_rn(tl.full(mean_energy.shape, C.code_max, tl.float32), tl.sqrt_rn(mean_energy + _ALPHA_EPSILON))
    return tl.minimum(tl.maximum(alpha, _ALPHA_MIN), _ALPHA_MAX)


@triton.jit
def _largest_bits(values):
    """[tile, n] -> the largest magnitude of each row, as bits: they order like the floats, NaN and Inf above all."""
    return tl.max(values.to(tl.int32, bitcast=True) & _ABS_MASK, axis=1)


@triton.jit
def _equalize(values, C: tl.constexpr):
    """[tile, block] -> with sub-blocks of one energy; bits of their factors [tile, sub-blocks]; exponents [tile]."""
    PER_BLOCK: tl.constexpr = C.block_size // _SUB_BLOCK
    exponent = tl.minimum(_largest_bits(values) >> 23, 253)
    values = values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    sub_blocks = tl.reshape(values, (C.tile * PER_BLOCK, _SUB_BLOCK))
    energy = pairwise_sum(sub_blocks * sub_blocks, C.tile * PER_BLOCK, _SUB_BLOCK, _LOG2_SUB_BLOCK)
    root = tl.sqrt_rn(energy * (1.0 / _SUB_BLOCK))
    bits = (root.to(tl.int32, bitcast=True) & _ABS_MASK) >> 20
    bits = tl.minimum(tl.maximum(bits, _FINE_LOWEST), _FINE_HIGHEST - 1)
    factors = (bits << 20).to(tl.float32, bitcast=True)
    sub_blocks = sub_blocks * tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)
    values = tl.reshape(sub_blocks, (C.tile, C.block_size))
    values = tl.where((exponent >= _SMALLEST_EXPONENT)[:, None], values, 0.0)
    return values, tl.reshape(bits, (C.tile, PER_BLOCK)), exponent


@triton.jit
def _largest_bits_of_each_sign(values):
    """[tile, n] -> the largest positive and the largest negative magnitude of each row, as bits; 0 where there is none.

    By integers that order like the floats, since integers are reduced across lanes by one instruction.
    """
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _ABS_MASK)
    positive = tl.maximum(tl.max(ordered, axis=1), 0)
    lowest = tl.minimum(tl.min(ordered, axis=1), -1)  # -1 is minus zero
    return positive, (lowest ^ _ABS_MASK) & _ABS_MASK


@triton.jit
def _gaussian_scale_and_inverse(positive, negative, C: tl.constexpr):
    """What multiplies values to quantise, and back, from the largest of each sign; one of them is not 0."""
    larger, smaller = tl.maximum(positive, negative), tl.minimum(positive, negative)
    half = tl.full([C.tile], C.gaussian_half, tl.float32)
    top = tl.full([C.tile], C.gaussian_top, tl.float32)
    sign = tl.where(positive > negative, -1.0, 1.0)
    other_scale = tl.where(smaller > 0, tl.div_rn(top, tl.where(smaller > 0, smaller, 1.0)), float("inf"))
    scale = tl.minimum(tl.div_rn(half, larger), other_scale) * sign
    return scale, tl.maximum(tl.div_rn(larger, half), tl.div_rn(smaller, top)) * sign


@triton.jit
def _scales(values, C: tl.constexpr):
    """[tile, block] -> what multiplies to quantise, what multiplies to recover, is it finite, is it not all zero."""
    if C.is_gaussian:
        positive_bits, negative_bits = _largest_bits_of_each_sign(values)
        amax_bits = tl.maximum(positive_bits, negative_bits)
    else:
        amax_bits = _largest_bits(values)
    finite = amax_bits < _INF_BITS
    amax = amax_bits.to(tl.float32, bitcast=True)
    usable = finite & (amax >= _SMALLEST_AMAX)
    if C.is_gaussian:
        positive = tl.where(usable, positive_bits.to(tl.float32, bitcast=True), 1.0)
        negative = tl.where(usable, negative_bits.to(tl.float32, bitcast=True), 1.0)
        scale, scale_inv = _gaussian_scale_and_inverse(positive, negative, C)
    else:
        code_max = tl.full([C.tile], C.code_max, tl.float32)
        amax = tl.where(usable, amax, 1.0)
        scale, scale_inv = tl.div_rn(code_max, amax), tl.div_rn(amax, code_max)
    scale_inv = tl.where(finite, tl.where(usable, scale_inv, 0.0), float("nan"))
    return scale, scale_inv, finite, usable


@triton.jit
def _store_message(
    values,  # fp32 [tile, block], already in the domain that is quantised
    alpha,  # fp32 [tile, 1]; dual mode only
    power,  # fp32 [tile]: what the scale is multiplied by; fine mode only
    message,  # uint8 pointer to the start of the message
    blocks,  # int64 [tile]
    first_block,  # blocks in the rows before this one, for the random numbers
    num_blocks,
    seed_low,
    seed_high,
    C: tl.constexpr,
):
    scale, scale_inv, finite, usable = _scales(values, C)
    quantized = tl.where(usable[:, None], values * scale[:, None], 0.0)
    valid = blocks < num_blocks
    noise = tl.full([C.tile, C.block_size], 0, tl.uint32)
    if C.is_stochastic:
        index = (first_block + blocks)[:, None] * C.block_size + tl.arange(0, C.block_size)[None, :]
        noise = random_bits(index, seed_low, seed_high)
    store_codes(message, to_code(quantized, noise, C), blocks, valid, num_blocks, C)
    if C.is_fine:
        # Chosen anew: of a product with NaN devices make NaNs of other bits.
        scale_inv = tl.where(finite, scale_inv * power, float("nan"))
    tl.store(_scale_pointers(message, blocks, num_blocks, C), scale_inv, mask=valid)
    if C.is_dual:
        flat_alpha = tl.where(finite, tl.reshape(alpha, (C.tile,)), 1.0)
        tl.store(_alpha_pointers(message, blocks, num_blocks, C), flat_alpha, mask=valid)


@triton.jit
def _store_fine_message(values, message, blocks, first_block, num_blocks, seed_low, seed_high, C: tl.constexpr):
    """Equalise and rotate the values [tile, block] as they are to be sent, and store them."""
    equalized, factor_bits, exponent = _equalize(values, C)
    rotated = hadamard(equalized * (1.0 / C.block_size), C.tile, C.block_size, C.log2_block_size)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    _store_message(rotated, alpha, power, message, blocks, first_block, num_blocks, seed_low, seed_high, C)
    pointers = _factor_pointers(message, blocks, num_blocks, C)
    tl.store(pointers, (factor_bits - _FINE_LOWEST).to(tl.uint8), mask=(blocks < num_blocks)[:, None])


@triton.jit
def _load(message, blocks, num_blocks, C: tl.constexpr):
    """The tile's values, fp32 [tile, block], as they may be added: still rotated, or at their place in fine mode."""
    valid = blocks < num_blocks
    codes = load_codes(message, blocks, valid, num_blocks, C)
    scale_inv = tl.load(_scale_pointers(message, blocks, num_blocks, C), mask=valid, other=0.0)
    if C.is_dual:
        alpha = tl.load(_alpha_pointers(message, blocks, num_blocks, C), mask=valid, other=1.0)
        scale_inv = tl.div_rn(scale_inv, alpha)
    values = from_code(codes, C) * scale_inv[:, None]
    if C.is_fine:
        pointers = _factor_pointers(message, blocks, num_blocks, C)
        bits = tl.load(pointers, mask=valid[:, None], other=0).to(tl.int32) + _FINE_LOWEST
        factors = tl.reshape((bits << 20).to(tl.float32, bitcast=True), (C.tile * (C.block_size // _SUB_BLOCK), 1))
        values = hadamard(values, C.tile, C.block_size, C.log2_block_size)
        sub_blocks = tl.reshape(values, (C.tile * (C.block_size // _SUB_BLOCK), _SUB_BLOCK))
        values = tl.reshape(sub_blocks * factors, (C.tile, C.block_size))
    return values


@triton.jit
def _sum(messages, blocks, num_blocks, factor, NUM_SOURCES: tl.constexpr, AVERAGE: tl.constexpr, C: tl.constexpr):
    total = _load(messages, blocks, num_blocks, C)
    for _ in range(1, NUM_SOURCES):
        messages += _message_bytes(num_blocks, C)
        total += _load(messages, blocks, num_blocks, C)
    if AVERAGE:
        total = total * factor
    return total


@triton.jit
def encode_kernel(values_ptr, messages_ptr, num_values, row_stride, seed_low, seed_high, C: tl.constexpr):
    """values [R, num_values] -> messages uint8 [R, message_bytes]; program (i, r): tile i of row r."""
    row = tl.program_id(1).to(tl.int64)
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    offsets = blocks[:, None] * C.block_size + tl.arange(0, C.block_size)[None, :]
    values = tl.load(values_ptr + row * row_stride + offsets, mask=offsets < num_values, other=0.0).to(tl.float32)
    message = messages_ptr + row * _message_bytes(num_blocks, C)
    if C.is_fine:
        _store_fine_message(values, message, blocks, row * num_blocks, num_blocks, seed_low, seed_high, C)
    else:
        alpha = tl.full([C.tile, 1], 1.0, tl.float32)
        if C.is_dual:
            energy = pairwise_sum(values * values, C.tile, C.block_size, C.log2_block_size)
            alpha = _alpha(energy * (1.0 / C.block_size), C)
            values = values * alpha
        if C.is_rotated:
            values = hadamard(values * (1.0 / C.block_size), C.tile, C.block_size, C.log2_block_size)
        _store_message(values, alpha, 1.0, message, blocks, row * num_blocks, num_blocks, seed_low, seed_high, C)


@triton.jit
def decode_kernel(
    messages_ptr,
    values_ptr,
    num_values,
    row_stride,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    C: tl.constexpr,
):
    """Row r of messages (the sum of NUM_SOURCES consecutive ones) -> row r of values [R, num_values]."""
    row = tl.program_id(1).to(tl.int64)
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    messages = messages_ptr + row * NUM_SOURCES * _message_bytes(num_blocks, C)
    total = _sum(messages, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    if C.is_rotated and not C.is_fine:
        total = hadamard(total, C.tile, C.block_size, C.log2_block_size)
    offsets = blocks[:, None] * C.block_size + tl.arange(0, C.block_size)[None, :]
    out = values_ptr + row * row_stride + offsets
    tl.store(out, total.to(values_ptr.dtype.element_ty), mask=offsets < num_values)


@triton.jit
def requantize_kernel(
    messages_ptr,
    message_ptr,
    num_values,
    factor,
    seed_low,
    seed_high,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    C: tl.constexpr,
):
    """NUM_SOURCES messages -> the message of their sum; the values stay rotated throughout, but for fine scales."""
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    total = _sum(messages_ptr, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    if C.is_fine:
        _store_fine_message(total, message_ptr, blocks, 0, num_blocks, seed_low, seed_high, C)
    else:
        alpha = tl.full([C.tile, 1], 1.0, tl.float32)
        if C.is_dual:
            alpha = _alpha(pairwise_sum(total * total, C.tile, C.block_size, C.log2_block_size), C)
            total = total * alpha
        _store_message(total, alpha, 1.0, message_ptr, blocks, 0, num_blocks, seed_low, seed_high, C)


def encode_triton(values: Tensor, codec: CodecConfig, messages: Tensor, *, seed: int = 0) -> Tensor:
    """`encode_reference` in one launch; `values` ``[R, N]`` with contiguous rows, into `messages`."""
    num_rows, num_values = values.shape
    if num_values and num_rows:
        with _on_device(values):
            encode_kernel[_grid(num_values, codec, num_rows)](
                values,
                messages,
                num_values,
                values.stride(0),
                *_seed_halves(seed),
                C=_constants(codec, values.device),
                **LAUNCH_OPTIONS,
            )
    return messages


def decode_triton(
    messages: Tensor, codec: CodecConfig, values: Tensor, *, num_sources: int = 1, average: bool = False
) -> Tensor:
    """Decode and sum each `num_sources` rows of `messages` into one row of `values` ``[R, N]``, in one launch."""
    num_rows, num_values = values.shape
    if num_values and num_rows:
        with _on_device(values):
            decode_kernel[_grid(num_values, codec, num_rows)](
                messages,
                values,
                num_values,
                values.stride(0),
                1.0 / num_sources,
                NUM_SOURCES=num_sources,
                AVERAGE=average,
                C=_constants(codec, values.device),
                **LAUNCH_OPTIONS,
            )
    return values


def requantize_triton(
    messages: Tensor, codec: CodecConfig, num_values: int, message: Tensor, *, average: bool = False, seed: int = 0
) -> Tensor:
    """`requantize_reference` in one launch, into `message` ``uint8 [1, message_bytes]``."""
    if num_values:
        with _on_device(messages):
            requantize_kernel[_grid(num_values, codec, 1)](
                messages,
                message,
                num_values,
                1.0 / messages.shape[0],
                *_seed_halves(seed),
                NUM_SOURCES=messages.shape[0],
                AVERAGE=average,
                C=_constants(codec, messages.device),
                **LAUNCH_OPTIONS,
            )
    return message


LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def _on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _grid(num_values: int, codec: CodecConfig, num_rows: int) -> tuple[int, int]:
    num_blocks = MessageLayout.of(num_values, codec).num_blocks
    return triton.cdiv(num_blocks, KernelConstants.of(codec, False).tile), num_rows


def _seed_halves(seed: int) -> tuple[int, int]:
    return seed & 0x7FFFFFFF, seed >> 31


def _constants(codec: CodecConfig, device: torch.device) -> KernelConstants:
    native_fp8 = device.type == "cuda" and _compat.supports_fp8(device) and not INTERPRETED
    return KernelConstants.of(codec, native_fp8)
