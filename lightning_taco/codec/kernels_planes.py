"""How the codec's kernels pack codes of fewer than 8 bits into planes of bytes (see `codec.layout`), and read them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fold(values, WIDTH: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr):
    """[TILE, SIZE] -> [TILE, SIZE // 2]: the second half of each row above the first, WIDTH bits up."""
    halves = tl.permute(tl.reshape(values, (TILE, 2, SIZE // 2)), (0, 2, 1))
    first, second = tl.split(halves)
    return first | (second << WIDTH)


@triton.jit
def _store_plane(plane, values, blocks, valid, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Write WIDTH bits a value, uint8 [TILE, BLOCK], to BLOCK * WIDTH // 8 bytes a block."""
    if WIDTH == 1:
        values = _fold(values, 1, TILE, BLOCK)
        values = _fold(values, 2, TILE, BLOCK // 2)
        values = _fold(values, 4, TILE, BLOCK // 4)
    elif WIDTH == 2:
        values = _fold(values, 2, TILE, BLOCK)
        values = _fold(values, 4, TILE, BLOCK // 2)
    elif WIDTH == 4:
        values = _fold(values, 4, TILE, BLOCK)
    NUM_BYTES: tl.constexpr = BLOCK * WIDTH // 8
    tl.store(plane + blocks[:, None] * NUM_BYTES + tl.arange(0, NUM_BYTES)[None, :], values, mask=valid[:, None])


@triton.jit
def _load_plane(plane, blocks, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """WIDTH bits a value, uint8 [TILE, BLOCK]; each byte is read by all values that it holds."""
    NUM_BYTES: tl.constexpr = BLOCK * WIDTH // 8
    value = tl.arange(0, BLOCK)[None, :]
    bits = tl.load(plane + blocks[:, None] * NUM_BYTES + value % NUM_BYTES, mask=valid[:, None], other=0)
    if WIDTH < 8:
        part = value // NUM_BYTES
        # Folding puts the halves WIDTH bits apart, then the quarters, then (1 bit) the eighths; the last fold 4 apart.
        shift = ((part & 1) << 2) | (part & 2) | ((part >> 2) & 1)
        bits = (bits >> shift.to(tl.uint8)) & ((1 << WIDTH) - 1)
    return bits


@triton.jit
def store_codes(message, code, blocks, valid, num_blocks, C: tl.constexpr):
    """Write one code a value, uint8 [tile, block], packed."""
    if C.bits == C.low_bits:
        _store_plane(message, code, blocks, valid, C.bits, C.tile, C.block_size)
    else:
        low = code & ((1 << C.low_bits) - 1)
        _store_plane(message, low, blocks, valid, C.low_bits, C.tile, C.block_size)
        high_plane = message + num_blocks * C.low_plane_bytes
        _store_plane(high_plane, code >> C.low_bits, blocks, valid, C.bits - C.low_bits, C.tile, C.block_size)


@triton.jit
def load_codes(message, blocks, valid, num_blocks, C: tl.constexpr):
    """The codes of the tile, uint8 [tile, block]."""
    code = _load_plane(message, blocks, valid, C.low_bits, C.block_size)
    if C.bits > C.low_bits:
        high_plane = message + num_blocks * C.low_plane_bytes
        code = code | (_load_plane(high_plane, blocks, valid, C.bits - C.low_bits, C.block_size) << C.low_bits)
    return code
