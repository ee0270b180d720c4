"""`codec.recode` as Triton kernels: messages of one codec to that of their sum in another; values into a message.

A program owns a tile of blocks of one message, held in parts, as in `codec.kernels`. Example of `recode_sum`: 2 sources
of 3 messages of 300 values, block 128: grid (1, 3); program (0, 1) reads blocks 0..2 of the second message of either
source, adds them and writes 3 blocks of codes and 3 scales of the other codec to the second message that comes out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.kernel_launch import SEEDS, constants_of, constants_of_both, grid_of, launch, seed_halves
from lightning_taco.codec.kernels_messages import (
    count_blocks,
    load_at,
    load_blocks,
    message_bytes,
    store_message,
)
from lightning_taco.codec.kernels_numbers import added, rotated, scaled
from lightning_taco.codec.layout import MessageLayout
from lightning_taco.config import CodecConfig


@triton.jit(do_not_specialize=SEEDS)
def recode_sum_kernel(
    messages_ptr,
    out_ptr,
    num_values,
    source_bytes,  # from a message of one source to the same one of the next
    factor,
    seed_low,
    seed_high,
    NUM_SOURCES: tl.constexpr,
    SCALE: tl.constexpr,  # whether to multiply by factor
    C: tl.constexpr,
    OUT: tl.constexpr,  # the constants of the other codec, of the same block
):
    """NUM_SOURCES messages of each row -> the message of their sum; program (i, r): tile i of row r."""
    row = tl.program_id(1).to(tl.int64)
    num_blocks = count_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    message = messages_ptr + row * message_bytes(num_blocks, C)
    total = load_blocks(message, blocks, num_blocks, C)
    for _ in range(1, NUM_SOURCES):
        message += tl.cast(source_bytes, tl.int64)
        total = added(total, load_blocks(message, blocks, num_blocks, C), C)
    if SCALE:
        total = scaled(total, factor, C)
    out = out_ptr + row * message_bytes(num_blocks, OUT)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    store_message(total, alpha, 1.0, out, blocks, row * num_blocks, num_blocks, seed_low, seed_high, OUT)


@triton.jit(do_not_specialize=SEEDS)
def accumulate_kernel(message_ptr, values_ptr, num_values, seed_low, seed_high, C: tl.constexpr):
    """message + values [num_values] -> message, in place."""
    num_blocks = count_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    parts = load_at(values_ptr, blocks[:, None] * C.block_size, blocks, num_values, C)
    parts = rotated(parts, values_ptr.dtype.element_ty, C)
    total = added(load_blocks(message_ptr, blocks, num_blocks, C), parts, C)
    # All threads have read the tile before any of them writes to it.
    tl.debug_barrier()
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    store_message(total, alpha, 1.0, message_ptr, blocks, 0, num_blocks, seed_low, seed_high, C)


def recode_sum_triton(
    messages: Tensor,
    codec: CodecConfig,
    out_codec: CodecConfig,
    num_values: int,
    *,
    factor: float | None = None,
    seed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """`recode_sum_reference` in one launch, into `out` if it is given."""
    num_sources, num_rows, message_bytes = messages.shape
    if out is None:
        out_bytes = MessageLayout.of(num_values, out_codec).message_bytes
        out = torch.empty(num_rows, out_bytes, dtype=torch.uint8, device=messages.device)
    if num_values and num_rows:
        constants, out_constants = constants_of_both(codec, out_codec, messages.device, num_values)
        scalars = (num_values, num_rows * message_bytes, 1.0 if factor is None else factor, *seed_halves(seed))
        fixed = (num_sources, factor is not None, constants, out_constants)
        launch(recode_sum_kernel, grid_of(num_values, constants, num_rows), (messages, out, *scalars), fixed)
    return out


def accumulate_triton(message: Tensor, values: Tensor, codec: CodecConfig, *, seed: int = 0) -> Tensor:
    """`accumulate_reference` in one launch, in place."""
    num_values = values.numel()
    if num_values:
        constants = constants_of(codec, values.device, num_values)
        arguments = (message, values, num_values, *seed_halves(seed))
        launch(accumulate_kernel, grid_of(num_values, constants, 1), arguments, (constants,))
    return message
