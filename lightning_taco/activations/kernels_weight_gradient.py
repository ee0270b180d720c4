"""The gradient of a linear layer's weight from the message of its input: decoded where the matrix product reads it.

A program owns a tile of the result: some outputs by whole blocks of channels. Channels i and i + block/2 share a byte
(see `codec.layout`), so the two halves of the blocks have a sum each, and no value moves to another thread before the
product. Operands are rounded as `decode` rounds them and sums are fp32, so that only the order of the sums differs from
`decode` and a matrix product.

Example: 300 tokens, 256 outputs, 512 channels in blocks of 128, tile 128 x 2 blocks: 2 * 2 programs; program 0 has
outputs 0..127 and blocks 0 and 1 of each token, and reads 64 tokens at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError

from lightning_taco.codec.kernel_launch import constants_of, launch
from lightning_taco.codec.kernels_numbers import from_code
from lightning_taco.codec.layout import SCALE_BYTES, MessageLayout
from lightning_taco.config import CodecConfig

CannotRun = TritonError
"""What a launch raises on a device that lacks the memory or the instructions."""
GROUP = 8
"""Tiles of outputs that take turns at one tile of channels, so that the second-level cache holds both."""


class Tile(NamedTuple):
    """What one program computes, and with what."""

    outputs: int
    tokens: int
    """Read at a time."""
    code_bytes: int
    """Of each token: half as many as there are channels."""
    num_warps: int


TILES = (Tile(128, 64, 128, 8), Tile(128, 64, 64, 4))
"""The large one reads less, two programs of the small one share a processor: one decodes while the other multiplies."""


@triton.jit
def _decoded(codes, scales, kind, C: tl.constexpr):
    """Codes [tokens, blocks, half] and scales [tokens, blocks] -> values of dtype `kind`, [tokens, blocks * half]."""
    values = (from_code(codes, C) * scales[:, :, None]).to(kind)
    return tl.reshape(values, (values.shape[0], values.shape[1] * values.shape[2]))


@triton.jit
def _store_half(result_ptr, total, outputs, channels, valid, num_outputs, num_channels):
    rows = result_ptr + outputs.to(tl.int64)[:, None] * num_channels
    mask = (outputs < num_outputs)[:, None] & valid[None, :]
    tl.store(rows + channels[None, :], total.to(result_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient_kernel(
    gradient_ptr,  # [num_tokens, num_outputs], rows `gradient_stride` apart
    codes_ptr,  # uint8 [num_tokens, row_blocks, block_size / 2]
    scales_ptr,  # fp32 [num_tokens, row_blocks]
    result_ptr,  # [num_outputs, row_blocks * block_size]
    num_tokens,
    num_outputs,
    row_blocks,
    gradient_stride,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    C: tl.constexpr,
):
    """Gradient of the outputs, transposed, times the decoded input."""
    HALF: tl.constexpr = C.block_size // 2
    BLOCKS: tl.constexpr = CODE_BYTES // HALF
    program = tl.program_id(0)
    output_tiles, channel_tiles = tl.cdiv(num_outputs, OUTPUTS), tl.cdiv(row_blocks, BLOCKS)
    group = program // (GROUP * channel_tiles)
    group_size = tl.minimum(output_tiles - group * GROUP, GROUP)
    within = program % (GROUP * channel_tiles)
    outputs = (group * GROUP + within % group_size) * OUTPUTS + tl.arange(0, OUTPUTS)
    first_block = within // group_size * BLOCKS
    blocks = first_block + tl.arange(0, BLOCKS)

    tokens = tl.arange(0, TOKENS)
    # Not num_tokens.to and the like: Triton hands in an argument of 1 as a constant.
    wide_tokens = tokens.to(tl.int64)
    gradients = gradient_ptr + wide_tokens[:, None] * gradient_stride + outputs[None, :]
    places = wide_tokens[:, None] * row_blocks + blocks[None, :]
    codes = codes_ptr + places[:, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    scales = scales_ptr + places
    gradient_step, block_step = tl.cast(gradient_stride, tl.int64) * TOKENS, tl.cast(row_blocks, tl.int64) * TOKENS
    kind = gradient_ptr.dtype.element_ty
    low_total = tl.zeros((OUTPUTS, CODE_BYTES), tl.float32)
    high_total = tl.zeros((OUTPUTS, CODE_BYTES), tl.float32)
    for start in range(0, num_tokens, TOKENS):
        is_token = tokens < num_tokens - start
        gradient = tl.load(gradients, mask=is_token[:, None] & (outputs < num_outputs)[None, :], other=0.0)
        valid = is_token[:, None] & (blocks < row_blocks)[None, :]
        packed = tl.load(codes, mask=valid[:, :, None], other=0).to(tl.int32)
        scale = tl.load(scales, mask=valid, other=0.0)
        low, high = _decoded(packed & 15, scale, kind, C), _decoded(packed >> 4, scale, kind, C)
        transposed = tl.trans(gradient)
        low_total = tl.dot(transposed, low, low_total, input_precision="ieee")
        high_total = tl.dot(transposed, high, high_total, input_precision="ieee")
        gradients += gradient_step
        codes += block_step * HALF
        scales += block_step

    byte = tl.arange(0, CODE_BYTES)
    channels = (first_block + byte // HALF) * C.block_size + byte % HALF
    num_channels = row_blocks * C.block_size
    valid = first_block + byte // HALF < row_blocks
    _store_half(result_ptr, low_total, outputs, channels, valid, num_outputs, num_channels)
    _store_half(result_ptr, high_total, outputs, channels + HALF, valid, num_outputs, num_channels)


def weight_gradient_triton(
    gradient: Tensor, message: Tensor, codec: CodecConfig, num_channels: int, tile: Tile = TILES[0]
) -> Tensor:
    """``gradient.t() @ input``, the input as its message has it.

    Args:
        gradient: of the layer's outputs, ``[tokens, outputs]``, floating point.
        message: ``uint8 [1, message_bytes]`` of the input, ``[tokens, channels]``, whose dtype was that of `gradient`.
        codec: of the message: 4 bits a code, merged scales, no rotation, blocks of 64 or 128.
        num_channels: a multiple of the block size.
        tile: one of `TILES`.

    Returns:
        ``[outputs, channels]``, in the dtype of `gradient`.

    Raises:
        ValueError: a message of fewer values, which the kernel would read beyond.

    Cost: one launch. Reads each code once for every tile of outputs, writes the result once.
    """
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
    num_tokens, num_outputs = gradient.shape
    result = gradient.new_empty(num_outputs, num_channels)
    if not num_tokens:
        return result.zero_()
    layout = MessageLayout.of(num_tokens * num_channels, codec)
    if message.shape[1] < layout.message_bytes:
        raise ValueError(
            f"a message of {message.shape[1]} bytes is not one of {num_tokens} x {num_channels} values, which takes "
            f"{layout.message_bytes}; give the gradient of the layer whose input it was made of."
        )
    codes = message[0, : layout.scale_offset_bytes]
    scales = message[0, layout.scale_offset_bytes :][: layout.num_blocks * SCALE_BYTES].view(torch.float32)
    row_blocks = num_channels // codec.block_size
    channel_tiles = triton.cdiv(num_channels, 2 * tile.code_bytes)
    num_programs = triton.cdiv(num_outputs, tile.outputs) * channel_tiles
    arguments = (gradient, codes, scales, result, num_tokens, num_outputs, row_blocks, gradient.stride(0))
    constants = (tile.outputs, tile.tokens, tile.code_bytes, GROUP, constants_of(codec, gradient.device))
    launch(weight_gradient_kernel, (num_programs, 1, 1), arguments, constants, num_warps=tile.num_warps)
    return result
