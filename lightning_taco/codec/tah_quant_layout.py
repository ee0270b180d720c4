"""Byte layout of a TAH-Quant message: six parts, each padded to a multiple of 16 bytes.

    [map][flags][ranges][plane of bits 0 and 1][plane of bit 2][plane of bit 3]

* map: one bit a token, set for those of 3 bits; eight a byte from the lowest bit up; each sample begins a new byte.
* flags: one byte a tile: bits 0 to 5 the pivot, bit 6 whether the tile is rotated, bit 7 whether it is constant.
* ranges: 4 bytes a tile: the scale in the low and the zero in the high 16 bits, or the fp32 value of a constant tile.
* planes: the codes of all tiles by bit, but for bit 3, of which only the tokens of 4 bits have one, in their order. A
  byte holds values that lie a quarter (bits 0 and 1) or an eighth (one bit) of a tile apart, as in `codec.layout`.

A tile is 64 channels of one token; a last one of fewer takes as many bytes. Sizes depend on the shape alone: of the
tokens of each sample a fixed number takes 3 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lightning_taco.codec.layout import ALIGNMENT_BYTES

TILE_SIZE = 64
FEW_BITS, MANY_BITS = 3, 4
RANGE_BYTES = 4
PLANE_BYTES = (TILE_SIZE * 2 // 8, TILE_SIZE // 8, TILE_SIZE // 8)
"""Bytes of a tile in each plane."""


@dataclass(frozen=True)
class TahQuantLayout:
    """Where things lie in the message of an activation ``[num_samples, tokens_per_sample, num_channels]``.

    Example:
        >>> layout = TahQuantLayout.of((4, 2048, 2560), low_entropy_share=0.2)
        >>> layout.few_per_sample, layout.tiles_per_token, layout.message_bytes
        (409, 40, 11601664)
        >>> round(8 * layout.message_bytes / (4 * 2048 * 2560), 3)
        4.426
    """

    num_samples: int
    tokens_per_sample: int
    num_channels: int
    few_per_sample: int
    """Tokens of 3 bits in each sample."""
    tiles_per_token: int
    map_row_bytes: int
    """Bytes of one sample's map."""
    flags_offset: int
    ranges_offset: int
    plane_offsets: tuple[int, int, int]
    message_bytes: int

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(shape: tuple[int, ...], low_entropy_share: float) -> TahQuantLayout:
        """The layout of a tensor of `shape`: the first dim are samples, the last channels, and tokens between.

        Without a first dim of samples, ``[tokens, channels]`` or ``[channels]``, it is one sample.
        """
        num_samples, tokens_per_sample, num_channels = samples_tokens_channels(shape)
        if 0 in (num_samples, tokens_per_sample, num_channels):
            return TahQuantLayout(num_samples, tokens_per_sample, num_channels, 0, 0, 0, 0, 0, (0, 0, 0), 0)
        # Rounded first: 0.29 * 100 is a little less than 29.
        few_per_sample = math.floor(round(low_entropy_share * tokens_per_sample, 6))
        tiles_per_token = -(-num_channels // TILE_SIZE)
        num_tiles = num_samples * tokens_per_sample * tiles_per_token
        map_row_bytes = -(-tokens_per_sample // 8)
        tiles_of_many = num_tiles - num_samples * few_per_sample * tiles_per_token
        sizes = [num_samples * map_row_bytes, num_tiles, RANGE_BYTES * num_tiles]
        sizes += [PLANE_BYTES[0] * num_tiles, PLANE_BYTES[1] * num_tiles, PLANE_BYTES[2] * tiles_of_many]
        _, flags, ranges, low, third, fourth, end = _offsets(sizes)
        return TahQuantLayout(
            num_samples=num_samples,
            tokens_per_sample=tokens_per_sample,
            num_channels=num_channels,
            few_per_sample=few_per_sample,
            tiles_per_token=tiles_per_token,
            map_row_bytes=map_row_bytes,
            flags_offset=flags,
            ranges_offset=ranges,
            plane_offsets=(low, third, fourth),
            message_bytes=end,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.num_samples * self.tokens_per_sample

    @property
    def num_tiles(self) -> int:
        """Tiles of all tokens."""
        return self.num_tokens * self.tiles_per_token


def samples_tokens_channels(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How many of each a tensor of `shape` has.

    >>> samples_tokens_channels((4, 7, 5, 3)), samples_tokens_channels((7, 3)), samples_tokens_channels(())
    ((4, 35, 3), (1, 7, 3), (1, 1, 1))
    """
    num_channels = shape[-1] if shape else 1
    num_samples = shape[0] if len(shape) > 2 else 1
    tokens = shape[1:-1] if len(shape) > 2 else shape[:-1]
    return num_samples, math.prod(tokens), num_channels


def _offsets(sizes: list[int]) -> list[int]:
    """Where each part of these bytes begins, and where the last one ends, each a multiple of 16."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return offsets
