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
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.codec.reference import (
    ALPHA_EPSILON,
    ALPHA_MAX,
    ALPHA_MIN,
    CODE_MAX,
    SMALLEST_AMAX,
)
from lightning_taco.config import CodecConfig

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
# Adding 2^14 rounds to a multiple of 2^-9, the spacing of E4M3's subnormals.
_SUBNORMAL_MAGIC = tl.constexpr(16384.0)
_SUBNORMAL_MAGIC_BITS = tl.constexpr(0x46800000)
_SMALLEST_NORMAL_E4M3_BITS = tl.constexpr(0x3C800000)  # 2^-6 as fp32


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
def _e4m3_code(quantized):
    """fp32 within [-448, 448] -> E4M3 bits, ties to even, by integer arithmetic: exact where the cast is not."""
    bits = quantized.to(tl.int32, bitcast=True)
    magnitude = bits & _ABS_MASK
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_MAGIC
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_MAGIC_BITS
    code = tl.where(magnitude < _SMALLEST_NORMAL_E4M3_BITS, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _e4m3_value(code):
    """E4M3 bits, none of them NaN -> fp32, exactly, by integer arithmetic."""
    wide = code.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * 0.001953125
    value = tl.where(magnitude < 8, subnormal, normal)
    # The sign as a bit: a negation is 0 - value in older tritons, which loses the sign of zero.
    signed = value.to(tl.int32, bitcast=True) | ((wide & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def _to_code(quantized, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    if ELEMENT == "int8":
        rounded = (quantized + _ROUND_MAGIC).to(tl.int32, bitcast=True) - _ROUND_MAGIC_BITS
        code = (rounded & 0xFF).to(tl.uint8)
    elif NATIVE_FP8:
        code = quantized.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _e4m3_code(quantized)
    return code


@triton.jit
def _from_code(code, ELEMENT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    if ELEMENT == "int8":
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif NATIVE_FP8:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = _e4m3_value(code)
    return value


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
    num_blocks,
    scale_offset_bytes,
    alpha_offset_bytes,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = blocks < num_blocks
    tl.store(message + offsets, _to_code(quantized, ELEMENT, NATIVE_FP8), mask=valid[:, None])
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
    scale_offset_bytes,
    alpha_offset_bytes,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tile's codes times scale_inv, fp32 [TILE, BLOCK], still rotated."""
    valid = blocks < num_blocks
    offsets = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes = tl.load(message + offsets, mask=valid[:, None], other=0)
    scales = (message + scale_offset_bytes).to(tl.pointer_type(tl.float32))
    scale_inv = tl.load(scales + blocks, mask=valid, other=0.0)
    if DUAL:
        alphas = (message + alpha_offset_bytes).to(tl.pointer_type(tl.float32))
        scale_inv = tl.div_rn(scale_inv, tl.load(alphas + blocks, mask=valid, other=1.0))
    return _from_code(codes, ELEMENT, NATIVE_FP8) * scale_inv[:, None]


@triton.jit
def _sum_rotated(
    messages,
    message_bytes,
    blocks,
    num_blocks,
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    DUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = _load_rotated(
        messages, blocks, num_blocks, scale_offset_bytes, alpha_offset_bytes, ELEMENT, NATIVE_FP8, DUAL, BLOCK
    )
    for _ in range(1, NUM_SOURCES):
        messages += message_bytes
        total += _load_rotated(
            messages,
            blocks,
            num_blocks,
            scale_offset_bytes,
            alpha_offset_bytes,
            ELEMENT,
            NATIVE_FP8,
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
    scale_offset_bytes,
    alpha_offset_bytes,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
        num_blocks,
        scale_offset_bytes,
        alpha_offset_bytes,
        ELEMENT,
        NATIVE_FP8,
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
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
        scale_offset_bytes,
        alpha_offset_bytes,
        factor,
        NUM_SOURCES,
        AVERAGE,
        ELEMENT,
        NATIVE_FP8,
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
    scale_offset_bytes,
    alpha_offset_bytes,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    ELEMENT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
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
        scale_offset_bytes,
        alpha_offset_bytes,
        factor,
        NUM_SOURCES,
        AVERAGE,
        ELEMENT,
        NATIVE_FP8,
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
        num_blocks,
        scale_offset_bytes,
        alpha_offset_bytes,
        ELEMENT,
        NATIVE_FP8,
        DUAL,
        CODE_MAX_,
        TILE,
        BLOCK,
    )


VALUES_PER_PROGRAM = 4096


def encode_triton(values: Tensor, codec: CodecConfig, messages: Tensor) -> Tensor:
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
    messages: Tensor, codec: CodecConfig, num_values: int, message: Tensor, *, average: bool = False
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


def _offsets(layout: MessageLayout) -> tuple[int, int, int, int]:
    return layout.message_bytes, layout.num_blocks, layout.scale_offset_bytes, layout.alpha_offset_bytes


def _options(codec: CodecConfig, device: torch.device) -> dict[str, Any]:
    native_fp8 = device.type == "cuda" and _compat.supports_fp8(device) and not INTERPRETED
    return {
        "ELEMENT": codec.element,
        "NATIVE_FP8": native_fp8,
        "DUAL": codec.scale_mode == "dual",
        "TILE": VALUES_PER_PROGRAM // codec.block_size,
        "BLOCK": codec.block_size,
        "LOG2_BLOCK": codec.block_size.bit_length() - 1,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
