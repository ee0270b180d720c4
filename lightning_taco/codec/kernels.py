"""The codec as fused Triton kernels: one launch to encode, one to decode, one to decode and sum, one to requantise.

Messages are in `codec.kernels_messages`, scales in `codec.kernels_scales`, numbers and packing in
`codec.kernels_numbers` and `codec.kernels_planes`, launches in `codec.kernel_launch`. Bit for bit the same as
`codec.reference`: the same butterfly and sums in the same order, IEEE division and square root, and no contraction into
fused multiply-adds (``enable_fp_fusion=False``) but where the product is exact. Launch configurations are fixed, so
that a new shape costs no new tuning; a row of whole tiles has kernels of its own, without masks.

A program owns a tile of blocks of one message. Example: 300 values, block 128, two messages: grid (1, 2); program
(0, 1) reads values 300..599 as blocks [300..427], [428..555], [556..599 and zeros], and writes 3 * 128 codes and
3 scales to the second message.

A tile is held as a tuple of parts: part j has values j * width to (j + 1) * width of each of its blocks. A few threads
share a block, each with 8 neighbouring values of every part, so that a warp reads and writes whole sectors of memory
and a thread's values leave room for many warps. Rotation stays within a thread, but for the stages between the threads
of a block, which cost one exchange between lanes a value; nothing goes through shared memory. Codes go four to a word.

Offsets are 64-bit: a tensor may hold more than 2^31 values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.kernel_launch import NUMBERING, SEEDS, constants_of, grid_of, launch, seed_halves
from lightning_taco.codec.kernels_messages import (
    count_blocks,
    load_at,
    load_blocks,
    message_bytes,
    store_at,
    store_copies,
)
from lightning_taco.codec.kernels_numbers import added, hadamard, rotated, scaled, spread, sum_of_squares
from lightning_taco.codec.kernels_scales import energy_scale
from lightning_taco.config import CodecConfig


@triton.jit
def _sum(
    messages,
    first,  # the first of them
    blocks,
    num_blocks,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    C: tl.constexpr,
):
    message = messages + first * message_bytes(num_blocks, C)
    total = load_blocks(message, blocks, num_blocks, C)
    for _ in range(1, NUM_SOURCES):
        message += message_bytes(num_blocks, C)
        total = added(total, load_blocks(message, blocks, num_blocks, C), C)
    if AVERAGE:
        total = scaled(total, factor, C)
    return total


@triton.jit
def _first_places(blocks, row, row_stride, segment, segment_stride, SEGMENTED: tl.constexpr, C: tl.constexpr):
    """Where the values of each block begin, int64 [tile, 1], in a row that is whole or of segments of whole blocks."""
    first = blocks * C.block_size
    if SEGMENTED:
        first += first // segment * (tl.cast(segment_stride, tl.int64) - segment)
    return (row * row_stride + first)[:, None]


@triton.jit(do_not_specialize=[*SEEDS, *NUMBERING])
def encode_kernel(
    values_ptr,
    messages_ptr,  # uint8, or int64: addresses, NUM_COPIES for each row
    num_values,
    row_stride,
    segment,
    segment_stride,
    offset_bytes,
    seed_low,
    seed_high,
    first_block,
    row_blocks,
    NUM_COPIES: tl.constexpr,
    SEGMENTED: tl.constexpr,
    C: tl.constexpr,
):
    """values [R, num_values] -> messages uint8 [R, message_bytes]; program (i, r): tile i of row r."""
    row = tl.program_id(1).to(tl.int64)
    num_blocks = count_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    places = _first_places(blocks, row, row_stride, segment, segment_stride, SEGMENTED, C)
    parts = load_at(values_ptr, places, blocks, num_values, C)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    if C.is_dual:
        alpha = energy_scale(sum_of_squares(parts, 0, C.parts, C) * (1.0 / C.block_size), C)
        if C.is_rotated:
            parts = hadamard(scaled(parts, spread(alpha * (1.0 / C.block_size), C), C), C)
        else:
            parts = scaled(parts, spread(alpha, C), C)
    elif not C.is_fine:
        parts = rotated(parts, values_ptr.dtype.element_ty, C)
    number = tl.cast(first_block, tl.int64) + row * row_blocks
    store_copies(
        parts, alpha, messages_ptr, row, offset_bytes, blocks, number, num_blocks, seed_low, seed_high, NUM_COPIES, C
    )


@triton.jit
def decode_kernel(
    messages_ptr,
    values_ptr,
    num_values,
    row_stride,
    segment,
    segment_stride,
    factor,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    C: tl.constexpr,
):
    """Row r of messages (the sum of NUM_SOURCES consecutive ones) -> row r of values [R, num_values]."""
    row = tl.program_id(1).to(tl.int64)
    num_blocks = count_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    total = _sum(messages_ptr, row * NUM_SOURCES, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    if C.is_rotated and not C.is_fine:
        total = hadamard(total, C)
    places = _first_places(blocks, row, row_stride, segment, segment_stride, SEGMENTED, C)
    store_at(values_ptr, places, total, blocks, num_values, C)


@triton.jit(do_not_specialize=[*SEEDS, *NUMBERING])
def requantize_kernel(
    messages_ptr,
    message_ptr,  # uint8, or int64: addresses
    num_values,
    offset_bytes,
    factor,
    seed_low,
    seed_high,
    first_block,
    NUM_COPIES: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    AVERAGE: tl.constexpr,
    C: tl.constexpr,
):
    """NUM_SOURCES messages -> the message of their sum; the values stay rotated throughout, but for fine scales."""
    num_blocks = count_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    total = _sum(messages_ptr, 0, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    if C.is_dual:
        alpha = energy_scale(sum_of_squares(total, 0, C.parts, C), C)
        total = scaled(total, spread(alpha, C), C)
    number = tl.cast(first_block, tl.int64)
    store_copies(
        total, alpha, message_ptr, 0, offset_bytes, blocks, number, num_blocks, seed_low, seed_high, NUM_COPIES, C
    )


def encode_triton(
    values: Tensor,
    codec: CodecConfig,
    messages: Tensor,
    seed: int = 0,
    first_block: int = 0,
    row_blocks: int | None = None,
    *,
    offset_bytes: int = 0,
) -> Tensor:
    """`encode_reference` in one launch; `values` ``[R, N]`` or ``[R, segments, L]``.

    `messages` is ``uint8 [R, message_bytes]``, or ``int64 [R * copies]``: addresses of buffers, to each of which its
    row's message is written, `offset_bytes` from its start.
    """
    num_rows, num_values = values.shape[0], values.shape[1:].numel()
    if num_values and num_rows:
        constants = constants_of(codec, values.device, num_values)
        if row_blocks is None:
            row_blocks = -(-num_values // constants.block_size)
        places, is_segmented = _places(values)
        arguments = (values, messages, num_values, *places, offset_bytes, *seed_halves(seed), first_block, row_blocks)
        fixed = (messages.shape[0] // num_rows, is_segmented, constants)
        launch(encode_kernel, grid_of(num_values, constants, num_rows), arguments, fixed)
    return messages


def decode_triton(
    messages: Tensor,
    codec: CodecConfig,
    values: Tensor,
    *,
    num_sources: int = 1,
    average: bool = False,
    factor: float | None = None,
) -> Tensor:
    """Decode and sum each `num_sources` messages into a row of `values`, ``[R, N]`` or ``[R, segments, L]``."""
    factor = 1.0 / num_sources if average else factor
    num_rows, num_values = values.shape[0], values.shape[1:].numel()
    if num_values and num_rows:
        constants = constants_of(codec, values.device, num_values)
        places, is_segmented = _places(values)
        arguments = (messages, values, num_values, *places, 1.0 if factor is None else factor)
        fixed = (num_sources, factor is not None, is_segmented, constants)
        launch(decode_kernel, grid_of(num_values, constants, num_rows), arguments, fixed)
    return values


def requantize_triton(
    messages: Tensor,
    codec: CodecConfig,
    num_values: int,
    message: Tensor,
    *,
    average: bool = False,
    seed: int = 0,
    first_block: int = 0,
    offset_bytes: int = 0,
) -> Tensor:
    """`requantize_reference` in one launch, into `message`, ``uint8 [1, message_bytes]`` or addresses as above."""
    if num_values:
        constants, num_sources = constants_of(codec, messages.device, num_values), messages.shape[0]
        arguments = (messages, message, num_values, offset_bytes, 1.0 / num_sources, *seed_halves(seed), first_block)
        fixed = (message.shape[0], num_sources, average, constants)
        launch(requantize_kernel, grid_of(num_values, constants, 1), arguments, fixed)
    return message


def _places(values: Tensor) -> tuple[tuple[int, int, int], bool]:
    """Strides of rows, sizes and strides of segments, and whether there are any."""
    if values.dim() == 3 and values.shape[1] > 1:
        return (values.stride(0), values.shape[2], values.stride(1)), True
    num_values = values.shape[1:].numel()
    return (values.stride(0), num_values, num_values), False
