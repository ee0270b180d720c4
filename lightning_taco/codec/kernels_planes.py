"""How the codec's kernels pack codes of fewer than 8 bits into planes of bytes (see `codec.layout`), and read them.

A tile's codes come as parts of [tile, width]. The values that share a byte lie half a block, a quarter or an eighth
apart, so they are the same place of different parts: packing them moves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def joined(parts, NUM_PARTS: tl.constexpr, C: tl.constexpr):
    """Parts of [tile, width] side by side, as one tensor [tile, NUM_PARTS * width].

    Each thread has whole rows of it until it is stored: one exchange through shared memory, in the dtype of the result,
    lets neighbouring threads write neighbouring bytes. Parts stored one by one would write half a memory sector each.
    """
    STAGES: tl.constexpr = _log2(NUM_PARTS)
    pieces = parts
    for stage in tl.static_range(STAGES):
        pairs = ()
        for pair in tl.static_range(NUM_PARTS >> (stage + 1)):
            both = tl.permute(tl.join(pieces[2 * pair], pieces[2 * pair + 1]), (0, 2, 1))
            pairs = pairs + (tl.reshape(both, (C.tile, 2 * C.width << stage)),)
        pieces = pairs
    return pieces[0]


@triton.jit
def _store_pieces(plane, pieces, blocks, valid, NUM_PIECES: tl.constexpr, C: tl.constexpr):
    """Write pieces of uint8 [tile, width], one after the other for each block."""
    offsets = blocks[:, None] * (NUM_PIECES * C.width) + tl.arange(0, NUM_PIECES * C.width)[None, :]
    tl.store(plane + offsets, joined(pieces, NUM_PIECES, C), mask=valid[:, None])


@triton.jit
def _load_pieces(plane, blocks, valid, NUM_PIECES: tl.constexpr, C: tl.constexpr):
    """Read pieces of uint8 [tile, width], one after the other for each block; two at a time, for wider reads."""
    row = plane + blocks[:, None] * (NUM_PIECES * C.width)
    pieces = ()
    if NUM_PIECES == 1:
        pieces = (tl.load(row + tl.arange(0, C.width)[None, :], mask=valid[:, None], other=0),)
    else:
        for pair in tl.static_range(NUM_PIECES // 2):
            offsets = 2 * pair * C.width + tl.arange(0, 2 * C.width)[None, :]
            both = tl.load(row + offsets, mask=valid[:, None], other=0)
            first, second = tl.split(tl.permute(tl.reshape(both, (C.tile, 2, C.width)), (0, 2, 1)))
            pieces = pieces + (first, second)
    return pieces


@triton.constexpr_function
def _shift(group):
    """Where in a byte the values of a half, quarter or eighth lie: halves WIDTH bits apart, and the last of them 4."""
    return ((group & 1) << 2) | (group & 2) | ((group >> 2) & 1)


@triton.jit
def store_plane(plane, codes, blocks, valid, FIRST_BIT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Write WIDTH bits, from FIRST_BIT up, of each code."""
    NUM_PIECES: tl.constexpr = C.parts * WIDTH // 8
    pieces = ()
    for piece in tl.static_range(NUM_PIECES):
        packed = (codes[piece] >> FIRST_BIT) & ((1 << WIDTH) - 1)
        for group in tl.static_range(1, 8 // WIDTH):
            bits = (codes[piece + group * NUM_PIECES] >> FIRST_BIT) & ((1 << WIDTH) - 1)
            packed = packed | (bits << _shift(group))
        pieces = pieces + (packed.to(tl.uint8),)
    _store_pieces(plane, pieces, blocks, valid, NUM_PIECES, C)


@triton.jit
def load_plane(plane, blocks, valid, WIDTH: tl.constexpr, C: tl.constexpr):
    """WIDTH bits of each code, as parts of int32 [tile, width]."""
    PARTS: tl.constexpr = C.parts
    NUM_PIECES: tl.constexpr = C.parts * WIDTH // 8
    pieces = _load_pieces(plane, blocks, valid, NUM_PIECES, C)
    parts = ()
    for part in tl.static_range(PARTS):
        bits = pieces[part % NUM_PIECES].to(tl.int32) >> _shift(part // NUM_PIECES)
        parts = parts + (bits & ((1 << WIDTH) - 1),)
    return parts


@triton.constexpr_function
def _widths(bits):
    """The bits of each plane of codes of so many bits, the lowest plane first, as `codec.layout.plane_bits` says."""
    return tuple(width for width in (4, 2, 1) if bits & width)


@triton.constexpr_function
def _first_bit(bits, width):
    """The lowest bit that the plane of `width` bits holds."""
    return bits & ~(2 * width - 1)


@triton.jit
def _plane(message, num_blocks, WIDTH: tl.constexpr, C: tl.constexpr):
    """Where the plane of WIDTH bits begins."""
    return message + num_blocks * (C.block_size * _first_bit(C.bits, WIDTH) // 8)


@triton.jit
def with_higher_bits(codes, higher, FIRST_BIT: tl.constexpr, C: tl.constexpr):
    """Each part of int32 [tile, width] with those of `higher` from FIRST_BIT up."""
    PARTS: tl.constexpr = C.parts
    both = ()
    for part in tl.static_range(PARTS):
        both = both + (codes[part] | (higher[part] << FIRST_BIT),)
    return both


@triton.jit
def store_codes(message, codes, blocks, valid, num_blocks, C: tl.constexpr):
    """Write one code a value, parts of uint8 or int32 [tile, width], packed."""
    if C.bits == 8:
        PARTS: tl.constexpr = C.parts
        pieces = ()
        for part in tl.static_range(PARTS):
            pieces = pieces + (codes[part].to(tl.uint8),)
        _store_pieces(message, pieces, blocks, valid, C.parts, C)
    else:
        WIDTHS: tl.constexpr = _widths(C.bits)
        for index in tl.static_range(len(WIDTHS)):
            plane = _plane(message, num_blocks, WIDTHS[index], C)
            store_plane(plane, codes, blocks, valid, _first_bit(C.bits, WIDTHS[index]), WIDTHS[index], C)


@triton.jit
def load_codes(message, blocks, valid, num_blocks, C: tl.constexpr):
    """The codes of the tile, parts of [tile, width]: uint8, or int32 with no other bits set."""
    if C.bits == 8:
        codes = _load_pieces(message, blocks, valid, C.parts, C)
    else:
        WIDTHS: tl.constexpr = _widths(C.bits)
        codes = load_plane(message, blocks, valid, WIDTHS[0], C)
        for index in tl.static_range(1, len(WIDTHS)):
            plane = _plane(message, num_blocks, WIDTHS[index], C)
            higher = load_plane(plane, blocks, valid, WIDTHS[index], C)
            codes = with_higher_bits(codes, higher, _first_bit(C.bits, WIDTHS[index]), C)
    return codes
