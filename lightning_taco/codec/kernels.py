"""The codec as fused Triton kernels: one launch to encode, one to decode, one to decode and sum, one to requantise.

Numbers and packing are in `codec.kernels_numbers` and `codec.kernels_planes`, launches in `codec.kernel_launch`. Bit
for bit the same as `codec.reference`: the same butterfly and sums in the same order, IEEE division and square root, and
no contraction into fused multiply-adds (``enable_fp_fusion=False``). Launch configurations are fixed, so that a new
shape costs no new tuning.

A program owns a tile of blocks of one message. Example: 300 values, block 128, two messages: grid (1, 2); program
(0, 1) reads values 300..599 as blocks [300..427], [428..555], [556..599 and zeros], and writes 3 * 128 codes and
3 scales to the second message.

A tile is held as a tuple of up to 16 parts: part j has values j * width to (j + 1) * width of each of its blocks, and
up to block 128 each thread has a whole block. Rotation, largest value and packing then need neither shared memory nor
exchange between threads, which is what they cost when a tile is one tensor.

Offsets are 64-bit: a tensor may hold more than 2^31 values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_taco.codec.kernel_launch import NUMBERING, SEEDS, constants_of, grid_of, launch, seed_halves
from lightning_taco.codec.kernels_numbers import (
    added,
    from_code,
    hadamard,
    random_parts,
    scaled,
    sum_of_squares,
    to_code,
)
from lightning_taco.codec.kernels_planes import joined, load_codes, store_codes
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

_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_ALPHA_EPSILON = tl.constexpr(ALPHA_EPSILON)
_ALPHA_MIN = tl.constexpr(ALPHA_MIN)
_ALPHA_MAX = tl.constexpr(ALPHA_MAX)
_ABS_MASK = tl.constexpr(0x7FFFFFFF)
_INF_BITS = tl.constexpr(0x7F800000)
_FINE_LOWEST, _FINE_HIGHEST = tl.constexpr(FINE_LOWEST), tl.constexpr(FINE_HIGHEST)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST_EXPONENT)
_SUB_BLOCK = tl.constexpr(SUB_BLOCK_SIZE)


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
def _factor_pointers(message, blocks, num_blocks, SUB_BLOCK: tl.constexpr, C: tl.constexpr):
    """uint8 pointers [tile, 1] to the factors of sub-block number SUB_BLOCK of each block."""
    return message + _alpha_offset(num_blocks, C) + blocks[:, None] * (C.block_size // _SUB_BLOCK) + SUB_BLOCK


@triton.jit
def _alpha(mean_energy, C: tl.constexpr):
    alpha = tl.div_rn(tl.full(mean_energy.shape, C.code_max, tl.float32), tl.sqrt_rn(mean_energy + _ALPHA_EPSILON))
    return tl.minimum(tl.maximum(alpha, _ALPHA_MIN), _ALPHA_MAX)


@triton.jit
def largest_bits(parts, C: tl.constexpr):
    """The largest magnitude of each block, as bits: they order like the floats, NaN and Inf above all. int32 [tile]."""
    PARTS: tl.constexpr = C.parts
    largest = parts[0].to(tl.int32, bitcast=True) & _ABS_MASK
    for part in tl.static_range(1, PARTS):
        largest = tl.maximum(largest, parts[part].to(tl.int32, bitcast=True) & _ABS_MASK)
    return tl.max(largest, axis=1)


@triton.jit
def _equalize(parts, C: tl.constexpr):
    """Parts with sub-blocks of one energy; the bits of their factors, a tuple of int32 [tile, 1]; exponents [tile]."""
    SUB_BLOCKS: tl.constexpr = C.block_size // _SUB_BLOCK
    PARTS_PER_SUB_BLOCK: tl.constexpr = _SUB_BLOCK // C.width
    exponent = tl.minimum(largest_bits(parts, C) >> 23, 253)
    parts = scaled(parts, ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None], C)
    usable = (exponent >= _SMALLEST_EXPONENT)[:, None]
    equalized, factor_bits = (), ()
    for sub_block in tl.static_range(SUB_BLOCKS):
        energy = sum_of_squares(parts, sub_block * PARTS_PER_SUB_BLOCK, PARTS_PER_SUB_BLOCK, C)
        root = tl.sqrt_rn(energy * (1.0 / _SUB_BLOCK))
        bits = (root.to(tl.int32, bitcast=True) & _ABS_MASK) >> 20
        bits = tl.minimum(tl.maximum(bits, _FINE_LOWEST), _FINE_HIGHEST - 1)
        factor = (bits << 20).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)
        for part in tl.static_range(PARTS_PER_SUB_BLOCK):
            values = parts[sub_block * PARTS_PER_SUB_BLOCK + part] * inverse
            equalized = equalized + (tl.where(usable, values, 0.0),)
        factor_bits = factor_bits + (bits,)
    return equalized, factor_bits, exponent


@triton.jit
def _largest_bits_of_each_sign(parts, C: tl.constexpr):
    """The largest positive and the largest negative magnitude of each block, as bits [tile]; 0 where there is none."""
    PARTS: tl.constexpr = C.parts
    bits = parts[0].to(tl.int32, bitcast=True)
    highest = bits ^ ((bits >> 31) & _ABS_MASK)  # orders like the floats
    lowest = highest
    for part in tl.static_range(1, PARTS):
        bits = parts[part].to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & _ABS_MASK)
        highest, lowest = tl.maximum(highest, ordered), tl.minimum(lowest, ordered)
    positive = tl.maximum(tl.max(highest, axis=1), 0)
    negative = tl.minimum(tl.min(lowest, axis=1), -1)  # -1 is minus zero
    return positive, (negative ^ _ABS_MASK) & _ABS_MASK


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
def _scales(parts, C: tl.constexpr):
    """What multiplies to quantise, what multiplies to recover, is it finite, is it not all zero."""
    if C.is_gaussian:
        positive_bits, negative_bits = _largest_bits_of_each_sign(parts, C)
        amax_bits = tl.maximum(positive_bits, negative_bits)
    else:
        amax_bits = largest_bits(parts, C)
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
def store_message(
    parts,  # fp32 [tile, width] each, already in the domain that is quantised
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
    """Quantise the tile, and write its codes and scales."""
    codes, scale_inv, alpha = quantized(parts, alpha, power, blocks, first_block, seed_low, seed_high, C)
    _write(codes, scale_inv, alpha, message, blocks, num_blocks, C)


@triton.jit
def quantized(parts, alpha, power, blocks, first_block, seed_low, seed_high, C: tl.constexpr):
    """The codes of the tile, parts of [tile, width], and scale_inv and alpha, fp32 [tile], as a message holds them."""
    PARTS: tl.constexpr = C.parts
    scale, scale_inv, finite, usable = _scales(parts, C)
    noise = ()
    if C.is_stochastic:
        noise = random_parts(first_block + blocks, seed_low, seed_high, C)
    codes = ()
    for part in tl.static_range(PARTS):
        values = tl.where(usable[:, None], parts[part] * scale[:, None], 0.0)
        if C.is_stochastic:  # noqa: SIM108  noise is empty otherwise
            codes = codes + (to_code(values, noise[part], C),)
        else:
            codes = codes + (to_code(values, 0, C),)
    if C.is_fine:
        # Chosen anew: of a product with NaN devices make NaNs of other bits.
        scale_inv = tl.where(finite, scale_inv * power, float("nan"))
    return codes, scale_inv, tl.where(finite, tl.reshape(alpha, (C.tile,)), 1.0)


@triton.jit
def _write(codes, scale_inv, alpha, message, blocks, num_blocks, C: tl.constexpr):
    valid = blocks < num_blocks
    store_codes(message, codes, blocks, valid, num_blocks, C)
    tl.store(_scale_pointers(message, blocks, num_blocks, C), scale_inv, mask=valid)
    if C.is_dual:
        tl.store(_alpha_pointers(message, blocks, num_blocks, C), alpha, mask=valid)


@triton.jit
def _store_copies(
    parts,
    alpha,
    messages,  # uint8, or int64: addresses
    row,
    offset_bytes,
    blocks,
    first_block,
    num_blocks,
    seed_low,
    seed_high,
    NUM_COPIES: tl.constexpr,
    C: tl.constexpr,
):
    """Quantise the tile, in the domain that is quantised or, for fine scales, before it, and write each copy of it."""
    factors = ()
    power = tl.full([C.tile], 1.0, tl.float32)
    if C.is_fine:
        parts, factors, exponent = _equalize(parts, C)
        parts = hadamard(scaled(parts, 1.0 / C.block_size, C), C)
        power = (exponent << 23).to(tl.float32, bitcast=True)
    codes, scale_inv, alpha = quantized(parts, alpha, power, blocks, first_block, seed_low, seed_high, C)
    for copy in tl.static_range(NUM_COPIES):
        message = _message_at(messages, row * NUM_COPIES + copy, offset_bytes, num_blocks, C)
        _write(codes, scale_inv, alpha, message, blocks, num_blocks, C)
        if C.is_fine:
            _write_factors(factors, message, blocks, num_blocks, C)


@triton.jit
def _write_factors(factor_bits, message, blocks, num_blocks, C: tl.constexpr):
    SUB_BLOCKS: tl.constexpr = C.block_size // _SUB_BLOCK
    for sub_block in tl.static_range(SUB_BLOCKS):
        pointers = _factor_pointers(message, blocks, num_blocks, sub_block, C)
        factor = (factor_bits[sub_block] - _FINE_LOWEST).to(tl.uint8)
        tl.store(pointers, factor, mask=(blocks < num_blocks)[:, None])


@triton.jit
def load_blocks(message, blocks, num_blocks, C: tl.constexpr):
    """The tile's values, parts of fp32 [tile, width], as they may be added: rotated, or at their place in fine mode."""
    PARTS: tl.constexpr = C.parts
    valid = blocks < num_blocks
    codes = load_codes(message, blocks, valid, num_blocks, C)
    scale_inv = tl.load(_scale_pointers(message, blocks, num_blocks, C), mask=valid, other=0.0)
    if C.is_dual:
        alpha = tl.load(_alpha_pointers(message, blocks, num_blocks, C), mask=valid, other=1.0)
        scale_inv = tl.div_rn(scale_inv, alpha)
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (from_code(codes[part], C) * scale_inv[:, None],)
    if C.is_fine:
        rotated = hadamard(parts, C)
        parts = ()
        for part in tl.static_range(PARTS):
            pointers = _factor_pointers(message, blocks, num_blocks, part * C.width // _SUB_BLOCK, C)
            bits = tl.load(pointers, mask=valid[:, None], other=0).to(tl.int32) + _FINE_LOWEST
            parts = parts + (rotated[part] * (bits << 20).to(tl.float32, bitcast=True),)
    return parts


@triton.jit
def store_values(row, parts, blocks, num_values, C: tl.constexpr):
    """Write the tile's values, parts of fp32 [tile, width], to a row of `num_values` as its dtype rounds them."""
    _store_at(row, blocks[:, None] * C.block_size, parts, blocks, num_values, C)


@triton.jit
def _store_at(row, places, parts, blocks, num_values, C: tl.constexpr):
    """The same, where each block begins at one of `places`, int64 [tile, 1], of the row."""
    PARTS: tl.constexpr = C.parts
    rounded = ()
    for part in tl.static_range(PARTS):
        rounded = rounded + (parts[part].to(row.dtype.element_ty),)
    within = tl.arange(0, C.block_size)[None, :]
    mask = blocks[:, None] * C.block_size + within < num_values
    tl.store(row + places + within, joined(rounded, C.parts, C), mask=mask)


@triton.jit
def _message_at(messages, index, offset_bytes, num_blocks, C: tl.constexpr):
    """Where to write message `index`: behind those before it, or, at `offset_bytes`, in the buffer of a table."""
    if messages.dtype.element_ty == tl.int64:
        address = tl.multiple_of(tl.load(messages + index) + tl.cast(offset_bytes, tl.int64), 16)
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    else:
        return messages + index * _message_bytes(num_blocks, C)


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
    message = messages + first * _message_bytes(num_blocks, C)
    total = load_blocks(message, blocks, num_blocks, C)
    for _ in range(1, NUM_SOURCES):
        message += _message_bytes(num_blocks, C)
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
    PARTS: tl.constexpr = C.parts
    row = tl.program_id(1).to(tl.int64)
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    places = _first_places(blocks, row, row_stride, segment, segment_stride, SEGMENTED, C)
    parts = ()
    for part in tl.static_range(PARTS):
        within = part * C.width + tl.arange(0, C.width)[None, :]
        mask = blocks[:, None] * C.block_size + within < num_values
        values = tl.load(values_ptr + places + within, mask=mask, other=0.0)
        parts = parts + (values.to(tl.float32),)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    if C.is_dual:
        alpha = _alpha(sum_of_squares(parts, 0, C.parts, C) * (1.0 / C.block_size), C)
        parts = scaled(parts, alpha, C)
    if C.is_rotated and not C.is_fine:
        parts = hadamard(scaled(parts, 1.0 / C.block_size, C), C)
    number = tl.cast(first_block, tl.int64) + row * row_blocks
    _store_copies(
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
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    total = _sum(messages_ptr, row * NUM_SOURCES, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    if C.is_rotated and not C.is_fine:
        total = hadamard(total, C)
    places = _first_places(blocks, row, row_stride, segment, segment_stride, SEGMENTED, C)
    _store_at(values_ptr, places, total, blocks, num_values, C)


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
    num_blocks = _num_blocks(num_values, C)
    blocks = tl.program_id(0).to(tl.int64) * C.tile + tl.arange(0, C.tile)
    total = _sum(messages_ptr, 0, blocks, num_blocks, factor, NUM_SOURCES, AVERAGE, C)
    alpha = tl.full([C.tile, 1], 1.0, tl.float32)
    if C.is_dual:
        alpha = _alpha(sum_of_squares(total, 0, C.parts, C), C)
        total = scaled(total, alpha, C)
    number = tl.cast(first_block, tl.int64)
    _store_copies(
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
        constants = constants_of(codec, values.device)
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
        constants = constants_of(codec, values.device)
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
        constants, num_sources = constants_of(codec, messages.device), messages.shape[0]
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
