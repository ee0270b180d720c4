"""Messages as the codec's kernels write and read them: where codes and scales lie, and a tile to them and back.

Functions of Triton only, on tiles held in parts as in `codec.kernels`; `codec.layout` says how a message is laid out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_taco.codec.kernels_native import bf16_to_floats
from lightning_taco.codec.kernels_numbers import from_words, hadamard, random_key, random_pair, scaled, to_words
from lightning_taco.codec.kernels_planes import is_narrow, joined, load_codes, packed_mask, store_codes
from lightning_taco.codec.kernels_scales import block_scales, equalize
from lightning_taco.codec.reference import FINE_LOWEST
from lightning_taco.config import SUB_BLOCK_SIZE

_FINE_LOWEST, _SUB_BLOCK = tl.constexpr(FINE_LOWEST), tl.constexpr(SUB_BLOCK_SIZE)


@triton.jit
def count_blocks(num_values, C: tl.constexpr):
    """Of a row of `num_values`, int64."""
    # Not num_values.to: Triton hands in an argument of 1 as a constant. Shifts, since a division looks at the sign.
    return (tl.cast(num_values, tl.int64) + (0 if C.is_whole else C.block_size - 1)) >> C.log2_block_size


@triton.jit
def _aligned(num_bytes):
    # By a product, so that the compiler knows and reads whole words.
    return ((num_bytes + 15) >> 4) * 16


@triton.jit
def _scale_offset(num_blocks, C: tl.constexpr):
    return _aligned(num_blocks * C.code_bytes)


@triton.jit
def _alpha_offset(num_blocks, C: tl.constexpr):
    return _scale_offset(num_blocks, C) + num_blocks * 4


@triton.jit
def message_bytes(num_blocks, C: tl.constexpr):
    """From a message to the next, int64."""
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
def block_mask(blocks, num_blocks, C: tl.constexpr):
    """Which of the tile's blocks there are, [tile]."""
    return tl.full(blocks.shape, True, tl.int1) if C.is_whole else blocks < num_blocks


@triton.jit
def value_mask(places, num_values, C: tl.constexpr):
    """Which values there are, by their places in the row."""
    return tl.full(places.shape, True, tl.int1) if C.is_whole else places < num_values


@triton.jit
def to_fp32(values, C: tl.constexpr):
    """Exactly."""
    return bf16_to_floats(values) if C.is_nvidia and values.dtype == tl.bfloat16 else values.to(tl.float32)


@triton.jit
def load_at(row, places, blocks, num_values, C: tl.constexpr):
    """The tile's values in a row of `num_values`, parts of fp32 [tile, width]; each block begins at one of `places`."""
    PARTS: tl.constexpr = C.parts
    parts = ()
    for part in tl.static_range(PARTS):
        within = part * C.width + tl.arange(0, C.width)[None, :]
        mask = value_mask(blocks[:, None] * C.block_size + within, num_values, C)
        parts = parts + (to_fp32(tl.load(row + places + within, mask=mask, other=0.0), C),)
    return parts


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
def _codes(values, scale, noise, is_kept, C: tl.constexpr):
    """Of one part, by fours; codes of zero in the blocks that are not kept."""
    return tl.where(is_kept, to_words(values * scale[:, None], noise, C), C.zero_word)


@triton.jit
def quantized(parts, alpha, power, blocks, first_block, seed_low, seed_high, C: tl.constexpr):
    """Codes of the tile, parts of words [tile, width / 4]; scale_inv and alpha, fp32 [tile], as a message has them."""
    PARTS: tl.constexpr = C.parts
    scale, scale_inv, finite, usable = block_scales(parts, C)
    is_kept = packed_mask(usable, C)
    codes = ()
    if C.is_stochastic:
        HALF: tl.constexpr = C.parts // 2
        key, behind = random_key(first_block + blocks, seed_low, seed_high), ()
        for part in tl.static_range(HALF):
            noise, noise_behind = random_pair(key, part, C)
            codes = codes + (_codes(parts[part], scale, noise, is_kept, C),)
            behind = behind + (_codes(parts[part + HALF], scale, noise_behind, is_kept, C),)
        codes = codes + behind
    else:
        for part in tl.static_range(PARTS):
            codes = codes + (_codes(parts[part], scale, 0, is_kept, C),)
    if C.is_fine:
        # Chosen anew: of a product with NaN devices make NaNs of other bits.
        scale_inv = tl.where(finite, scale_inv * power, float("nan"))
    return codes, scale_inv, tl.where(finite, tl.reshape(alpha, (C.tile,)), 1.0)


@triton.jit
def _write(codes, scale_inv, alpha, message, blocks, num_blocks, C: tl.constexpr):
    valid = block_mask(blocks, num_blocks, C)
    store_codes(message, codes, blocks, valid, num_blocks, C)
    tl.store(_scale_pointers(message, blocks, num_blocks, C), scale_inv, mask=valid)
    if C.is_dual:
        tl.store(_alpha_pointers(message, blocks, num_blocks, C), alpha, mask=valid)


@triton.jit
def store_copies(
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
        parts, factors, exponent = equalize(parts, C)
        parts = hadamard(scaled(parts, 1.0 / C.block_size, C), C)
        power = (exponent << 23).to(tl.float32, bitcast=True)
    codes, scale_inv, alpha = quantized(parts, alpha, power, blocks, first_block, seed_low, seed_high, C)
    for copy in tl.static_range(NUM_COPIES):
        message = message_at(messages, row * NUM_COPIES + copy, offset_bytes, num_blocks, C)
        _write(codes, scale_inv, alpha, message, blocks, num_blocks, C)
        if C.is_fine:
            _write_factors(factors, message, blocks, num_blocks, C)


@triton.jit
def _write_factors(factor_bits, message, blocks, num_blocks, C: tl.constexpr):
    SUB_BLOCKS: tl.constexpr = C.block_size // _SUB_BLOCK
    for sub_block in tl.static_range(SUB_BLOCKS):
        pointers = _factor_pointers(message, blocks, num_blocks, sub_block, C)
        factor = (factor_bits[sub_block] - _FINE_LOWEST).to(tl.uint8)
        tl.store(pointers, factor, mask=block_mask(blocks, num_blocks, C)[:, None])


@triton.jit
def load_blocks(message, blocks, num_blocks, C: tl.constexpr):
    """The tile's values, parts of fp32 [tile, width], as they may be added: rotated, or at their place in fine mode."""
    PARTS: tl.constexpr = C.parts
    valid = block_mask(blocks, num_blocks, C)
    codes = load_codes(message, blocks, valid, num_blocks, C)
    scale_inv = tl.load(_scale_pointers(message, blocks, num_blocks, C), mask=valid, other=0.0)
    if C.is_dual:
        alpha = tl.load(_alpha_pointers(message, blocks, num_blocks, C), mask=valid, other=1.0)
        scale_inv = tl.div_rn(scale_inv, alpha)
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (from_words(codes[part], C) * scale_inv[:, None],)
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
    store_at(row, blocks[:, None] * C.block_size, parts, blocks, num_values, C)


@triton.jit
def store_at(row, places, parts, blocks, num_values, C: tl.constexpr):
    """The same, where each block begins at one of `places`, int64 [tile, 1], of the row."""
    PARTS: tl.constexpr = C.parts
    rounded = ()
    for part in tl.static_range(PARTS):
        rounded = rounded + (parts[part].to(row.dtype.element_ty),)
    first = blocks[:, None] * C.block_size
    if is_narrow(C.parts, C.width, row.dtype.element_ty.primitive_bitwidth):
        within = tl.arange(0, C.block_size)[None, :]
        tl.store(row + places + within, joined(rounded, C.parts, C), mask=value_mask(first + within, num_values, C))
    else:
        for part in tl.static_range(PARTS):
            within = part * C.width + tl.arange(0, C.width)[None, :]
            tl.store(row + places + within, rounded[part], mask=value_mask(first + within, num_values, C))


@triton.jit
def message_at(messages, index, offset_bytes, num_blocks, C: tl.constexpr):
    """Where to write message `index`: behind those before it, or, at `offset_bytes`, in the buffer of a table."""
    if messages.dtype.element_ty == tl.int64:
        address = tl.multiple_of(tl.load(messages + index) + tl.cast(offset_bytes, tl.int64), 16)
        return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    else:
        return messages + index * message_bytes(num_blocks, C)
