"""How the codec's kernels pack codes of fewer than 8 bits into planes of bytes (see `codec.layout`), and read them.

A tile's codes come as parts of [tile, width]. The values that share a byte lie half a block, a quarter or an eighth
apart, so they are the same place of different parts: packing them moves nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_taco.codec.kernels_native import bytes_to_word, word_to_bytes

SECTOR_BYTES = 32
"""What memory reads and writes at once."""


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def joined(parts, NUM_PARTS: tl.constexpr, C: tl.constexpr):
    """Parts of [tile, n] side by side, as one tensor [tile, NUM_PARTS * n].

    Each thread has whole rows of it until it is stored: one exchange through shared memory, in the dtype of the result,
    lets neighbouring threads write neighbouring bytes. Parts stored one by one would write half a memory sector each.
    """
    STAGES: tl.constexpr = _log2(NUM_PARTS)
    pieces = parts
    for stage in tl.static_range(STAGES):
        pairs = ()
        for pair in tl.static_range(NUM_PARTS >> (stage + 1)):
            both = tl.permute(tl.join(pieces[2 * pair], pieces[2 * pair + 1]), (0, 2, 1))
            pairs = pairs + (tl.reshape(both, (C.tile, 2 * pieces[0].shape[1])),)
        pieces = pairs
    return pieces[0]


@triton.constexpr_function
def is_narrow(num_pieces, width, num_bits):
    """Whether one piece of so many values does not fill a sector of memory, whose rest is the next piece's."""
    return num_pieces > 1 and width * num_bits < 8 * SECTOR_BYTES


@triton.jit
def by_fours(values, C: tl.constexpr):
    """[tile, width] -> its first, second, third and fourth of each four neighbours, [tile, width / 4] each."""
    even, odd = tl.split(tl.reshape(values, (C.tile, C.width // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def from_fours(first, second, third, fourth, C: tl.constexpr):
    """The inverse of `by_fours`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (C.tile, C.width))


@triton.jit
def packed(codes, C: tl.constexpr):
    """The low bytes of codes, int32 [tile, width], four neighbours to a word: int32 [tile, width / 4]."""
    first, second, third, fourth = by_fours(codes, C)
    if C.is_nvidia:
        words = bytes_to_word(first, second, third, fourth)
    else:
        words = (first & 255) | ((second & 255) << 8) | ((third & 255) << 16) | (fourth << 24)
    return words


@triton.jit
def unpacked(words, ABOVE: tl.constexpr, C: tl.constexpr):
    """The bytes of words, int32 [tile, width / 4] -> int32 [tile, width], each with the three higher bytes of ABOVE."""
    if C.is_nvidia:
        first, second, third, fourth = word_to_bytes(words, ABOVE)
    else:
        first, second = (words & 255) | ABOVE, ((words >> 8) & 255) | ABOVE
        third, fourth = ((words >> 16) & 255) | ABOVE, ((words >> 24) & 255) | ABOVE
    return from_fours(first, second, third, fourth, C)


@triton.jit
def packed_mask(is_kept, C: tl.constexpr):
    """Whether is_kept [tile] holds, where `packed` codes of each block are, [tile, width / 4]."""
    first, _, _, _ = by_fours(tl.broadcast_to(tl.where(is_kept, 1, 0)[:, None], (C.tile, C.width)), C)
    return first != 0


@triton.jit
def _store_words(plane, words, blocks, valid, NUM_PIECES: tl.constexpr, C: tl.constexpr):
    """Write pieces of int32 [tile, width / 4], one after the other for each block."""
    WORDS: tl.constexpr = C.width // 4
    row = plane.to(tl.pointer_type(tl.int32)) + blocks[:, None] * (NUM_PIECES * WORDS)
    if is_narrow(NUM_PIECES, C.width, 8):
        whole = tl.arange(0, NUM_PIECES * WORDS)[None, :]
        tl.store(row + whole, joined(words, NUM_PIECES, C), mask=valid[:, None])
    else:
        for piece in tl.static_range(NUM_PIECES):
            tl.store(row + piece * WORDS + tl.arange(0, WORDS)[None, :], words[piece], mask=valid[:, None])


@triton.jit
def _load_words(plane, blocks, valid, NUM_PIECES: tl.constexpr, C: tl.constexpr):
    """Read pieces of int32 [tile, width / 4], one after the other for each block."""
    WORDS: tl.constexpr = C.width // 4
    row = plane.to(tl.pointer_type(tl.int32)) + blocks[:, None] * (NUM_PIECES * WORDS)
    words = ()
    if NUM_PIECES > 1 and C.width <= C.lane_values:
        # Two at a time, for wider reads of a thread that has all of a block.
        for pair in tl.static_range(NUM_PIECES // 2):
            offsets = 2 * pair * WORDS + tl.arange(0, 2 * WORDS)[None, :]
            both = tl.load(row + offsets, mask=valid[:, None], other=0)
            first, second = tl.split(tl.permute(tl.reshape(both, (C.tile, 2, WORDS)), (0, 2, 1)))
            words = words + (first, second)
    else:
        for piece in tl.static_range(NUM_PIECES):
            offsets = piece * WORDS + tl.arange(0, WORDS)[None, :]
            words = words + (tl.load(row + offsets, mask=valid[:, None], other=0),)
    return words


@triton.constexpr_function
def _shift(group):
    """Where in a byte the values of a half, quarter or eighth lie: halves WIDTH bits apart, and the last of them 4."""
    return ((group & 1) << 2) | (group & 2) | ((group >> 2) & 1)


@triton.constexpr_function
def _in_each_byte(width):
    """The lowest `width` bits of each byte of a word, as int32 has them."""
    mask = 0x01010101 * ((1 << width) - 1)
    return mask - (1 << 32) if mask >> 31 else mask


@triton.constexpr_function
def top_bits(num_bits):
    """The highest of `num_bits` bits in each byte of a word, as int32 has them."""
    mask = 0x01010101 << (num_bits - 1)
    return mask - (1 << 32) if mask >> 31 else mask


@triton.jit
def store_plane(plane, words, blocks, valid, FIRST_BIT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Write WIDTH bits, from FIRST_BIT up, of each code."""
    NUM_PIECES: tl.constexpr = C.parts * WIDTH // 8
    MASK: tl.constexpr = _in_each_byte(WIDTH)
    pieces = ()
    for piece in tl.static_range(NUM_PIECES):
        bits = (words[piece] >> FIRST_BIT) & MASK
        for group in tl.static_range(1, 8 // WIDTH):
            bits = bits | (((words[piece + group * NUM_PIECES] >> FIRST_BIT) & MASK) << _shift(group))
        pieces = pieces + (bits,)
    _store_words(plane, pieces, blocks, valid, NUM_PIECES, C)


@triton.jit
def load_plane(plane, blocks, valid, WIDTH: tl.constexpr, C: tl.constexpr):
    """WIDTH bits of each code, as parts of words, int32 [tile, width / 4]."""
    PARTS: tl.constexpr = C.parts
    NUM_PIECES: tl.constexpr = C.parts * WIDTH // 8
    pieces = _load_words(plane, blocks, valid, NUM_PIECES, C)
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + ((pieces[part % NUM_PIECES] >> _shift(part // NUM_PIECES)) & _in_each_byte(WIDTH),)
    return parts


@triton.constexpr_function
def _widths(bits):
    """The bits of each plane of codes of so many bits, the lowest plane first, as `codec.layout.plane_bits` says."""
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


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
    """Each part of words with those of `higher` from FIRST_BIT up of each byte."""
    PARTS: tl.constexpr = C.parts
    both = ()
    for part in tl.static_range(PARTS):
        both = both + (codes[part] | (higher[part] << FIRST_BIT),)
    return both


@triton.jit
def store_codes(message, words, blocks, valid, num_blocks, C: tl.constexpr):
    """Write one code a value, parts of words, int32 [tile, width / 4]."""
    WIDTHS: tl.constexpr = _widths(C.bits)
    for index in tl.static_range(len(WIDTHS)):
        plane = _plane(message, num_blocks, WIDTHS[index], C)
        store_plane(plane, words, blocks, valid, _first_bit(C.bits, WIDTHS[index]), WIDTHS[index], C)


@triton.jit
def load_codes(message, blocks, valid, num_blocks, C: tl.constexpr):
    """The codes of the tile, parts of words, int32 [tile, width / 4], with no other bits set."""
    WIDTHS: tl.constexpr = _widths(C.bits)
    words = load_plane(message, blocks, valid, WIDTHS[0], C)
    for index in tl.static_range(1, len(WIDTHS)):
        plane = _plane(message, num_blocks, WIDTHS[index], C)
        higher = load_plane(plane, blocks, valid, WIDTHS[index], C)
        words = with_higher_bits(words, higher, _first_bit(C.bits, WIDTHS[index]), C)
    return words
